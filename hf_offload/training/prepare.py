"""Rows for the model of a recipe: those of its data, or random token ids, for measuring memory and time."""

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.recipes import Recipe
from hf_offload.settings.shown import cropped
from hf_offload.training.data import column_names, load_parts
from hf_offload.training.tasks.classes import find_labels
from hf_offload.training.tasks.table import find_task
from hf_offload.training.tasks.task import MASKED_SHARE, NO_LABEL, Setup, Task, logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_offload.training.tasks.task import Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a Trainer is given of data, and what made it."""

    task: Task
    setup: Setup
    train: "Rows"
    validation: "Rows | None"


def prepare_data(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", cache_dir: Path) -> Prepared:
    """Load the recipe's rows and make rows for its task of them, which ``datasets`` keeps in ``cache_dir``."""
    task, data = find_task(recipe), recipe.data
    rows, held_back = load_parts(data, data.columns(), cache_dir)
    unread = [column for column in column_names(rows) if column not in data.columns()]
    if unread:
        logger.info(f"Not read: the columns {', '.join(map(cropped, unread))} of the training data.")
    if task.pads and tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise OffloadConfigError("The tokenizer has neither a token for padding nor one for the end of text.")
        tokenizer.pad_token = tokenizer.eos_token  # padding has neither attention nor labels, so any token will do
    labels = find_labels(rows, str(data.label_column)) if task.has_classes else None
    setup = Setup(data=data, tokenizer=tokenizer, labels=labels)
    return Prepared(
        task=task,
        setup=setup,
        train=_some(task.rows(rows, setup, "the training data"), "the training data"),
        validation=None
        if held_back is None
        else _some(task.rows(held_back, setup, "data.validation"), "data.validation"),
    )


def _some(rows: "Rows", where: str) -> "Rows":
    """``rows``, of which there is one at least."""
    if next(iter(rows), None) is None:
        raise OffloadConfigError(f"No row can be made of {where}: is every text of it empty?")
    return rows


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
            count = max(1, round(MASKED_SHARE * self._length))
            kept = torch.randperm(self._length, generator=generator, device="cpu")[:count]
            labels = torch.full_like(input_ids, NO_LABEL)
            labels[kept] = input_ids[kept]
        else:
            labels = input_ids.clone()
        return {"input_ids": input_ids, "labels": labels}

    def _draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(self._vocabulary, (self._length,), generator=generator, device="cpu")
