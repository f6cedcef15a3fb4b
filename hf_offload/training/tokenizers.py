"""The tokenizer of a recipe: one that exists, or one that is trained on the data."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_offload.pretrained.errors import loading
from hf_offload.settings.recipe_data import DataRecipe, HubData
from hf_offload.training.data import find_files, load_parts, reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
