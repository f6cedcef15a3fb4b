"""``hf-offload bench overhead``."""

import dataclasses
import json as json_format
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from hf_offload.cli.console import clear_errors, loading_torch, output, print_table, progress_bar

if TYPE_CHECKING:
    from hf_offload.bench.overhead import Quartiles


def overhead(
    tensors: Annotated[int, typer.Option(min=1, help="Saved tensors of each kind in a repetition.")] = 500,
    repetitions: Annotated[int, typer.Option(min=2, help="Repetitions; the table shows the median.")] = 15,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Measure the time that Python spends on a saved tensor, without the copies."""
    with clear_errors():
        with loading_torch():
            from hf_offload.bench.overhead import measure_overhead

        with progress_bar() as progress:
            task = progress.add_task("measuring", total=repetitions)
            costs = measure_overhead(tensors, repetitions, lambda: progress.update(task, advance=1))
    if json:
        facts = {
            "tensors": tensors,
            "repetitions": repetitions,
            "costs": [dataclasses.asdict(cost) for cost in costs],
        }
        typer.echo(json_format.dumps(facts, indent=2))
        return
    table = Table(title="Microseconds a saved tensor: median (quartiles)", box=SIMPLE_HEAD)
    table.add_column("saved tensor", no_wrap=True)
    for name in ("pack", "unpack and free", "sum"):
        table.add_column(name, justify="right", no_wrap=True)
    for cost in costs:
        table.add_row(cost.name, _cell(cost.pack), _cell(cost.unpack_and_free), _cell(cost.total))
    print_table(table)
    console = output()
    for cost in costs:
        console.print(f"[dim]{cost.name}: {cost.meaning}[/]", highlight=False)
    console.print(
        f"[dim]{repetitions} repetitions of {tensors} tensors, over a tier that is done at once; a saved tensor costs its "
        "own row and that of the hooks, and one that goes to RAM its slot's as well[/]",
        highlight=False,
    )


def _cell(figure: "Quartiles") -> str:
    return f"{figure.median_us:.1f} ({figure.low_us:.1f}..{figure.high_us:.1f})"
