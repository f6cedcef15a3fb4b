"""What the benchmarks' commands share: options of several values, and tables."""

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hf_offload.cli.console import output
from hf_offload.errors import OffloadConfigError

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def names_of(text: str) -> list[str]:
    """The words of ``text``."""
    return [name.strip() for name in text.split(",") if name.strip()]


def seeds_of(text: str) -> list[int]:
    """The whole numbers of ``--seeds``. Raises :class:`~hf_offload.errors.OffloadConfigError`."""
    try:
        return [int(name) for name in names_of(text)]
    except ValueError as error:
        raise OffloadConfigError(f"--seeds {text!r}: give whole numbers with commas between, such as 0,1,2.") from error


def rates_of(text: str) -> list[float]:
    """The numbers of ``--rates``. Raises :class:`~hf_offload.errors.OffloadConfigError`."""
    try:
        return [float(name) for name in names_of(text)]
    except ValueError as error:
        raise OffloadConfigError(f"--rates {text!r}: give numbers with commas between, such as 0.001,0.01.") from error


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
