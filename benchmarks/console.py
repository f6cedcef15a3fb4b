"""What the benchmarks' commands share: options of several values, and tables."""

from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hf_offload.cli.console import output
from hf_offload.errors import OffloadConfigError

T = TypeVar("T", int, float)


def names_of(text: str) -> list[str]:
    """The words of ``text``."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers_of(option: str, text: str, kind: type[T], example: str) -> list[T]:
    """The numbers of an option. Raises :class:`~hf_offload.errors.OffloadConfigError`."""
    try:
        return [kind(name) for name in names_of(text)]  # type: ignore[call-arg]
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise OffloadConfigError(f"{option} {text!r}: give {what} with commas between, such as {example}.") from error


def show_table(
    columns: Sequence[str],
    lines: Iterable[Sequence[str]],
    *,
    left: Collection[str],
    title: str | None = None,
    caption: str | None = None,
) -> None:
    """Print a table whose columns are aligned to the right, but for those in ``left``."""
    table = Table(
        title=None if title is None else escape(title),
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for line in lines:
        table.add_row(*map(escape, line))
    output().print(table, highlight=False)
