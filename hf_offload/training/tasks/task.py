"""The description of a task; the table of tasks is in :mod:`hf_offload.training.tasks.table`."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.recipe_data import DataRecipe
from hf_offload.settings.shown import shown

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Rows: TypeAlias = "Dataset | IterableDataset"

NO_LABEL = -100
"""Where losses do not look."""
MASKED_SHARE = 0.15
"""Of the tokens of a masked language model."""
PAD_TO_MULTIPLE = 8
"""Rows are padded to few different lengths: kernels like it, and a plan for one shape of batch serves more batches."""

Collator = Callable[[list[dict[str, Any]]], Mapping[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What rows are made with."""

    data: DataRecipe
    tokenizer: "PreTrainedTokenizerBase"
    labels: Sequence[str] | None = None
    """Names of the classes, in the order of their numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One kind of training.

    Attributes:
        auto_model: Name of transformers' class that finds the model.
        rows: Makes rows for the model from rows of the data; its third argument says which data, for errors.
        collator: Makes batches of them.
        check_model: Refuses a model that cannot do it.
        pads: Whether rows of a batch have different lengths.
        has_classes: Whether the model is built for the classes found in the data.
        seq2seq: Whether transformers' Seq2SeqTrainer trains it.
    """

    auto_model: str
    rows: Callable[[Rows, Setup, str], Rows]
    collator: Callable[[Setup, Any], Collator]
    check_model: Callable[[Setup, Any], None] | None = None
    pads: bool = True
    has_classes: bool = False
    seq2seq: bool = False


def texts_of(batch: Mapping[str, Sequence[Any]], column: str, where: str) -> list[str]:
    """The texts of ``column``; empty where there is none. Raises :class:`OffloadConfigError` for other values, which a stream
    may hold anywhere.
    """
    for value in batch[column]:
        if value is not None and not isinstance(value, str):
            raise OffloadConfigError(f"The column {shown(column)} of {where} holds {shown(value)}: text is needed.")
    return [value or "" for value in batch[column]]


def map_rows(rows: Rows, function: Callable[..., Any], **arguments: Any) -> Rows:
    """``function`` of batches of ``rows``; its result takes the place of all columns."""
    from hf_offload.training.data import column_names

    try:
        return rows.map(function, batched=True, remove_columns=column_names(rows), fn_kwargs=arguments)
    except UnicodeDecodeError as error:  # Arrow does not look at the text of data sets in its own format
        raise OffloadConfigError(
            f"Text of {arguments['where']} cannot be read: it is not UTF-8 ({error.reason})."
        ) from error


def report_dropped(before: Rows, after: Rows, where: str, why: str) -> None:
    """Log how many rows were left out, and raise if none is left; the length of a stream is unknown."""
    if not hasattr(before, "__len__"):
        return
    if len(after) == 0:
        raise OffloadConfigError(f"No row of {where} can be used: {why}.")
    if len(after) < len(before):
        logger.warning(f"{len(before) - len(after)} of {len(before)} rows of {where} are left out: {why}.")
