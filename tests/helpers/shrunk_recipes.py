"""Shipped recipes made tiny: a small model of the same architecture, and rows made up here."""

import json
import os

from hf_offload.settings.recipe_data import RANDOM_TOKENS
from hf_offload.settings.recipes import load_recipe

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
    "opt": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
    },
    "mistral": _LLAMA,
    "qwen3": _LLAMA,
}
SENTENCE = "the saved tensors of a block go to the drive and come back before backward needs them"


def save_tokenizer(folder):
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
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<end>", eos_token="<end>", pad_token="<end>"
    ).save_pretrained(folder)
    return folder


def one_of_each(names):
    """The first recipe of each task and memory mode, and of each tier, with and without sampling."""
    chosen = {}
    for name in names:
        recipe = load_recipe(name)
        mode, tier, sampling = recipe.offload.memory_mode, recipe.offload.tier, recipe.offload.sampling is not None
        chosen.setdefault((recipe.model.task, mode), name)
        chosen.setdefault((tier, sampling), name)
    return [name for name in names if name in chosen.values()]


def rows_for(data):
    """Rows with the columns that the recipe reads."""
    for number in range(ROWS):
        texts = {name: f"{SENTENCE} {number}" for name in (data.text_column or "text", data.text_pair_column) if name}
        pairs = {name: f"{SENTENCE} {number}" for name in (data.source_column, data.target_column) if name}
        answers = {name: f"{SENTENCE} {number}" for name in (data.prompt_column, data.answer_column) if name}
        row = texts | pairs | answers
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
    changes["offload.min_bytes"] = 256
    if "rank" in (recipe.offload.memory_mode_kwargs or {}):
        changes["memory.rank"] = RANK
    if recipe.training.get("fp16"):  # of GPUs alone
        changes |= {"training.fp16": None, "training.bf16": True}
    if recipe.model.dtype == "float16":
        changes["model.dtype"] = "bfloat16"
    if recipe.data.source != RANDOM_TOKENS:
        file = folder / "rows.jsonl"
        if not file.exists():  # of several processes, another may read it by now
            own = folder / f"rows-{os.getpid()}.jsonl"
            own.write_text("".join(json.dumps(row) + "\n" for row in rows_for(recipe.data)))
            own.replace(file)
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
