"""``hf-offload bench``: ``steps`` and ``limits``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.markup import escape
from rich.table import Table

from hf_offload.bench.cell import CRASHED, OUT_OF_MEMORY, require_memory_limit
from hf_offload.bench.limits import (
    LIMIT_COLUMNS,
    VARIED,
    Limit,
    check_limits,
    find_limits,
    limits_title,
    write_limits,
)
from hf_offload.bench.results import Cell, Results
from hf_offload.bench.steps import BENCH_ALLOCATORS, Plan, plan_steps, run_steps
from hf_offload.bench.strategies import parse_strategies, strategy_names
from hf_offload.bench.tables import (
    COLUMNS,
    NARROW,
    WIDE_CHARACTERS,
    describe,
    footnotes,
    texts,
    write_results,
)
from hf_offload.cli.bench_accuracy import accuracy
from hf_offload.cli.bench_budgets import budgets
from hf_offload.cli.bench_disk import disk
from hf_offload.cli.bench_loss import loss
from hf_offload.cli.bench_modes import modes
from hf_offload.cli.bench_overhead import overhead
from hf_offload.cli.bench_sampling import sampling
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
from hf_offload.reports.plots import require_matplotlib
from hf_offload.settings.sizes import format_bytes, parse_bytes

bench = typer.Typer(help="Measure, side by side.", no_args_is_help=True)
bench.command()(disk)
bench.command()(overhead)
bench.command()(budgets)
bench.command()(loss)
bench.command()(accuracy)
bench.command()(modes)
bench.command()(sampling)

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
    _print(written, json, csv, lambda: _show_results(results))
    problems = results.problems()
    for problem in problems:
        messages().print(f"[bold red]{escape(problem)}[/]", highlight=False)
    if problems:
        raise typer.Exit(EXIT_PROBLEM)
    if results.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


@bench.command()
def limits(
    shapes: Shapes,
    overrides: Overrides = None,
    strategies: Strategies = "keep,recompute,ours:ram",
    vary: Annotated[str, typer.Option(help=f"What to make larger: {' or '.join(VARIED)}.")] = "sequence",
    most: Annotated[int, typer.Option(min=1, help="Where to stop: nothing larger is tried.")] = 131072,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Batch size, or the first to try. Default: the recipe's.")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(min=2, help="Sequence length, or the first to try. Default: the recipe's.")
    ] = None,
    memory_limit: MemoryLimit = None,
    output_dir: Annotated[
        Path, typer.Option("--output", help="Folder for the tables and every probe's result.")
    ] = Path("runs/limits"),
    json: Json = False,
    csv: Csv = False,
    dry_run: DryRun = False,
) -> None:
    """Find the longest sequence or the largest batch that each way can train in a given device memory (CUDA)."""
    with clear_errors(), visible_log():
        _one_format(json, csv)
        plan = plan_steps(
            shapes,
            overrides or [],
            parse_strategies(strategies, reference=False),
            batches=[] if batch is None else [batch],
            sequences=[] if sequence is None else [sequence],
            output=output_dir,
            memory_limit_bytes=None if memory_limit is None else parse_bytes(memory_limit, "--memory-limit"),
        )
        if dry_run:
            check_limits(plan, vary, most)
            _list(plan, f"{vary} up to {most}")
            return
        require_memory_limit()  # before anything is shown
        with progress_bar(counted=False) as progress:
            task = progress.add_task("starting", total=None)
            found, interrupted = find_limits(
                plan, vary, most, lambda what: progress.update(task, description=f"probing {escape(what)}")
            )
        if not found:
            raise KeyboardInterrupt
        written = write_limits(found, plan, interrupted)
    _print(written, json, csv, lambda: _show_limits(found))
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _run(plan: Plan) -> Results:
    with progress_bar() as progress:
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


def _print(written: list[Path], json: bool, csv: bool, show: Callable[[], None]) -> None:
    """Print the file that was asked for as it was written; otherwise show the tables and name the files."""
    if json or csv:
        wanted = next(path for path in written if path.suffix == (".json" if json else ".csv"))
        typer.echo(wanted.read_text(encoding="utf-8"), nl=False)
        return
    show()
    for path in written:
        output().print(f"wrote {path}", highlight=False, soft_wrap=True)


def _table(title: str) -> Table:
    return Table(title=escape(title), box=SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left")


def _show_results(results: Results) -> None:
    console = output()
    for case in results.cases():
        table = _table(describe(results, case))
        shown = range(len(COLUMNS)) if console.width >= WIDE_CHARACTERS else NARROW
        for number in shown:
            first, last = number == 0, number == len(COLUMNS) - 1
            justify: JustifyMethod = "left" if first or last else "right"
            table.add_column(COLUMNS[number], justify=justify, no_wrap=not last, overflow="fold")
        for row in results.rows(case):
            loud = row.differs or not row.rounds
            cells = [escape(text) for text in texts(row)]
            if not row.rounds:
                cells[-1] = row.outcome  # the error is in the notes, where there is room for it
            cells[-1] = f"[bold red]{cells[-1]}[/]" if loud else cells[-1]
            table.add_row(*(cells[number] for number in shown))
        console.print(table)
    for note in footnotes(results):
        console.print(f"[dim]{escape(note)}[/]", highlight=False)


def _show_limits(found: list[Limit]) -> None:
    for shape in dict.fromkeys(limit.shape for limit in found):
        table = _table(limits_title(found, shape))
        for column in LIMIT_COLUMNS:
            table.add_column(column, overflow="fold")
        for limit in found:
            if limit.shape == shape:
                table.add_row(*(escape(text) for text in limit.texts()))
        output().print(table)


def _list(plan: Plan, search: str | None = None) -> None:
    lines = [
        f"{case.label}, {strategy.name}, {'/'.join(plan.allocators(strategy))}"
        f"{'' if strategy.is_installed else f' ({strategy.package} is not installed)'}"
        for case in plan.cases
        for strategy in plan.strategies
    ]
    limit = "" if plan.memory_limit_bytes is None else f", memory limit {format_bytes(plan.memory_limit_bytes)}"
    count = (
        f"{plan.cell_count} runs at most, {plan.rounds} rounds"
        if search is None
        else f"{len(lines)} searches, {search}"
    )
    typer.echo("\n".join([*lines, f"{count}{limit}, into {plan.output}"]))


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
