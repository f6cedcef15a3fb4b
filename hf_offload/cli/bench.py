"""``hf-offload bench``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hf_offload.allocator import ALLOCATORS
from hf_offload.cli.bench_disk import disk
from hf_offload.cli.bench_overhead import overhead
from hf_offload.cli.console import EXIT_INTERRUPTED, EXIT_PROBLEM, clear_errors, messages, output
from hf_offload.reports.compare import COLUMNS, Cell, footnotes, parse_strategies, run_comparison, write_results
from hf_offload.reports.plots import require_matplotlib

bench = typer.Typer(help="Measure, side by side.", no_args_is_help=True)


bench.command()(disk)
bench.command()(overhead)


@bench.command()
def steps(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of a shipped one, such as gpt/demo.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as training.max_steps=3.")
    ] = None,
    strategies: Annotated[
        str, typer.Option(help="Out of keep, recompute, ours:ssd and ours:ram, with commas between.")
    ] = "keep,recompute,ours:ssd",
    rounds: Annotated[int, typer.Option(min=1, help="How often to run each; they take turns.")] = 1,
    output_dir: Annotated[
        Path, typer.Option("--output", help="Folder for the table, the picture and every run's report.")
    ] = Path("runs/bench"),
    allocator: Annotated[
        str, typer.Option(help=f"CPU memory allocator of all runs: {', '.join(ALLOCATORS)}.")
    ] = ALLOCATORS[0],
) -> None:
    """Train a recipe in several ways and compare memory, time and, bit by bit, results."""
    with clear_errors():
        require_matplotlib()
        chosen = parse_strategies(strategies)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=messages()) as progress:
            task = progress.add_task(f"running {chosen[0].name}", total=rounds * len(chosen))
            done = 0

            def on_cell(cell: Cell) -> None:
                nonlocal done
                done += 1
                following = chosen[done % len(chosen)].name
                progress.update(task, completed=done, description=f"running {following}")
                if cell.failure:
                    progress.console.print(f"[bold red]{cell.strategy.name} failed[/]")

            comparison = run_comparison(
                recipe,
                overrides or [],
                chosen,
                rounds=rounds,
                output=output_dir,
                allocator=allocator,
                on_cell=on_cell,
            )
            progress.update(task, description="stopped" if comparison.interrupted else "done")
        if comparison.interrupted and not comparison.cells:
            raise KeyboardInterrupt
        written = write_results(comparison, output_dir)
    console = output()
    table = Table(title=f"{recipe}: memory and time of a training step", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "strategy" else "right", no_wrap=True)
    for row in comparison.rows():
        loud = ("DIFFER", "failed")
        table.add_row(*(f"[bold red]{cell}[/]" if cell.endswith(loud) else cell for cell in row.cells()))
    console.print(table)
    for note in footnotes(comparison):
        console.print(f"[dim]{escape(note)}[/]", highlight=False)
    for path in written:
        console.print(f"wrote {path}", highlight=False)
    problems = comparison.problems()
    for problem in problems:
        messages().print(f"[bold red]{escape(problem)}[/]", highlight=False)
    if problems:
        raise typer.Exit(EXIT_PROBLEM)
    if comparison.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
