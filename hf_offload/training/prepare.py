"""From the rows of a recipe's data to rows for its model."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.recipes import Recipe
from hf_offload.settings.shown import cropped
from hf_offload.training.data import column_names, load_parts
from hf_offload.training.tasks.classes import find_labels
from hf_offload.training.tasks.table import find_task
from hf_offload.training.tasks.task import Setup, Task, logger

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
