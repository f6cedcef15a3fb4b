"""``hf-offload bench``: its commands ``steps``, ``disk`` and ``overhead``."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from hf_offload.cli.console import (
    clear_errors,
    loading_torch,
    make_table,
    note,
    print_table,
    progress_bar,
    visible_log,
    write,
    write_json,
)
from hf_offload.cli.options import Json, Overrides
from hf_offload.errors import EXIT_INTERRUPTED, EXIT_PROBLEM
from hf_offload.settings.environment import ALLOCATORS
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.models import measured_recipe
from hf_offload.settings.outputs import check_output_folder
from hf_offload.settings.recipes import read_recipe
from hf_offload.settings.sizes import format_bytes, parse_bytes
from hf_offload.training.places import check_directories

if TYPE_CHECKING:
    from hf_offload.bench.disk import DriveReport
    from hf_offload.bench.overhead import Quartiles
    from hf_offload.bench.results import Cell, Results
    from hf_offload.bench.steps import Plan

bench = typer.Typer(help="Measure training steps, drives and the overhead of a saved tensor.", no_args_is_help=True)

Shape = Annotated[
    str, typer.Argument(metavar="MODEL", help="A short name (gpt2-small), a recipe (gpt/demo), or a recipe's file.")
]
Batch = Annotated[int | None, typer.Option(min=1, help="Batch size. Default: the recipe's.")]
Length = Annotated[int | None, typer.Option("--sequence", min=2, help="Sequence length. Default: the recipe's.")]
Strategies = Annotated[str, typer.Option(help="Ways to save memory, separated by commas; or all.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and list what would run, without running it.")
]


def check_recipe(shape: str, overrides: list[str] | None, steps: int | None = None, allocator: str = "auto") -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for wrong settings, before torch is imported."""
    changes = [*(overrides or []), *([] if steps is None else [f"training.max_steps={steps}"])]
    with collect_errors("benchmark") as check:
        with check:
            choose("allocator", allocator, ALLOCATORS)
        with check:
            recipe, own = measured_recipe(shape)
            check_directories([read_recipe(recipe, [*own, *changes]).offload])


def list_plan(plan: "Plan", what: str) -> None:
    """Print what would run, and in a last line ``what`` that is in all."""
    for strategy in plan.strategies:
        missing = "" if strategy.is_installed else f" ({strategy.package} is not installed)"
        write(f"{plan.case.label}, {strategy.name}{missing}")
    write(f"{what}, into {plan.output}")


@bench.command()
def steps(
    shape: Shape,
    overrides: Overrides = None,
    strategies: Strategies = "baseline,recompute,ours:ssd",
    batch: Batch = None,
    sequence: Length = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of a run. Default: the recipe's.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each, in turns.")] = 1,
    allocator: Annotated[
        str, typer.Option(help=f"CPU memory allocator of all runs: {', '.join(ALLOCATORS)}.")
    ] = "auto",
    output_dir: Annotated[
        Path, typer.Option("--output", help="Folder for the table, the picture and every run's report.")
    ] = Path("runs/bench"),
    json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Train a model in several ways, and compare memory, time and, bit by bit, the results."""
    with clear_errors(), visible_log():
        check_recipe(shape, overrides, steps, allocator)
        check_output_folder(output_dir, "--output", "table.md", "table.json", "memory.png")
        with loading_torch():
            from hf_offload.bench.steps import plan_steps
            from hf_offload.bench.strategies import parse_strategies
            from hf_offload.bench.tables import write_results
            from hf_offload.reports.plots import require_matplotlib

        require_matplotlib()
        plan = plan_steps(
            shape,
            overrides or [],
            parse_strategies(strategies),
            batch=batch,
            sequence=sequence,
            steps=steps,
            rounds=rounds,
            output=output_dir,
            allocator=allocator,
        )
        if dry_run:
            list_plan(plan, f"{plan.cell_count} runs at most, {plan.rounds} rounds")
            return
        results = _run(plan)
        if results.interrupted and not results.cells:
            raise KeyboardInterrupt
        written = write_results(results, plan.output)
    if json:
        write_json(results.as_dict())
    else:
        _show_results(results)
        for path in written:
            write(f"wrote {path}")
    problems = results.problems()
    for problem in problems:
        note(problem, "bold red")
    if problems or results.interrupted:
        raise typer.Exit(EXIT_PROBLEM if problems else EXIT_INTERRUPTED)


def _run(plan: "Plan") -> "Results":
    from hf_offload.bench.cell import CRASHED, OUT_OF_MEMORY
    from hf_offload.bench.steps import run_steps

    with progress_bar() as progress:
        task = progress.add_task("starting", total=plan.cell_count)

        def on_start(name: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, description=f"running {escape(name)}")

        def on_done(cell: "Cell") -> None:
            if cell.result.outcome in (CRASHED, OUT_OF_MEMORY):
                note(f"{cell.where}: {cell.result.outcome}: {cell.result.error}", "yellow")

        results = run_steps(plan, on_start, on_done)
        count = len(results.cells)
        total = None if results.interrupted else count
        progress.update(task, completed=count, total=total, description="stopped" if results.interrupted else "done")
    return results


def _show_results(results: "Results") -> None:
    from hf_offload.bench.tables import COLUMNS, SHOWN, describe, footnotes, texts

    table = make_table(describe(results), [COLUMNS[number] for number in SHOWN], left=COLUMNS[-1:])
    for row in results.rows():
        cells = [escape(text) for text in texts(row)]
        if not row.rounds:
            cells[-1] = row.outcome  # the error is in the notes, where there is room for it
        cells[-1] = f"[bold red]{cells[-1]}[/]" if row.differs or not row.rounds else cells[-1]
        table.add_row(*(cells[number] for number in SHOWN))
    print_table(table)
    for text in footnotes(results):
        write(text, "dim", wrap=True)


@bench.command()
def disk(
    directory: Annotated[
        list[Path] | None, typer.Option("--directory", "-d", help="Directory on the drive to measure; may be repeated.")
    ] = None,
    size: Annotated[str, typer.Option(help="Bytes of a pass, such as 4GiB. Needs twice that on the drive.")] = "4GiB",
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each, in turns.")] = 3,
    json: Json = False,
) -> None:
    """Compare the disk tier with what direct system calls reach on the drive."""
    with clear_errors():
        with loading_torch():
            from hf_offload.bench.disk import (
                PASSES_BEFORE_ROUNDS,
                PASSES_PER_ROUND,
                Workload,
                check_drives,
                compare_drive,
            )

        workload = Workload.of(parse_bytes(size, "size"))
        directories = directory or [Path.cwd()]
        check_drives(directories, workload)
        reports = []
        with progress_bar() as progress:
            passes = (PASSES_BEFORE_ROUNDS + PASSES_PER_ROUND * rounds) * len(directories)
            task = progress.add_task("starting", total=passes, completed=-1)
            for path in directories:

                def on_pass(what: str, path: Path = path) -> None:
                    progress.update(task, advance=1, description=escape(f"{path}: {what}"))

                reports.append(compare_drive(path, workload, rounds, on_pass))
            progress.update(task, completed=passes)
    if json:
        write_json({"drives": [report.as_dict() for report in reports]})
    else:
        for report in reports:
            _show_drive(report)


def _show_drive(report: "DriveReport") -> None:
    workload = report.workload
    table = make_table(
        f"{report.directory} ({report.file_system})",
        ("direction", "round", f"{report.ceiling}, GB/s", "tier, GB/s", "tier / ceiling"),
        f"{format_bytes(workload.size_bytes)} a pass in blocks of {format_bytes(workload.block_bytes)}, records of "
        f"{format_bytes(workload.record_bytes)}, {workload.write_threads} threads writing and {workload.read_threads} "
        f"reading; {escape(report.direct_io)}",
    )
    for direction, found in (("write", report.write), ("read", report.read)):
        for name, each in [*((str(number), one) for number, one in enumerate(found.rounds, 1)), ("median", found)]:
            low, high = found.ratio_range
            ratio = f"{each.ratio:.2f}{f' ({low:.2f}..{high:.2f})' if each is found else ''}"
            table.add_row(direction, name, *(f"{rate / 1e9:.2f}" for rate in each.bytes_per_s), ratio)
    print_table(table)


@bench.command()
def overhead(
    tensors: Annotated[int, typer.Option(min=1, help="Saved tensors of each kind in a repetition.")] = 500,
    repetitions: Annotated[int, typer.Option(min=2, help="Repetitions; the table shows the median.")] = 15,
    json: Json = False,
) -> None:
    """Measure the time that Python spends on a saved tensor, without the copies."""
    with clear_errors():
        with loading_torch():
            from hf_offload.bench.overhead import measure_overhead

        with progress_bar() as progress:
            task = progress.add_task("measuring", total=repetitions)
            costs = measure_overhead(tensors, repetitions, lambda: progress.update(task, advance=1))
    if json:
        rows = [dataclasses.asdict(cost) for cost in costs]
        write_json({"tensors": tensors, "repetitions": repetitions, "costs": rows})
        return
    table = make_table(
        "Microseconds a saved tensor: median (quartiles)",
        ("saved tensor", "pack", "unpack and free", "sum", "what it is"),
        f"{repetitions} repetitions of {tensors} tensors, over a tier that is done at once; a saved tensor costs its own row "
        "and that of the hooks.",
        left=("what it is",),
    )
    for cost in costs:
        table.add_row(
            cost.name, _quartiles(cost.pack), _quartiles(cost.unpack_and_free), _quartiles(cost.total), cost.meaning
        )
    print_table(table)


def _quartiles(found: "Quartiles") -> str:
    return f"{found.median_us:.1f} ({found.low_us:.1f}..{found.high_us:.1f})"
