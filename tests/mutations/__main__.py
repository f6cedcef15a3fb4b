"""``make mutations``: breaks the package in every way that ``*.patch`` describes; a test has to notice each.

Every mutation is applied to a copy of the tree in a temporary folder, and only the tests that it names run there. One that
nobody notices makes this fail. Before that, the tests run on the tree as it is: whoever fails there proves nothing.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.mutations.patches import ROOT, Mutation, Sources, all_mutations

_COPIED = ("hf_offload", "tests", "recipes", "pyproject.toml", "README.md")
_TIMEOUT_S = 240


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Only these mutations.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write a page with the table here, as Markdown.")] = None,
    baseline: Annotated[bool, typer.Option(help="Try the tests on the unbroken tree first.")] = True,
) -> None:
    """Check that every deliberate breakage is noticed."""
    mutations = [mutation for mutation in all_mutations() if not names or mutation.name in names]
    console = Console()
    rows: list[tuple[Mutation, str, str]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(mutations) + baseline)
        try:
            if baseline:
                progress.update(task, description="the tree as it is")
                _check_unbroken(mutations)
                progress.advance(task)
            for mutation in mutations:
                progress.update(task, description=mutation.name)
                rows.append((mutation, *_try(mutation)))
                if not console.is_terminal:
                    console.print(mutation.name, rows[-1][1], rows[-1][2], markup=False, highlight=False)
                progress.advance(task)
        except KeyboardInterrupt:
            console.print(f"Stopped after {len(rows)} of {len(mutations)} mutations.")
    _show(console, rows)
    if output is not None and len(rows) == len(mutations):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(_page(rows))
    survivors = [mutation.name for mutation, caught, _ in rows if not caught]
    if survivors:
        console.print(f"Nobody noticed: {', '.join(survivors)}", markup=False)
    raise typer.Exit(1 if survivors or len(rows) < len(mutations) else 0)


def _check_unbroken(mutations: list[Mutation]) -> None:
    most = {}
    for module, count in filter(None, (mutation.seeds for mutation in mutations)):
        most[module] = max(count, most.get(module, 0))
    commands = [_seeds(module, count) for module, count in most.items()]
    tests = sorted({mutation.tests for mutation in mutations if mutation.seeds is None})
    if tests:
        commands.append(_pytest(*tests))
    for command in commands:
        code, text = _run(command, ROOT, 4 * _TIMEOUT_S)
        if code != 0:
            raise SystemExit(f"{' '.join(command)} fails although nothing is broken:\n{text[-3000:]}")


def _try(mutation: Mutation) -> tuple[str, str]:
    """By what the mutation was caught (nothing if by nobody), and how many seeds that took."""
    with tempfile.TemporaryDirectory(prefix="hf_offload-mutation-") as folder:
        tree = Path(folder)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, tree / name)
        try:
            changed = mutation.changed(Sources(tree / "hf_offload"))
        except LookupError as error:
            raise SystemExit(str(error)) from None
        for path, text in changed.items():
            path.write_text(text)
        seeds = mutation.seeds
        command = _pytest(mutation.tests) if seeds is None else [*_seeds(*seeds), "--stop"]
        code, text = _run(command, tree, _TIMEOUT_S)
    if code == 0:
        return "", ""
    if seeds is None:
        # A thread that is stuck in what was broken may abort the process at its end, after the test has failed.
        if code in (1, None) or (code < 0 and " failed" in text):
            return mutation.tests.rsplit("/", 1)[-1], ""
        raise SystemExit(f"{mutation.name}: pytest could not run {mutation.tests}:\n{text[-3000:]}")
    found = re.search(r"again with: python -m tests\.\w+ --seed (\d+)", " ".join(text.split()))
    if found is None and code is not None:
        raise SystemExit(f"{mutation.name}: {' '.join(command)} could not run:\n{text[-3000:]}")
    return seeds[0], str(int(found[1]) + 1) if found else "hangs"


def _seeds(module: str, count: int) -> list[str]:
    return [sys.executable, "-m", module, "--count", str(count)]


def _pytest(*tests: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not full",  # what `make test` runs
        "--timeout=60",
        *tests,
    ]


def _run(command: list[str], tree: Path, timeout_s: float) -> tuple[int | None, str]:
    """Exit code (None if it hung) and output of a command in ``tree``."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        return code, log.read()


def _show(console: Console, rows: list[tuple[Mutation, str, str]]) -> None:
    table = Table("mutation", "rule that it breaks", "caught by", "seeds")
    for mutation, caught, seeds in rows:
        table.add_row(mutation.name, escape(mutation.rule), escape(caught) or "[bold red]nobody", seeds)
    console.print(table)


def _page(rows: list[tuple[Mutation, str, str]]) -> str:
    lines = [
        "# Deliberate breakages",
        "",
        "This page lists the deliberate breakages of the package that tests have to notice, with the rule that each",
        f"breaks. There are {len(rows)}, each a file in `tests/mutations`; `make mutations` applies them one at a time and",
        "writes this page. Where `tests.races` or `tests.fuzz` noticed one, the last column says how many seeds they took.",
        "",
        "| mutation | rule that it breaks | caught by | seeds |",
        "|---|---|---|---|",
    ]
    for mutation, caught, seeds in rows:
        lines.append(f"| `{mutation.name}` | {mutation.rule} | {f'`{caught}`' if caught else '**nobody**'} | {seeds} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
