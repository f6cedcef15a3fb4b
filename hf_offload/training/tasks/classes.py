"""Sequence classification: one text or a pair of texts, and one of several classes."""

from collections.abc import Sequence
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.shown import cropped, shown
from hf_offload.training.data import kind_of
from hf_offload.training.tasks.task import PAD_TO_MULTIPLE, Collator, Rows, Setup, map_rows, texts_of

_SHOWN = 10


def find_labels(rows: Rows, column: str) -> tuple[str, ...]:
    """Names of the classes: those of the data set, or the sorted values of ``column``.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for values that are no classes, and for a stream without names.
    """
    names = getattr((rows.features or {}).get(column), "names", None)
    if names is not None:
        return tuple(names)
    if not hasattr(rows, "unique"):
        raise OffloadConfigError(
            f"data.label_column={shown(column)}: the classes of a stream are only known at its end: drop data.streaming."
        )
    try:
        values = rows.unique(column)
    except Exception as error:  # of lists, mappings and more there is no set
        raise OffloadConfigError(
            f"data.label_column={shown(column)} must hold the class of every row, but holds "
            f"{kind_of((rows.features or {})[column])}: text or whole numbers are needed."
        ) from error
    for value in values:
        if not isinstance(value, (str, int)):
            why = "a row has none" if value is None else f"{shown(value)} is neither text nor a whole number"
            raise OffloadConfigError(f"data.label_column={shown(column)} must hold the class of every row: {why}.")
    if len(values) < 2:
        raise OffloadConfigError(
            f"data.label_column={shown(column)} holds only one class, {shown(values[0])}: at least two are needed."
        )
    # Text and numbers are not mixed: a column has one type.
    return tuple(str(value) for value in sorted(values))


def make_rows(rows: Rows, setup: Setup, where: str) -> Rows:
    """Rows with ``input_ids``, ``attention_mask``, where the tokenizer makes them ``token_type_ids``, and ``labels``, the
    number of the class.
    """
    names = getattr((rows.features or {}).get(setup.data.label_column), "names", None)
    return map_rows(
        rows,
        _encode,
        tokenizer=setup.tokenizer,
        columns=setup.data.text_columns(),
        label=setup.data.label_column,
        labels=setup.labels,
        names=names,
        length=setup.data.sequence_length,
        where=where,
    )


def make_collator(setup: Setup, _model: Any) -> Collator:
    """Transformers' own."""
    from transformers import DataCollatorWithPadding

    return DataCollatorWithPadding(setup.tokenizer, pad_to_multiple_of=PAD_TO_MULTIPLE)


def _encode(
    batch: dict[str, list[Any]],
    tokenizer: Any,
    columns: Sequence[str],
    label: str,
    labels: Sequence[str],
    names: Sequence[str] | None,
    length: int,
    where: str,
) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(labels)}
    given = batch[label]
    if names is not None:  # the data set counts its classes itself; -1 hides one
        given = [names[value] if value is not None and 0 <= value < len(names) else value for value in given]
    unseen = sorted({shown(value) for value in given if str(value) not in numbers})
    if unseen:
        raise OffloadConfigError(
            f"data.label_column={shown(label)}: {where} has classes that are not in the training data: {_few(unseen)}. "
            f"In the training data: {_few(labels)}."
        )
    texts = [texts_of(batch, column, where) for column in columns]
    return {**tokenizer(*texts, truncation=True, max_length=length), "labels": [numbers[str(value)] for value in given]}


def _few(names: Sequence[str]) -> str:
    return ", ".join([*map(cropped, names[:_SHOWN]), *(["..."] if len(names) > _SHOWN else [])])
