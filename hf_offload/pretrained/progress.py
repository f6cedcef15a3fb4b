"""How far a model has been made, in the terminal."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is called with the bytes that have come and those expected. It is shown in terminals only, in place of the
    one that transformers shows for weights.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from transformers.utils import logging

    def without_weights(factory: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("desc") == "Loading weights":
            factory = logging.EmptyTqdm
        return factory(*args, **kwargs) if former is None else former(factory, args, kwargs)

    console = Console(stderr=True)
    columns = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    shown = console.is_terminal and logging.is_progress_bar_enabled()
    bar = Progress(TextColumn("{task.description}"), *columns, console=console, disable=not shown)
    task = None

    def report(done: int, expected: int) -> None:
        nonlocal task
        if task is None:
            bar.start()
            task = bar.add_task(description, total=expected)
        bar.update(task, completed=done, total=expected)

    former = logging.set_tqdm_hook(without_weights)
    try:
        yield report
        if task is not None:
            bar.update(task, total=bar.tasks[0].completed)  # a tied weight was expected twice
    finally:
        logging.set_tqdm_hook(former)
        bar.stop()
