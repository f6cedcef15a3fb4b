"""``hf-offload bench budgets``."""

import dataclasses
import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hf_offload.cli.bench_options import check_recipes
from hf_offload.cli.console import (
    EXIT_INTERRUPTED,
    EXIT_PROBLEM,
    clear_errors,
    messages,
    output,
    progress_bar,
    visible_log,
)
from hf_offload.errors import OffloadConfigError
from hf_offload.settings.outputs import check_output_folder


def budgets(
    shapes: Annotated[str, typer.Argument(help="Presets, recipes or recipes' files, with commas between.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes.")] = None,
    shares: Annotated[
        str, typer.Option(help="Budgets, in per cent of the activation peak with everything kept.")
    ] = "80,50,30",
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size. Default: the recipe's.")] = None,
    sequence: Annotated[int | None, typer.Option(min=2, help="Sequence length. Default: the recipe's.")] = None,
    steps: Annotated[int, typer.Option(min=6, help="Steps of each run.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="How often to run each; they take turns.")] = 1,
    allocator: Annotated[str, typer.Option(help="CPU memory allocator of all runs.")] = "auto",
    output_dir: Annotated[Path, typer.Option("--output", help="Folder for every run's report.")] = Path("runs/budgets"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Train under memory budgets: are they kept, were the predictions right, would a simple way be faster?"""
    with clear_errors(), visible_log():
        check_recipes(shapes, overrides, steps, allocator)
        check_output_folder(output_dir, "--output", "budgets.json")
        from hf_offload.bench.budgets import COLUMNS, is_refusal, run_budgets, texts  # slow: it loads torch
        from hf_offload.bench.steps import plan_steps
        from hf_offload.bench.strategies import parse_strategies

        plan = plan_steps(
            shapes,
            overrides or [],
            parse_strategies("keep"),
            batches=[] if batch is None else [batch],
            sequences=[] if sequence is None else [sequence],
            steps=steps,
            rounds=rounds,
            output=output_dir,
            allocator=allocator,
        )
        with progress_bar() as progress:
            task = progress.add_task("starting", total=None)

            def on_start(name: str, done: int, total: int) -> None:
                progress.update(task, completed=done, total=total, description=f"running {escape(name)}")

            rows, results = run_budgets(plan, _shares(shares), on_start)
    interrupted = any(one.interrupted for one in results)
    text = json_format.dumps([dataclasses.asdict(row) for row in rows], indent=2)
    plan.output.mkdir(parents=True, exist_ok=True)
    (plan.output / "budgets.json").write_text(text + "\n", encoding="utf-8")
    if json:
        typer.echo(text)
    else:
        table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "case" else "right", overflow="fold")
        for row in rows:
            table.add_row(*(escape(cell) for cell in texts(row)))
        output().print(table)
        output().print(f"wrote {plan.output / 'budgets.json'}", highlight=False, soft_wrap=True)
    problems = [problem for one in results for problem in one.problems()]
    for problem in problems:
        style = "yellow" if is_refusal(problem) else "bold red"
        messages().print(f"[{style}]{escape(problem)}[/]", highlight=False)
    if not all(map(is_refusal, problems)):
        raise typer.Exit(EXIT_PROBLEM)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _shares(text: str) -> list[float]:
    parts = [part.strip().removesuffix("%") for part in text.split(",")]
    try:
        shares = [float(part) / 100 for part in parts]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 2 for share in shares):
        raise OffloadConfigError(f"--shares {text!r}: give per cent with commas between, such as 80,50,30.")
    return shares
