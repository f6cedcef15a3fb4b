"""``offload="auto"`` within budgets, next to every simple way over kinds and tiers: is each budget kept, were the predictions
right, and would a simple way be faster?
"""

import contextlib
import dataclasses
import json as json_format
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from benchmarks.budgets.families import FAMILIES
from benchmarks.budgets.meter import metered
from benchmarks.budgets.runs import AUTO, SIMPLE, TURNS, Family, Job, first_steps
from benchmarks.budgets.table import CAPTION, COLUMNS, PAIRED, BudgetRow, fastest, peak_of, row_of, texts
from benchmarks.console import names_of, numbers_of, show_table
from hf_offload.allocator import environment_with
from hf_offload.cli.console import clear_errors, messages, progress_bar
from hf_offload.cli.options import Json
from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.settings.load import choose
from hf_offload.settings.outputs import check_output_folder

_FILE = "budgets.json"


def budgets(
    families: Annotated[str, typer.Option(help=f"Families, with commas between: {', '.join(FAMILIES)}.")] = ",".join(
        FAMILIES
    ),
    shares: Annotated[str, typer.Option(help="Budgets, in per cent of the peak in memory.")] = "80,50,30,15,8",
    layers: Annotated[int, typer.Option(min=2, help="Layers of each model.")] = 12,
    width: Annotated[int, typer.Option(min=64, help="Its width.")] = 256,
    rows: Annotated[int, typer.Option(min=1, help="Rows a step.")] = 4,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a row.")] = 128,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often to run each budget, in turns with the fastest simple ways.")
    ] = 1,
    directory: Annotated[Path | None, typer.Option(help="Where files go. Default: the temporary folder.")] = None,
    output: Annotated[Path, typer.Option(help="Folder of all runs. Those that are in it are not run again.")] = Path(
        "runs/budgets"
    ),
    json: Json = False,
) -> None:
    """Train under memory budgets: are they kept, were the predictions right, would a simple way be faster?"""
    with clear_errors():
        check_output_folder(output, "--output", _FILE)
        file = output / _FILE
        names = names_of(families)
        for name in names:
            choose("family", name, FAMILIES)
        wanted = [share / 100 for share in numbers_of("--shares", shares, float, "80,50,30")]
        if not wanted or not all(0 < share <= 1 for share in wanted):
            raise OffloadConfigError(f"--shares {shares!r}: give per cent of the peak in memory, such as 80,50,30.")
        about = {"layers": layers, "width": width, "rows": rows, "tokens": tokens}
        runs = _read(file, about)
        with progress_bar() as progress:
            bar = progress.add_task("starting", total=len(names) * (len(SIMPLE) + rounds * len(wanted) * (1 + PAIRED)))
            for number in range(rounds):
                for name in names:
                    family = Family(name, layers, width, rows, tokens, str(directory or tempfile.gettempdir()))
                    for found in _round(family, number, wanted, runs):
                        runs.append(found)
                        _write(file, about, runs)
                        what = f"{name}, round {number + 1}, {found['way']}"
                        progress.update(bar, advance=1, description=escape(what))
        found_rows = [_row(name, share, runs) for name in names for share in wanted]
        _write(file, about, runs, found_rows)
    if json:
        typer.echo(json_format.dumps([dataclasses.asdict(row) for row in found_rows], indent=2))
        return
    show_table(COLUMNS, map(texts, found_rows), left=("model",), caption=CAPTION)
    messages().print(f"wrote {file}", highlight=False, soft_wrap=True)


def _round(
    family: Family, number: int, shares: Sequence[float], runs: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The runs of one family that are missing: every simple way once, and then, in each round, every budget next to the
    simple ways that were the fastest of those that fit.
    """
    simple = _missing(family, 0, [Job(way) for way in SIMPLE], runs)
    if simple:
        with _process(family, simple) as process:
            yield from _results(family, 0, process)
    mine = [one for one in runs if one["family"] == family.name]
    for share in shares:
        budget = budget_of(share, peak_of(mine))
        jobs = [Job(AUTO, budget), *(Job(way, budget) for way in fastest(mine, budget))]
        if _missing(family, number, jobs, runs):
            yield from _in_turns(family, number, jobs)


def _in_turns(family: Family, number: int, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Trainings in a process each, whose last steps alternate: a machine with other work to do is the same for all."""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_process(family, [job], in_turns=True)) for job in jobs]
        for process in processes:
            _train(process, 0)  # none of them starts while another one measures
        for job, process in zip(jobs, processes, strict=True):
            _train(process, first_steps(job))
        for turn in range(TURNS):
            for process in processes if (number + turn) % 2 == 0 else reversed(processes):
                _train(process, 1)
        found: list[dict[str, Any]] = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            found += _results(family, number, process)
    return found


def _train(process: "subprocess.Popen[str]", steps: int) -> None:
    """Let it take so many steps, and wait for them."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, and its results will tell why
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
    process.stdout.readline()


def _missing(family: Family, number: int, jobs: Sequence[Job], runs: Sequence[dict[str, Any]]) -> list[Job]:
    there = {
        (one["way"], one["budget_bytes"]) for one in runs if one["family"] == family.name and one["round"] == number
    }
    return [job for job in jobs if (job.way, job.budget_bytes) not in there]


@contextlib.contextmanager
def _process(family: Family, jobs: Sequence[Job], in_turns: bool = False) -> Iterator["subprocess.Popen[str]"]:
    """A process that is counted and trains ``jobs``. What it writes of errors is raised if it ends with one."""
    asked = {
        "family": {key: value for key, value in dataclasses.asdict(family).items() if key != "directory"},
        "directory": family.directory,
        "jobs": [dataclasses.asdict(job) for job in jobs],
        "in_turns": in_turns,
    }
    with tempfile.TemporaryDirectory() as folder:
        environment = metered(environment_with("auto") | {"HF_HUB_OFFLINE": "1"}, Path(folder))
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.budgets.runs", json_format.dumps(asked)]
        pipe = subprocess.PIPE
        with (
            (Path(folder) / "errors").open("w+") as errors,
            subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
        ):
            yield process
            if process.wait():
                errors.seek(0)
                raise OffloadError(f"{family.name}: the runs ended with {process.returncode}: {errors.read()[-2000:]}")


def _results(family: Family, number: int, process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield {"family": family.name, "round": number, **json_format.loads(line)}


def budget_of(share: float, peak_bytes: int) -> int:
    """The budget that is a ``share`` of the peak in memory."""
    return int(share * peak_bytes)


def _row(name: str, share: float, runs: Sequence[dict[str, Any]]) -> BudgetRow:
    mine = [one for one in runs if one["family"] == name]
    return row_of(name, share, budget_of(share, peak_of(mine)), mine)


def _read(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = json_format.loads(path.read_text(encoding="utf-8"))
    if found["about"] != about:
        raise OffloadConfigError(f"--output: {path} holds runs of {found['about']}: name another folder.")
    runs: list[dict[str, Any]] = found["runs"]
    return runs


def _write(path: Path, about: dict[str, Any], runs: Sequence[dict[str, Any]], rows: Sequence[BudgetRow] = ()) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"about": about, "rows": [dataclasses.asdict(row) for row in rows], "runs": runs}
    path.write_text(json_format.dumps(found) + "\n", encoding="utf-8")
