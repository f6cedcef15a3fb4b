"""``hf-offload bench``: ``steps`` and ``limits``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hf_offload.bench.cell import CRASHED, OUT_OF_MEMORY
from hf_offload.bench.results import Cell, Results
from hf_offload.bench.steps import BENCH_ALLOCATORS, Plan, plan_steps, run_steps
from hf_offload.bench.strategies import parse_strategies, strategy_names
from hf_offload.bench.tables import COLUMNS, as_csv, as_json, describe, footnotes, texts, write_results
from hf_offload.cli.console import EXIT_INTERRUPTED, EXIT_PROBLEM, clear_errors, messages, output, visible_log
from hf_offload.errors import OffloadConfigError
from hf_offload.reports.plots import require_matplotlib
from hf_offload.settings.sizes import format_bytes, parse_bytes

bench = typer.Typer(help="Measure, side by side.", no_args_is_help=True)

Shapes = Annotated[
    str, typer.Argument(help="Presets (gpt2-small), recipes (gpt/demo) or recipes' files, with commas between.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as model.config.vocab_size=8192.")
]
Strategies = Annotated[str, typer.Option(help=f"Out of {', '.join(strategy_names())}, with commas between; or all.")]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        help="CUDA: what PyTorch may take of the device's memory, such as 24GiB, to stand in for a smaller card."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV and nothing else.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and list what would run, without running it.")
]


@bench.command()
def steps(
    shapes: Shapes,
    overrides: Overrides = None,
    strategies: Strategies = "keep,recompute,ours:ssd",
    batch: Annotated[str | None, typer.Option(help="Batch sizes, such as 4,8. Default: the recipe's.")] = None,
    sequence: Annotated[
        str | None, typer.Option(help="Sequence lengths, such as 512,1024. Default: the recipe's.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run. Default: the recipe's.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often to run each; they take turns.")] = 1,
    read_ahead: Annotated[
        str | None, typer.Option(help="Add ours:ssd once for each of these read-ahead windows: 64MiB,128MiB.")
    ] = None,
    allocator: Annotated[
        str,
        typer.Option(
            help=f"CPU memory allocator of all runs: {', '.join(BENCH_ALLOCATORS)}. With fastest, ours chooses its own, "
            "and the others are tried with glibc and tcmalloc in the first round.",
        ),
    ] = BENCH_ALLOCATORS[0],
    memory_limit: MemoryLimit = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Afterwards, profile one step of each; for Perfetto or chrome://tracing.")
    ] = False,
    output_dir: Annotated[
        Path, typer.Option("--output", help="Folder for the tables, the plots and every run's report.")
    ] = Path("runs/bench"),
    json: Json = False,
    csv: Csv = False,
    dry_run: DryRun = False,
) -> None:
    """Train models in several ways and compare memory, time and, bit by bit, results."""
    with clear_errors(), visible_log():
        _one_format(json, csv)
        require_matplotlib()
        plan = plan_steps(
            shapes,
            overrides or [],
            parse_strategies(strategies, read_ahead),
            batches=_numbers("--batch", batch),
            sequences=_numbers("--sequence", sequence),
            steps=steps,
            rounds=rounds,
            output=output_dir,
            allocator=allocator,
            memory_limit_bytes=None if memory_limit is None else parse_bytes(memory_limit, "--memory-limit"),
            trace=trace,
        )
        if dry_run:
            _list(plan)
            return
        results = _run(plan)
        if results.interrupted and not results.cells:
            raise KeyboardInterrupt
        written = write_results(results, plan.output)
    if json or csv:
        typer.echo(as_json(results) if json else as_csv(results.rows()), nl=False)
    else:
        _show(results)
        for path in written:
            output().print(f"wrote {path}", highlight=False, soft_wrap=True)
    problems = results.problems()
    for problem in problems:
        messages().print(f"[bold red]{escape(problem)}[/]", highlight=False)
    if problems:
        raise typer.Exit(EXIT_PROBLEM)
    if results.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _run(plan: Plan) -> Results:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages()) as progress:
        task = progress.add_task("starting", total=plan.cell_count)

        def on_start(name: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, description=f"running {escape(name)}")

        def on_done(cell: Cell) -> None:
            if cell.result.outcome in (CRASHED, OUT_OF_MEMORY):
                message = f"{cell.where}: {cell.result.outcome}: {cell.result.error}"
                progress.console.print(f"[yellow]{escape(message)}[/]", highlight=False)

        results = run_steps(plan, on_start, on_done)
        count = len(results.cells)
        total = None if results.interrupted else count
        progress.update(task, completed=count, total=total, description="stopped" if results.interrupted else "done")
    return results


def _show(results: Results) -> None:
    console = output()
    for case in results.cases():
        table = Table(
            title=escape(describe(results, case)), box=SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left"
        )
        for column in COLUMNS:
            left = column in (COLUMNS[0], COLUMNS[-1])
            # The last holds errors, which are long: it is folded rather than cut.
            table.add_column(
                column, justify="left" if left else "right", no_wrap=column != COLUMNS[-1], overflow="fold"
            )
        for row in results.rows(case):
            loud = row.losses_identical is False or row.parameters_identical is False or not row.rounds
            *cells, last = (escape(text) for text in texts(row))
            table.add_row(*cells, f"[bold red]{last}[/]" if loud else last)
        console.print(table)
    for note in footnotes(results):
        console.print(f"[dim]{escape(note)}[/]", highlight=False)


def _list(plan: Plan) -> None:
    lines = [
        f"{case.label}, {strategy.name}, {'/'.join(plan.allocators(strategy))}"
        f"{'' if strategy.is_installed else f' ({strategy.package} is not installed)'}"
        for case in plan.cases
        for strategy in plan.strategies
    ]
    limit = "" if plan.memory_limit_bytes is None else f", memory limit {format_bytes(plan.memory_limit_bytes)}"
    typer.echo("\n".join([*lines, f"{plan.cell_count} runs at most, {plan.rounds} rounds{limit}, into {plan.output}"]))


def _one_format(json: bool, csv: bool) -> None:
    if json and csv:
        raise OffloadConfigError("--json and --csv both want to be all of the output: give one of them.")


def _numbers(option: str, text: str | None) -> Sequence[int]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise OffloadConfigError(f"{option} {text!r}: give whole numbers from 1 on with commas between, such as 4,8.")
    return [int(part) for part in parts]
