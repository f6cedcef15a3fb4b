"""``hf-offload bench``, and its commands ``disk`` and ``overhead``."""

import dataclasses
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hf_offload.cli.bench_steps import steps
from hf_offload.cli.console import clear_errors, loading_torch, output, print_table, progress_bar
from hf_offload.cli.options import Json
from hf_offload.settings.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hf_offload.bench.disk import DriveReport
    from hf_offload.bench.overhead import Quartiles


def disk(
    directory: Annotated[
        list[Path] | None, typer.Option("--directory", "-d", help="Directory on the drive to measure; may be repeated.")
    ] = None,
    size: Annotated[str, typer.Option(help="Bytes of a pass, such as 4GiB. Needs twice that on the drive.")] = "4GiB",
    block: Annotated[str, typer.Option(help="Bytes of a system call.")] = "8MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each, in turns.")] = 3,
    json: Json = False,
) -> None:
    """Compare the disk tier with the limit of the drive, measured by fio if that is installed."""
    with clear_errors():
        with loading_torch():
            from hf_offload.bench.disk import (
                PASSES_BEFORE_ROUNDS,
                PASSES_PER_ROUND,
                Workload,
                check_drives,
                compare_drive,
            )

        workload = Workload.of(parse_bytes(size, "size"), parse_bytes(block, "block"))
        directories = directory or [Path.cwd()]
        check_drives(directories, workload)
        reports = []
        with progress_bar() as progress:
            for path in directories:
                passes = PASSES_BEFORE_ROUNDS + PASSES_PER_ROUND * rounds
                task = progress.add_task(escape(str(path)), total=passes, completed=-1)

                def on_pass(what: str, path: Path = path, task: object = task) -> None:
                    progress.update(task, advance=1, description=escape(f"{path}: {what}"))  # type: ignore[arg-type]

                reports.append(compare_drive(path, workload, rounds, on_pass))
                progress.update(task, completed=passes, description=escape(str(path)))
    if json:
        typer.echo(json_format.dumps({"drives": [report.as_dict() for report in reports]}, indent=2))
        return
    for report in reports:
        _show(report)


def _show(report: "DriveReport") -> None:
    workload = report.workload
    table = Table(title=escape(f"{report.directory} ({report.file_system})"), box=SIMPLE_HEAD)
    table.add_column("direction", no_wrap=True)
    for name in ("round", f"{report.ceiling}, GB/s", "tier, GB/s", "tier / ceiling"):
        table.add_column(escape(name), justify="right", no_wrap=True)
    for direction, found in (("write", report.write), ("read", report.read)):
        for index, each in enumerate(found.rounds, start=1):
            rates = _rate(each.ceiling_bytes_per_s), _rate(each.tier_bytes_per_s)
            table.add_row(direction, str(index), *rates, f"{each.ratio:.2f}")
        rates = _rate(found.ceiling_bytes_per_s), _rate(found.tier_bytes_per_s)
        low, high = found.ratio_range
        table.add_row(direction, "median", *rates, f"{found.ratio:.2f} ({low:.2f}..{high:.2f})", style="bold")
        table.add_section()
    print_table(table)
    console = output()
    console.print(
        f"[dim]{format_bytes(workload.size_bytes)} a pass in blocks of {format_bytes(workload.block_bytes)}, records of "
        f"{format_bytes(workload.record_bytes)}, {workload.write_threads} threads writing and {workload.read_threads} "
        f"reading; {escape(report.direct_io)}[/]",
        highlight=False,
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f}"


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


bench = typer.Typer(help="Measure training steps, drives and the overhead of a saved tensor.", no_args_is_help=True)
for command in (steps, disk, overhead):
    bench.command()(command)
