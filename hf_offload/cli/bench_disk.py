"""``hf-offload bench disk``."""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hf_offload.cli.console import clear_errors, loading_torch, output, print_table, progress_bar
from hf_offload.cli.options import Json
from hf_offload.settings.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hf_offload.bench.disk import DriveReport


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
