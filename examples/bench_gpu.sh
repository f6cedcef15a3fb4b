#!/usr/bin/env bash
# Everything that is worth measuring on a CUDA machine, in less than nine minutes: tests of the CUDA path, step time and
# memory of Llama 3.2 1B at three sequence lengths, what fits in 24 and 48 GB, and a profile of one offloaded step.
#
#   examples/bench_gpu.sh [--dry-run]
#
# --dry-run needs no GPU: it prints every command and lets each check itself without running anything.
# Results go to $RESULTS (default model_cards/bench/gpu), with the machine's description. Other variables: PYTHON, and
# OFFLOAD_DIR, where activations go: a directory on a local NVMe drive with 60 GB free (default: the temporary folder).
#
# Each command has a share of the time. One that exceeds it is stopped as by Ctrl-C and writes what it has.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python}
RESULTS=${RESULTS:-model_cards/bench/gpu}
OFFLOAD_DIR=${OFFLOAD_DIR:-${TMPDIR:-/tmp}/hf_offload_bench}
MODEL=llama-1b
STRATEGIES=keep,recompute,recompute+offload,trl,ours:ram,ours:ssd
# Without the vocabulary of 128256: its logits, which nothing offloads, would be most of what fits or does not.
SMALL_HEAD=model.config.vocab_size=8192
DEADLINE_S=500
WORK=runs/bench_gpu
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1

DRY=
case ${1:-} in
    --dry-run) DRY=--dry-run ;;
    "") ;;
    *) echo "usage: $0 [--dry-run]" >&2; exit 2 ;;
esac
failed=0

# A folder that only a real run makes is checked as the one that it would be made in.
there=$OFFLOAD_DIR
until [[ -e $there ]]; do
    there=$(dirname -- "$there")
done

# bench SECONDS ARGUMENTS...: one benchmark command, for at most its share and what is left of the whole.
bench() {
    local share=$1 left=$((DEADLINE_S - SECONDS)) directory=offload.directory
    shift
    echo "+ hf-offload bench $* $directory=$OFFLOAD_DIR   (at most $share s)"
    if [[ $DRY ]]; then
        "$PYTHON" -m hf_offload bench "$@" "$directory=$there" --dry-run || failed=1
    elif ((left < 20)); then
        echo "skipped: no time is left" >&2
        failed=1
    else
        timeout --signal=INT --kill-after=30 "$((share < left ? share : left))" \
            "$PYTHON" -m hf_offload bench "$@" "$directory=$OFFLOAD_DIR" || failed=1
    fi
}

if [[ $DRY ]]; then
    echo "+ pytest tests/gpu   (at most 60 s)"
    test -d tests/gpu || failed=1
else
    mkdir -p "$RESULTS" "$OFFLOAD_DIR" "$WORK"
    timeout --signal=INT --kill-after=30 60 "$PYTHON" -m pytest -q tests/gpu || failed=1
fi

# Short sequences first: should time run out, what is left out is one slow cell.
bench 165 steps $MODEL --batch 1 --sequence 2048,8192 --steps 5 \
    --strategies "$STRATEGIES" --output "$WORK/steps"
bench 110 steps $MODEL --batch 1 --sequence 32768 --steps 3 \
    --strategies "$STRATEGIES" --output "$WORK/steps_long"
for limit in 24GB 48GB; do
    bench 60 limits $MODEL $SMALL_HEAD --vary sequence --sequence 16384 --most 131072 \
        --strategies keep,recompute,ours:ram --memory-limit $limit --output "$WORK/limits_$limit"
done
bench 45 steps $MODEL --batch 1 --sequence 2048 --steps 3 \
    --strategies keep,ours:ssd --trace --output "$WORK/trace"

[[ $DRY ]] && exit $failed

"$PYTHON" -m hf_offload doctor --json --directory "$OFFLOAD_DIR" --no-measure > "$RESULTS/machine.json" || failed=1
command -v nvidia-smi > /dev/null && nvidia-smi > "$RESULTS/nvidia-smi.txt"
for run in steps steps_long limits_24GB limits_48GB trace; do
    for file in "$WORK/$run"/*.{md,json,csv,png} "$WORK/$run"/traces/*ours_ssd*.json.gz; do
        [[ -f $file ]] && cp "$file" "$RESULTS/${run}_$(basename "$file")"
    done
done
echo "results in $RESULTS after $SECONDS s"
exit $failed
