"""``hf-offload bench steps``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.markup import escape
from rich.table import Table

from hf_offload.cli.console import clear_errors, loading_torch, messages, output, print_table, progress_bar, visible_log
from hf_offload.cli.options import Json, Overrides
from hf_offload.errors import EXIT_INTERRUPTED, EXIT_PROBLEM, OffloadConfigError
from hf_offload.settings.environment import ALLOCATORS
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.models import measured_recipe
from hf_offload.settings.outputs import check_output_folder
from hf_offload.settings.recipes import Recipe, read_recipe
from hf_offload.settings.sizes import format_bytes, parse_bytes
from hf_offload.training.places import check_directories

if TYPE_CHECKING:
    from hf_offload.bench.results import Cell, Results
    from hf_offload.bench.steps import Plan


# Written out, since asking for them loads torch and transformers.
STRATEGIES = (
    "baseline, recompute, recompute+offload, save_on_cpu, trl, trl+recompute, ours:ram, ours:ssd, ours:spill, ours:auto, "
    "ours:ssd+tiled, ours:elementwise, ours:ssd+elementwise, ours:sampled, ours:ssd+sampled, ours+recompute"
)
FASTEST = "fastest"
Shapes = Annotated[
    str,
    typer.Argument(
        metavar="MODELS",
        help="Models by their short names (gpt2-small, qwen3-0.6b), recipes (gpt/demo) or recipes' files, separated by "
        "commas.",
    ),
]
Strategies = Annotated[str, typer.Option(help=f"Some of {STRATEGIES}, separated by commas; or all.")]
MemoryLimit = Annotated[
    str | None,
    typer.Option(help="CUDA: how much of the device's memory PyTorch may use, such as 24GiB, as on a smaller GPU."),
]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV and nothing else.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and list what would run, without running it.")
]


def print_written(written: list[Path], json: bool, csv: bool, show: Callable[[], None]) -> None:
    """Print the file that was asked for as it was written; otherwise show the tables and name the files."""
    if json or csv:
        wanted = next(path for path in written if path.suffix == (".json" if json else ".csv"))
        typer.echo(wanted.read_text(encoding="utf-8"), nl=False)
        return
    show()
    for path in written:
        output().print(f"wrote {path}", highlight=False, soft_wrap=True)


def check_recipes(
    shapes: str, overrides: Sequence[str] | None, steps: int | None = None, allocator: str = FASTEST
) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for wrong settings, before torch is imported."""
    changes = [*(overrides or []), *([] if steps is None else [f"training.max_steps={steps}"])]
    with collect_errors("benchmark") as check:
        with check:
            choose("allocator", allocator, (FASTEST, *ALLOCATORS))
        recipes: list[Recipe] = []
        for shape in (part.strip() for part in shapes.split(",")):
            with check:
                recipe, own = measured_recipe(shape)
                recipes.append(read_recipe(recipe, [*own, *changes]))
        with check:
            check_directories(recipe.offload for recipe in recipes)


def bench_table(title: str) -> Table:
    """A table without lines between rows, as wide as it needs to be."""
    return Table(title=escape(title), box=SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left")


def list_plan(plan: "Plan", search: str | None = None) -> None:
    """Print what would run; ``search`` says what is searched for, if something is."""
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


def check_format(json: bool, csv: bool) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` if both are asked for."""
    if json and csv:
        raise OffloadConfigError("--json and --csv each print nothing else: pass one of them.")


def whole_numbers(option: str, text: str | None) -> Sequence[int]:
    """``"4,8"`` as numbers; none for ``None``. Raises :class:`~hf_offload.errors.OffloadConfigError`."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise OffloadConfigError(f"{option} {text!r}: give whole numbers from 1 on, separated by commas, such as 4,8.")
    return [int(part) for part in parts]


def steps(
    shapes: Shapes,
    overrides: Overrides = None,
    strategies: Strategies = "baseline,recompute,ours:ssd",
    batch: Annotated[str | None, typer.Option(help="Batch sizes, such as 4,8. Default: the recipe's.")] = None,
    sequence: Annotated[
        str | None, typer.Option(help="Sequence lengths, such as 512,1024. Default: the recipe's.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of a run. Default: the recipe's.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each, in turns.")] = 1,
    read_ahead: Annotated[
        str | None, typer.Option(help="Add ours:ssd once for each of these read-ahead windows: 64MiB,128MiB.")
    ] = None,
    allocator: Annotated[
        str,
        typer.Option(
            help="CPU memory allocator of all runs: fastest, auto, tcmalloc, mimalloc, glibc-tuned, glibc. With fastest, "
            "ours chooses its own; the others run with glibc and all that are installed in the first round.",
        ),
    ] = "fastest",
    memory_limit: MemoryLimit = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Then profile one step of each, for Perfetto or chrome://tracing.")
    ] = False,
    output_dir: Annotated[
        Path, typer.Option("--output", help="Folder for the tables, the plots and every run's report.")
    ] = Path("runs/bench"),
    json: Json = False,
    csv: Csv = False,
    dry_run: DryRun = False,
) -> None:
    """Train models in several ways, and compare memory, time and, bit by bit, the results."""
    with clear_errors(), visible_log():
        check_recipes(shapes, overrides, steps, allocator)
        check_output_folder(output_dir, "--output", *(f"table.{kind}" for kind in ("md", "json", "csv")))
        with loading_torch():
            from hf_offload.bench.steps import plan_steps
            from hf_offload.bench.strategies import parse_strategies
            from hf_offload.bench.tables import write_results
            from hf_offload.reports.plots import require_matplotlib

        check_format(json, csv)
        require_matplotlib()
        plan = plan_steps(
            shapes,
            overrides or [],
            parse_strategies(strategies, read_ahead),
            batches=whole_numbers("--batch", batch),
            sequences=whole_numbers("--sequence", sequence),
            steps=steps,
            rounds=rounds,
            output=output_dir,
            allocator=allocator,
            memory_limit_bytes=None if memory_limit is None else parse_bytes(memory_limit, "--memory-limit"),
            trace=trace,
        )
        if dry_run:
            list_plan(plan)
            return
        results = _run(plan)
        if results.interrupted and not results.cells:
            raise KeyboardInterrupt
        written = write_results(results, plan.output)
    print_written(written, json, csv, lambda: _show_results(results))
    problems = results.problems()
    for problem in problems:
        messages().print(f"[bold red]{escape(problem)}[/]", highlight=False)
    if problems:
        raise typer.Exit(EXIT_PROBLEM)
    if results.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _run(plan: "Plan") -> "Results":
    from hf_offload.bench.cell import CRASHED, OUT_OF_MEMORY
    from hf_offload.bench.steps import run_steps

    with progress_bar() as progress:
        task = progress.add_task("starting", total=plan.cell_count)

        def on_start(name: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, description=f"running {escape(name)}")

        def on_done(cell: "Cell") -> None:
            if cell.result.outcome in (CRASHED, OUT_OF_MEMORY):
                message = f"{cell.where}: {cell.result.outcome}: {cell.result.error}"
                progress.console.print(f"[yellow]{escape(message)}[/]", highlight=False)

        results = run_steps(plan, on_start, on_done)
        count = len(results.cells)
        total = None if results.interrupted else count
        progress.update(task, completed=count, total=total, description="stopped" if results.interrupted else "done")
    return results


def _show_results(results: "Results") -> None:
    from hf_offload.bench.tables import COLUMNS, NARROW, WIDE_CHARACTERS, describe, footnotes, texts

    console = output()
    for case in results.cases():
        table = bench_table(describe(results, case))
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
        print_table(table)
    for note in footnotes(results):
        console.print(f"[dim]{escape(note)}[/]", highlight=False)
