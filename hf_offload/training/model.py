"""The model of a recipe, and its tokenizer: one that exists, or one that is trained on the data."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.pretrained.errors import loading
from hf_offload.pretrained.load import create_from_config, from_pretrained
from hf_offload.settings.recipe_data import DataRecipe, HubData
from hf_offload.settings.recipes import Recipe
from hf_offload.settings.schema import with_checked
from hf_offload.settings.shown import LONGEST
from hf_offload.settings.text_files import reason_of
from hf_offload.training.data import find_files, load_parts, reading
from hf_offload.training.tasks.table import find_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_model(
    recipe: Recipe,
    tokenizer: "PreTrainedTokenizerBase | None",
    device: torch.device | None = None,
    labels: Sequence[str] | None = None,
) -> torch.nn.Module:
    """The recipe's model, with a class for each of ``labels``, checked against the tokenizer and the length of a block.

    Random weights are drawn on ``device``, which for a large model takes an accelerator a moment and a CPU minutes. With
    ``params``, weights are on their tier as soon as they are made.
    """
    import transformers

    model = recipe.model
    # The default decides once the optimizer is known.
    offload = with_checked(recipe.offload, params=recipe.offload.params or "none")
    auto: Any = getattr(transformers, find_task(recipe).auto_model)
    options: dict[str, Any] = {"dtype": getattr(torch, model.dtype)}
    if model.attention is not None:
        options["attn_implementation"] = model.attention
    classes: dict[str, Any] = {}
    if labels is not None:
        classes = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    if model.name is not None:
        if labels is not None:
            options |= {
                "num_labels": len(labels),
                "ignore_mismatched_sizes": True,
                **classes,
            }  # a head for other classes
        with loading(f"{recipe.name}, section model", model.name):
            built: Any = from_pretrained(auto, model.name, offload=offload, **options)
    else:
        try:
            values = _config_values(recipe, tokenizer) | classes
            config = transformers.AutoConfig.for_model(str(model.architecture), **values)
            if model.task == "seq2seq-lm" and getattr(config, "decoder_start_token_id", None) is None:
                config.decoder_start_token_id = config.pad_token_id
            with torch.device(device) if device is not None and device.type != "cpu" else contextlib.nullcontext():
                built = create_from_config(auto, config, config=offload, **options)
        except OffloadError:
            raise
        except Exception as error:  # whatever a model raises for a configuration that it cannot take
            raise OffloadConfigError(f"{recipe.name}, section model: {reason_of(error, 2 * LONGEST)}") from error
    if labels is not None and tokenizer is not None and getattr(built.config, "pad_token_id", None) is None:
        built.config.pad_token_id = tokenizer.pad_token_id  # decoders look at the last token that is none
    rows = cast(torch.Tensor, built.get_input_embeddings().weight).shape[0]
    if tokenizer is not None and len(tokenizer) > rows:
        raise OffloadConfigError(
            f"The tokenizer has {len(tokenizer)} tokens, but the model has embeddings for {rows}: raise "
            "model.config.vocab_size or take the tokenizer that belongs to the model."
        )
    longest = getattr(built.config, "max_position_embeddings", None)
    if isinstance(longest, int) and recipe.data.sequence_length > longest:
        raise OffloadConfigError(
            f"data.sequence_length={recipe.data.sequence_length} is longer than the {longest} positions of the model."
        )
    return built


def _config_values(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, Any]:
    values = dict(recipe.model.config)
    if tokenizer is None:
        # The architecture's own may lie outside a smaller vocabulary.
        return {"bos_token_id": None, "eos_token_id": None, **values}
    values.setdefault("vocab_size", recipe.data.train_bpe or len(tokenizer))
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values.setdefault(token, getattr(tokenizer, token))
    return values


logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
BPE_SAMPLE_BYTES = 16 << 20
"""A tokenizer is trained on the first part of the data: more hardly changes it, and a stream has no end."""


def build_tokenizer(data: DataRecipe, model_name: str | None, cache_dir: Path) -> "PreTrainedTokenizerBase":
    """The recipe's tokenizer: a named one, the model's, or one trained on the data and kept in ``cache_dir``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if data.train_bpe is None:
        name = data.tokenizer or model_name
        with loading("data.tokenizer", str(name)):
            return AutoTokenizer.from_pretrained(name)
    kept = cache_dir / f"tokenizer-{_fingerprint(data)}"
    if not kept.is_dir():
        tokenizer = _train_bpe(data, cache_dir)
        # Written under another name and renamed: a run that is stopped here leaves no incomplete tokenizer.
        unfinished = kept.with_name(f"{kept.name}.{os.getpid()}")
        tokenizer.save_pretrained(unfinished)
        try:
            unfinished.rename(kept)
        except OSError:  # another run of the same recipe was faster
            shutil.rmtree(unfinished)
    with loading("data.tokenizer", str(kept), " Remove it: the tokenizer is trained again."):
        found = PreTrainedTokenizerFast.from_pretrained(kept)
        if found.eos_token != END_OF_TEXT:
            raise ValueError(f"it has no token {END_OF_TEXT}, which every trained one has")
        return found


def _fingerprint(data: DataRecipe) -> str:
    """Changes with anything that can change the trained tokenizer."""
    if isinstance(data.hub, HubData):
        source: Any = [data.hub.name, data.hub.config, data.hub.split]
    else:
        source = [[str(path), (stat := path.stat()).st_size, stat.st_mtime_ns] for path in find_files(data)]
    held_back = data.validation if isinstance(data.validation, float) else None
    key = json.dumps([source, held_back, data.text_columns(), data.train_bpe, BPE_SAMPLE_BYTES])
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _train_bpe(data: DataRecipe, cache_dir: Path) -> "PreTrainedTokenizerBase":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    columns = data.text_columns()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=data.train_bpe or 0,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows, _ = load_parts(data, columns, cache_dir)
    with reading("The data cannot be read"):
        tokenizer.train_from_iterator(_sample(rows, columns), trainer)
    if tokenizer.get_vocab_size() < (data.train_bpe or 0):
        logger.warning(
            f"data.tokenizer asks for {data.train_bpe} tokens; the data yields only {tokenizer.get_vocab_size()}."
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def _sample(rows: Any, columns: tuple[str, ...]) -> Iterator[str]:
    size = 0
    for row in rows:
        for column in columns:
            for text in _texts(row[column]):
                if size >= BPE_SAMPLE_BYTES:
                    return
                size += len(text.encode(errors="replace"))
                yield text


def _texts(value: Any) -> Iterator[str]:
    """The text of a column, or what each turn of a conversation says."""
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, list):
        for turn in value:
            yield from _texts(turn.get("content", turn.get("value")) if isinstance(turn, dict) else None)
