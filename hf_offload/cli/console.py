"""The one way in which commands print: results on standard output, everything else on standard error; and how they end."""

import contextlib
import gc
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from hf_offload.errors import EXIT_INTERRUPTED, OffloadError

_UNLIMITED_WIDTH = 10_000
_SENTENCE_WIDTH = 28
"""Characters below which a column of sentences is a ladder of words, and paragraphs are easier to read."""


def output() -> Console:
    """For results."""
    return Console()


def messages() -> Console:
    """For everything that is not a result."""
    return Console(stderr=True)


def write(text: str, style: str = "", *, wrap: bool = False) -> None:
    """Print a line of a result as it is; with ``wrap``, words that do not fit into the terminal go to the next line."""
    if style or wrap:
        output().print(_text(text, style), soft_wrap=not wrap)
    else:
        typer.echo(_text(text, "").plain)


def write_json(values: Any) -> None:
    """Print ``values`` as JSON."""
    typer.echo(json.dumps(values, indent=2, default=str))


def note(text: str, style: str = "") -> None:
    """Print a line on standard error."""
    messages().print(_text(text, style), soft_wrap=True)


def _text(text: str, style: str) -> Text:
    # Paths may hold bytes that no terminal shows.
    return Text(text.encode(errors="backslashreplace").decode(), style)


def make_table(title: str, columns: Sequence[str], caption: str = "", *, left: Sequence[str] = ()) -> Table:
    """A table of numbers behind a first column of names; the columns ``left`` hold words, and the last of them whole
    sentences. Columns without names have no header. Print it with :func:`print_table`.
    """
    table = Table(
        title=escape(title) or None, box=SIMPLE_HEAD, caption=caption or None, caption_justify="left",
        show_header=any(columns),
    )  # fmt: skip
    for index, name in enumerate(columns):
        words = index == 0 or name in left
        sentences = words and 0 < index == len(columns) - 1
        table.add_column(escape(name), justify="left" if words else "right", no_wrap=not sentences)
    return table


def print_table(table: Table) -> None:
    """Print any table of a command. Nothing is cut: only columns that may wrap are narrowed, no further than to their
    longest word, and where that is still too wide for the terminal, each row becomes a paragraph.
    """
    console = output()
    natural = [_width_of(column, str.splitlines) for column in table.columns]
    for column, width in zip(table.columns, natural, strict=True):
        column.width = width  # Rich fits columns without a width into the terminal by cutting them
        if not column.no_wrap:
            sentences = min(_SENTENCE_WIDTH, width) if column.justify == "left" else 0
            column.width = max(_width_of(column, str.split), sentences)
    unlimited = console.options.update(max_width=_UNLIMITED_WIDTH)
    spare = console.width - Measurement.get(console, unlimited, table).maximum
    if spare >= 0:
        for column, width in zip(table.columns, natural, strict=True):
            wider = min(spare, width - (column.width or 0))
            column.width, spare = (column.width or 0) + wider, spare - wider
        console.print(table, highlight=False)
        return
    if table.title:
        console.print(table.title, highlight=False)
    headers = [f"{column.header}: " if column.header else "" for column in table.columns]
    for name, *values in zip(*(column.cells for column in table.columns), strict=True):
        console.print(f"  {name}", highlight=False, soft_wrap=True)
        named = (
            f"{header}{value}" for header, value in zip(headers[1:], values, strict=True) if value not in ("", "-")
        )
        console.print(Padding(", ".join(named), (0, 0, 0, 6)), highlight=False)
    if table.caption:
        console.print(f"\n{table.caption}", highlight=False)
    console.print()


def _width_of(column: Column, split: Callable[[str], list[str]]) -> int:
    """Characters of the longest of the parts, words or lines, that ``split`` makes of a column's header and cells."""
    texts = (Text.from_markup(str(cell)).plain for cell in (column.header, *column.cells))
    return max((cell_len(part) for text in texts for part in split(text)), default=0)


@contextlib.contextmanager
def loading_torch() -> Iterator[None]:
    """For imports that load torch, which takes seconds: a spinner, and no search for garbage in what they make.

    What is loaded stays: looking through it again and again would take a fifth of a plan's time.
    """
    is_first = "torch" not in sys.modules
    if is_first:
        gc.disable()
    try:
        with spinner("Loading PyTorch"):
            yield
    finally:
        if is_first:
            gc.freeze()
            gc.enable()


def progress_bar(*, counted: bool = True) -> Progress:
    """What runs and for how long, on a terminal; with ``counted``, how much of it is done, too."""
    console = messages()
    counters: list[ProgressColumn] = [BarColumn(), MofNCompleteColumn()] if counted else []
    columns = (TextColumn("{task.description}"), *counters, TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


@contextlib.contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Show ``text`` next to a spinner, on a terminal, while what is inside runs; the function changes the text."""
    with messages().status(escape(text)) as status:
        yield lambda text: status.update(escape(text))


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Show the package's own errors as one message without a traceback, and end with a code that says which kind.

    Anything else is a defect and keeps its traceback.
    """
    try:
        yield
    except OffloadError as error:
        note(str(error), "bold red")
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        note("Stopped.", "yellow")
        raise typer.Exit(EXIT_INTERRUPTED) from error


class _LogLines(logging.Handler):
    """Writes each record as one line, however long: in a file, a line that is wrapped cannot be searched."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"{record.levelname:<8} {self.format(record)}")


@contextlib.contextmanager
def visible_log() -> Iterator[None]:
    """Show the package's log while a command runs, unless it is shown already; other libraries keep their own settings."""
    log = logging.getLogger("hf_offload")
    if log.handlers:
        yield
        return
    level, propagate = log.level, log.propagate
    handler = _LogLines()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
