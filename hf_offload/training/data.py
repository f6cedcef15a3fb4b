"""Text in, blocks of tokens out: every source goes through one ``datasets`` loader, at once or streaming."""

import glob
import hashlib
import json
import logging
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.recipes import DataRecipe, HubData

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
BPE_SAMPLE_BYTES = 16 << 20
"""A tokenizer is trained on the first part of the data: more hardly changes it, and a stream has no end."""
MASKED_SHARE = 0.15
NO_LABEL = -100
DOCUMENTS_PER_BATCH = 1000
"""Documents that are joined and cut together; the rest that fills no block is dropped once for each such batch."""

_READERS = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".md": "text",
    ".parquet": "parquet",
    ".py": "text",
    ".rst": "text",
    ".txt": "text",
}
_NO_PROGRAM_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_files(max_bytes: int | None = None) -> list[Path]:
    """Python files of the standard library in a fixed order, without tests.

    With ``max_bytes``, the list ends with the file that reaches that many bytes.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        (path for path in root.rglob("*.py") if not _NO_PROGRAM_TEXT.intersection(path.relative_to(root).parts)),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    if not files:
        raise OffloadConfigError(f"data.source=python-stdlib: {root} holds no .py files. Use data.files instead.")
    if max_bytes is None:
        return files
    chosen, size = [], 0
    for path in files:
        if size >= max_bytes:
            break
        chosen.append(path)
        size += path.stat().st_size
    return chosen


def load_text(data: DataRecipe, cache_dir: Path) -> "Dataset | IterableDataset":
    """The recipe's documents, one a row, the text in ``data.text_column``."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    where: dict[str, Any] = {"streaming": data.streaming, "cache_dir": str(cache_dir)}
    if isinstance(data.hub, HubData):
        try:
            dataset = load_dataset(data.hub.name, data.hub.config, split=data.hub.split, **where)
        except (DatasetsError, OSError, ValueError) as error:
            raise OffloadConfigError(f"data.hub: {data.hub.name} cannot be loaded: {error}") from error
    else:
        files = _files(data)
        readers = {_READERS[path.suffix.lower()] for path in files}
        if len(readers) > 1:
            raise OffloadConfigError(f"data.files mixes {' and '.join(sorted(readers))} files: give files of one kind.")
        (reader,) = readers
        if reader == "text":
            where |= {"sample_by": "document", "encoding_errors": "replace"}
        try:
            dataset = load_dataset(reader, data_files=[str(path) for path in files], split="train", **where)
        except (DatasetsError, OSError, ValueError) as error:
            raise OffloadConfigError(f"data.files cannot be read as {reader}: {error.__cause__ or error}") from error
    columns = column_names(dataset)
    if data.text_column not in columns:
        raise OffloadConfigError(
            f"data.text_column={data.text_column!r}: the data has no such column. It has: {', '.join(columns)}."
        )
    return dataset


def column_names(dataset: "Dataset | IterableDataset") -> list[str]:
    """The dataset's columns; those of a stream may be known only from its first row."""
    return dataset.column_names or list(next(iter(dataset), {}))


def build_tokenizer(data: DataRecipe, model_name: str | None, cache_dir: Path) -> "PreTrainedTokenizerBase":
    """The recipe's tokenizer: a named one, the model's, or one trained on the data and kept in ``cache_dir``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if data.train_bpe is None:
        name = data.tokenizer or model_name
        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise OffloadConfigError(f"data.tokenizer: {name!r} cannot be loaded: {error}") from error
    kept = cache_dir / f"tokenizer-{_fingerprint(data)}"
    if not kept.is_dir():
        tokenizer = _train_bpe(data, cache_dir)
        # Written beside and renamed, so that a run that is stopped here leaves no half tokenizer behind.
        unfinished = kept.with_name(f"{kept.name}.{os.getpid()}")
        tokenizer.save_pretrained(unfinished)
        try:
            unfinished.rename(kept)
        except OSError:  # another run of the same recipe was faster
            shutil.rmtree(unfinished)
    return PreTrainedTokenizerFast.from_pretrained(kept)


def load_blocks(data: DataRecipe, tokenizer: "PreTrainedTokenizerBase", cache_dir: Path) -> "Dataset | IterableDataset":
    """Rows with ``input_ids``: ``data.sequence_length`` token ids of documents joined by the end-of-text token."""
    text = load_text(data, cache_dir)
    blocks = text.map(
        _pack,
        batched=True,
        batch_size=DOCUMENTS_PER_BATCH,
        remove_columns=column_names(text),
        fn_kwargs={"tokenizer": tokenizer, "column": data.text_column, "length": data.sequence_length},
    )
    if not data.streaming and len(blocks) == 0:
        raise OffloadConfigError(
            f"The data is shorter than one block of {data.sequence_length} tokens: lower data.sequence_length, or add "
            "data."
        )
    return blocks


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack blocks into ``input_ids`` and ``labels``, both int64 of shape (batch, sequence); without labels of their own,
    the labels of blocks are their ids.

    There is no attention mask, since no token is padding: attention kernels are faster without one.
    """
    if "labels" in rows[0]:
        return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
    input_ids = torch.tensor([row["input_ids"] for row in rows], dtype=torch.long)
    return {"input_ids": input_ids, "labels": input_ids.clone()}


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random token ids, each drawn from the seed and its own number: the same in every process and order.

    Labels are the ids themselves (``causal-lm``), the ids at 15 % of the places (``masked-lm``; elsewhere -100, which
    losses leave out), or as many ids drawn anew (``seq2seq-lm``).
    """

    def __init__(self, rows: int, length: int, vocabulary: int, seed: int, task: str):
        self._rows = rows
        self._length = length
        self._vocabulary = vocabulary
        self._seed = seed
        self._task = task

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        # Of a seed, the generator takes 32 bits.
        digest = hashlib.sha256(f"{self._seed} {index}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
        input_ids = self._draw(generator)
        if self._task == "seq2seq-lm":
            labels = self._draw(generator)
        elif self._task == "masked-lm":
            # Never none: the mean over no label is not a number.
            kept = torch.randperm(self._length, generator=generator)[: max(1, round(MASKED_SHARE * self._length))]
            labels = torch.full_like(input_ids, NO_LABEL)
            labels[kept] = input_ids[kept]
        else:
            labels = input_ids.clone()
        return {"input_ids": input_ids, "labels": labels}

    def _draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(self._vocabulary, (self._length,), generator=generator)


def _pack(batch: dict[str, list[Any]], tokenizer: Any, column: str, length: int) -> dict[str, list[list[int]]]:
    texts = [text for text in batch[column] if text]
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    if texts:
        # `verbose` would warn that a document is longer than the model's context: it is cut into blocks below.
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for document in encoded["input_ids"]:
            ids += document
            ids += ends
    return {"input_ids": [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]}


def _files(data: DataRecipe) -> list[Path]:
    if data.source is not None:
        return stdlib_files(data.max_bytes)  # type: ignore[arg-type]  # DataRecipe made it an int
    found: list[Path] = []
    for pattern in data.files or ():
        matches = [Path(path) for path in sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))]  # noqa: PTH207  absolute patterns
        matches = [path for path in matches if path.is_file()]
        if not matches:
            raise OffloadConfigError(f"data.files: there is no file {pattern!r} (seen from {Path.cwd()}).")
        found += matches
    for path in found:
        if path.suffix.lower() not in _READERS:
            raise OffloadConfigError(f"data.files: {path} is of no known kind. Known: {', '.join(sorted(_READERS))}.")
    return found


def _fingerprint(data: DataRecipe) -> str:
    """Changes with anything that can change the trained tokenizer."""
    if isinstance(data.hub, HubData):
        source: Any = [data.hub.name, data.hub.config, data.hub.split]
    else:
        source = [[str(path), (stat := path.stat()).st_size, stat.st_mtime_ns] for path in _files(data)]
    key = json.dumps([source, data.text_column, data.train_bpe, BPE_SAMPLE_BYTES])
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _train_bpe(data: DataRecipe, cache_dir: Path) -> "PreTrainedTokenizerBase":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=data.train_bpe or 0,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(load_text(data, cache_dir), data.text_column), trainer)
    if tokenizer.get_vocab_size() < (data.train_bpe or 0):
        logger.warning(
            f"data.tokenizer asks for {data.train_bpe} tokens; the data yields only {tokenizer.get_vocab_size()}."
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def _sample(text: Any, column: str) -> Iterator[str]:
    size = 0
    for row in text:
        if size >= BPE_SAMPLE_BYTES:
            return
        if row[column]:
            size += len(row[column].encode(errors="replace"))
            yield row[column]
