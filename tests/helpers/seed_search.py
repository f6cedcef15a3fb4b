"""Trying many seeds from the command line: a progress bar, what failed, and how to go on after Ctrl-C."""

import logging
from collections.abc import Callable

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SHOWN = 20
_LINE_EVERY = 1000


class LeftOut(str):
    """Why a seed says nothing, in place of a problem."""


def try_seeds(run: Callable[[int], list[str]], module: str, first: int, count: int, stop: bool) -> None:
    """Call ``run`` with ``count`` seeds from ``first`` on, and exit with 1 if one of them found something.

    The last line is always ``N seeds, M failed, K left out``, and names the first seed that failed.
    """
    logging.disable(logging.CRITICAL)  # tiers are full and writes fail on purpose
    torch.set_num_threads(1)
    console, failed, left_out, done = Console(), [], 0, 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(module, total=count)
            for seed in range(first, first + count):
                problems = attempt(run, seed)
                done += 1
                progress.advance(task)
                if not console.is_terminal and done % _LINE_EVERY == 0:
                    console.print(f"{done} of {count}, {len(failed)} failed", markup=False, highlight=False)
                if problems and not failures(problems):
                    left_out += 1
                    console.print(f"seed {seed} is left out: {problems[0]}", markup=False, highlight=False)
                elif problems:
                    failed.append(seed)
                    if len(failed) <= _SHOWN:
                        console.print(f"seed {seed}: " + "\n    ".join(problems), markup=False, highlight=False)
                    if stop:
                        break
    except KeyboardInterrupt:
        console.print(
            f"Stopped. To go on: python -m {module} --first {first + done} --count {count - done}", markup=False
        )
    again = f"; again with: python -m {module} --seed {failed[0]}" if failed else ""
    console.print(f"{done} seeds from {first} on, {len(failed)} failed, {left_out} left out{again}", markup=False)
    raise typer.Exit(1 if failed else 0)


def failures(problems: list[str]) -> list[str]:
    """Those that a seed has failed for."""
    return [problem for problem in problems if not isinstance(problem, LeftOut)]


def attempt(run: Callable[[int], list[str]], seed: int) -> list[str]:
    """What ``run`` found with ``seed``; an error is a find, too."""
    try:
        return run(seed)
    except Exception as error:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = f" at {where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else ""
        return [f"{type(error).__name__}: {error}{place}"]
