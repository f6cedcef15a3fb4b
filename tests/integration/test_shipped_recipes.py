"""Every shipped recipe trains two steps: as it is, but with a tiny model of its architecture and rows made up here."""

import dataclasses
import json
import math

import pytest

from hf_offload.settings.recipe_data import RANDOM_TOKENS
from hf_offload.settings.recipe_files import recipe_names
from hf_offload.settings.recipes import load_recipe
from hf_offload.training.run import run_recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft uses the older name

VOCABULARY = 300
LENGTH = 64
BATCH = 2
ROWS = 12
RANK = 4
_LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_BERT = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
TINY = {
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4},
    "gpt_neox": _BERT,
    "bert": _BERT,
    "roberta": _BERT,
    "t5": {"num_layers": 2, "num_decoder_layers": 2, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4},
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3": _LLAMA,
}
WORDS = 2 * math.log(VOCABULARY)
MOST = {"causal-lm": WORDS, "masked-lm": WORDS, "sequence-classification": 2 * math.log(2), "seq2seq-lm": 50}
"""Loss of a new model: twice that of one that knows nothing; but T5's new output head has large logits."""
SENTENCE = "the saved tensors of a block go to the drive and come back before backward needs them"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """One tokenizer for all: training one takes longer than two steps."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([SENTENCE], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<end>", eos_token="<end>", pad_token="<end>"
    ).save_pretrained(folder)
    return folder


def rows_for(data):
    """Rows with the columns that the recipe reads."""
    for number in range(ROWS):
        texts = {name: f"{SENTENCE} {number}" for name in (data.text_column or "text", data.text_pair_column) if name}
        pairs = {name: f"{SENTENCE} {number}" for name in (data.source_column, data.target_column) if name}
        row = texts | pairs
        if data.label_column is not None:
            row[data.label_column] = number % 2
        if data.messages_column is not None:
            turns = (("user", "where?"), ("assistant", "to the drive"))
            row[data.messages_column] = [{"role": role, "content": text} for role, text in turns]
        yield row


def shrunk(name, folder, tokenizer):
    """The changes to a recipe that make it tiny, and nothing else of it different."""
    recipe = load_recipe(name)
    changes = {
        "model.name": None,
        "data.sequence_length": LENGTH,
        "data.cache_dir": str(folder / "data"),
        "training.output_dir": str(folder / "out"),
        "training.max_steps": 2,
        "training.per_device_train_batch_size": BATCH,
        "training.gradient_accumulation_steps": 1,
        "training.save_strategy": "no",
        "training.eval_strategy": None,
        "training.disable_tqdm": True,
        "training.use_cpu": True,
        "training.warmup_steps": 0,  # the first step would be none
    }
    shape = recipe.model.published
    architecture = recipe.model.architecture or shape.architecture
    tiny = TINY[architecture] | {"vocab_size": VOCABULARY}
    positions = {"gpt2": "n_positions", "t5": None}.get(architecture, "max_position_embeddings")
    changes |= {f"model.config.{key}": value for key, value in tiny.items()}
    if positions is not None:
        changes[f"model.config.{positions}"] = LENGTH + 2  # RoBERTa counts from 2
    if recipe.offload.tier in ("ssd", "auto"):
        changes["offload.directory"] = str(folder)
    changes["offload.min_offload_bytes"] = 256
    if "rank" in recipe.memory:
        changes["memory.rank"] = RANK
    if recipe.training.get("fp16"):  # of GPUs alone
        changes |= {"training.fp16": None, "training.bf16": True}
    if recipe.model.dtype == "float16":
        changes["model.dtype"] = "bfloat16"
    if recipe.data.source != RANDOM_TOKENS:
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows_for(recipe.data)))
        changes |= {"data.source": None, "data.max_bytes": None, "data.hub": None}
        changes |= {"data.files": str(file), "data.tokenizer": str(tokenizer)}
        if recipe.data.validation is not None:
            changes["data.validation"] = str(file)
        if recipe.data.target_length is not None:
            changes["data.target_length"] = LENGTH // 2
        if recipe.evaluation.generation is not None:
            changes["evaluation.generation.max_new_tokens"] = 2
    given = {"data.source", "data.max_bytes", "data.hub", "training.eval_strategy", "training.fp16", "model.name"}
    return [f"{key}={json.dumps(value)}" for key, value in changes.items() if value is not None or key in given]


def about(recipe):
    """What a recipe is about: everything that says how memory is spent, and the task."""
    offload = dataclasses.replace(recipe.offload, directory=None, min_offload_bytes=0)
    memory = {key: value for key, value in recipe.memory.items() if key != "rank"}
    again = recipe.training.get("gradient_checkpointing")
    data = [name for name, value in dataclasses.asdict(recipe.data).items() if name.endswith("_column") and value]
    return recipe.model.task, offload, memory, again, data, recipe.data.packing, recipe.evaluation.metrics


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_trains_two_steps(name, tmp_path, tokenizer):
    changes = shrunk(name, tmp_path, tokenizer)
    recipe = load_recipe(name, changes)
    assert about(recipe) == about(load_recipe(name))
    report = run_recipe(recipe, save=False)
    assert report.completed
    assert report.steps == 2
    assert all(0 < loss < MOST[recipe.model.task] for loss in report.losses)
    if recipe.offload.tier in ("ssd", "ram"):
        assert report.offload["offloaded_bytes"] > 0
    if recipe.data.validation is not None:
        assert {f"eval_{metric}" for metric in recipe.evaluation.metrics_for(recipe.model.task)} <= set(report.metrics)
