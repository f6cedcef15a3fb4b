"""``hf-offload bench limits``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from hf_offload.cli.bench_options import (
    Csv,
    DryRun,
    Json,
    MemoryLimit,
    Overrides,
    Shapes,
    Strategies,
    bench_table,
    check_format,
    check_recipes,
    list_plan,
    print_written,
)
from hf_offload.cli.console import EXIT_INTERRUPTED, clear_errors, output, progress_bar, visible_log
from hf_offload.settings.outputs import check_output_folder
from hf_offload.settings.sizes import parse_bytes

if TYPE_CHECKING:
    from hf_offload.bench.limits import Limit


def limits(
    shapes: Shapes,
    overrides: Overrides = None,
    strategies: Strategies = "keep,recompute,ours:ram",
    vary: Annotated[str, typer.Option(help="What to make larger: sequence or batch.")] = "sequence",
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
        check_recipes(shapes, overrides)
        check_output_folder(output_dir, "--output", *(f"limits.{kind}" for kind in ("md", "json", "csv")))
        from hf_offload.bench.cell import require_memory_limit  # slow: it loads torch
        from hf_offload.bench.limits import check_limits, find_limits, write_limits
        from hf_offload.bench.steps import plan_steps
        from hf_offload.bench.strategies import parse_strategies

        check_format(json, csv)
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
            list_plan(plan, f"{vary} up to {most}")
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
    print_written(written, json, csv, lambda: _show_limits(found))
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _show_limits(found: "list[Limit]") -> None:
    from hf_offload.bench.limits import LIMIT_COLUMNS, limits_title

    for shape in dict.fromkeys(limit.shape for limit in found):
        table = bench_table(limits_title(found, shape))
        for column in LIMIT_COLUMNS:
            table.add_column(column, overflow="fold")
        for limit in found:
            if limit.shape == shape:
                table.add_row(*(escape(text) for text in limit.texts()))
        output().print(table)
