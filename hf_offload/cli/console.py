"""What commands share: where they write, and how they end."""

import contextlib
import logging
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from hf_offload.cli.exit_codes import EXIT_INTERRUPTED, EXIT_REFUSED
from hf_offload.errors import OffloadError


def output() -> Console:
    """For results."""
    return Console()


def messages() -> Console:
    """For everything beside results."""
    return Console(stderr=True)


def progress_bar(*, counted: bool = True) -> Progress:
    """What is going on and for how long; with ``counted``, how much of it is done, too."""
    counters: list[ProgressColumn] = [BarColumn(), MofNCompleteColumn()] if counted else []
    return Progress(TextColumn("{task.description}"), *counters, TimeElapsedColumn(), console=messages())


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Show the package's own errors as one message without a traceback, and end with a code that says which kind.

    Anything else is a defect and keeps its traceback.
    """
    try:
        yield
    except OffloadError as error:
        # Paths may hold bytes that no terminal shows.
        text = str(error).encode(errors="backslashreplace").decode()
        messages().print(f"[bold red]{escape(text)}[/]", highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_REFUSED) from error
    except KeyboardInterrupt as error:
        messages().print("[yellow]Stopped.[/]")
        raise typer.Exit(EXIT_INTERRUPTED) from error


def show_log(level: int = logging.INFO) -> logging.Handler | None:
    """Show the package's log from now on; other libraries keep their own settings.

    Returns None if it is shown already: one command may run inside another.
    """
    log = logging.getLogger("hf_offload")
    if any(isinstance(handler, RichHandler) for handler in log.handlers):
        return None
    handler = RichHandler(console=messages(), show_path=False, show_time=False)
    log.addHandler(handler)
    log.setLevel(level)
    log.propagate = False
    return handler


@contextlib.contextmanager
def visible_log(shown: int = logging.INFO) -> Iterator[None]:
    """Show the package's log while a command runs."""
    log = logging.getLogger("hf_offload")
    level, propagate = log.level, log.propagate
    handler = show_log(shown)
    try:
        yield
    finally:
        if handler is not None:
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagate
