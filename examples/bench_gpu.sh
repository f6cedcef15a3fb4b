#!/usr/bin/env bash
# Everything that is worth measuring on a CUDA machine, in less than nine minutes: tests of the CUDA path, a check of this
# machine, what a saved tensor costs in Python, step time and memory of Llama 3.2 1B at three sequence lengths, what fits in
# 24 and 48 GB, and a profile of one offloaded step.
#
#   examples/bench_gpu.sh [--dry-run]
#
# --dry-run needs no GPU: it prints every command and lets each check itself without running anything.
# Results go to $RESULTS (default model_cards/bench/gpu), with the machine's description. Other variables: PYTHON;
# OFFLOAD_DIR, where activations go: a directory on a local NVMe drive with 60 GB free (default: the temporary folder); and
# RAM_BUDGET, the most memory that ours:ram pins (default: half of what is available, and no more than 64 GiB).
#
# Each command has a share of the time. One that exceeds it is stopped as by Ctrl-C and writes what it has.
#
# Others run as their authors have it: transformers checkpoints every layer with use_reentrant=False, and with offload=true
# keeps their inputs in pinned memory; TRL pins whatever is 1024 bytes or more and copies on a stream of its own, five
# tensors at a time. hf_offload/bench/strategies.py says where each setting comes from.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python}
RESULTS=${RESULTS:-model_cards/bench/gpu}
OFFLOAD_DIR=${OFFLOAD_DIR:-${TMPDIR:-/tmp}/hf_offload_bench}
MODEL=llama-1b
STRATEGIES=baseline,recompute,recompute+offload,trl,ours:ram,ours:ssd
# TRL takes no limit for what it pins. Of 32768 tokens autograd saves some 64 GB, which only a large machine can do without.
LONG_STRATEGIES=baseline,recompute,recompute+offload,ours:ram,ours:ssd
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

available_mib=$(awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)
RAM_BUDGET=${RAM_BUDGET:-$((available_mib / 2 < 65536 ? available_mib / 2 : 65536))MiB}
((available_mib >= 160 * 1024)) && LONG_STRATEGIES+=,trl

# A folder that only a real run makes is checked as the one that it would be made in.
there=$OFFLOAD_DIR
until [[ -e $there ]]; do
    there=$(dirname -- "$there")
done

# run SECONDS ARGUMENTS...: python -m ARGUMENTS, for at most its share and what is left of the whole.
run() {
    local share=$1 left=$((DEADLINE_S - SECONDS))
    shift
    if ((left < 20)); then
        echo "skipped: no time is left" >&2
        failed=1
    else
        timeout --signal=INT --kill-after=30 "$((share < left ? share : left))" "$PYTHON" -m "$@" || failed=1
    fi
}

# facts SECONDS NAME ARGUMENTS...: what a command of ours prints as JSON, as a result of that name.
facts() {
    local share=$1 name=$2
    shift 2
    echo "+ hf-offload $* > $RESULTS/$name.json   (at most $share s)"
    if [[ $DRY ]]; then
        # These have nothing to list. Asked for help, they still refuse options that they do not have.
        "$PYTHON" -m hf_offload "$@" --help > /dev/null || failed=1
    else
        run "$share" hf_offload "$@" > "$RESULTS/$name.json"
    fi
}

# bench SECONDS MODULE ARGUMENTS...: one benchmark command. Nothing of ours pins memory without a limit.
bench() {
    local share=$1
    shift
    echo "+ python -m $* offload.ram_budget=$RAM_BUDGET offload.directory=$OFFLOAD_DIR   (at most $share s)"
    set -- "$@" "offload.ram_budget=$RAM_BUDGET" "offload.directory=$there"
    if [[ $DRY ]]; then
        "$PYTHON" -m "$@" --dry-run || failed=1
    else
        run "$share" "$@"
    fi
}

# What is wrong is not worth measuring: tests come first, and the checks of this machine.
echo "+ pytest tests/gpu   (at most 90 s)"
if [[ $DRY ]]; then
    test -d tests/gpu || failed=1
else
    mkdir -p "$RESULTS" "$OFFLOAD_DIR" "$WORK"
    there=$OFFLOAD_DIR
    run 90 pytest -q tests/gpu
fi
facts 10 machine doctor --json --no-measure --directory "$there"
facts 45 check doctor --check --json --directory "$there"
facts 10 overhead bench overhead --json

# Short sequences first: should time run out, what is left out is one slow cell.
for length in 2048 8192; do
    bench 70 hf_offload bench steps $MODEL --batch 1 --sequence $length --steps 5 \
        --strategies "$STRATEGIES" --output "$WORK/steps_$length"
done
bench 90 hf_offload bench steps $MODEL --batch 1 --sequence 32768 --steps 3 \
    --strategies "$LONG_STRATEGIES" --output "$WORK/steps_long"
for limit in 24GB 48GB; do
    bench 42 benchmarks limits $MODEL $SMALL_HEAD --vary sequence --sequence 16384 --most 131072 \
        --strategies baseline,recompute,ours:ram --memory-limit $limit --output "$WORK/limits_$limit"
done

[[ $DRY ]] && exit $failed

command -v nvidia-smi > /dev/null && nvidia-smi > "$RESULTS/nvidia-smi.txt"
for run in steps_2048 steps_8192 steps_long limits_24GB limits_48GB; do
    for file in "$WORK/$run"/*.{md,json,png}; do
        [[ -f $file ]] && cp "$file" "$RESULTS/${run}_$(basename "$file")"
    done
done
echo "results in $RESULTS after $SECONDS s"
exit $failed
