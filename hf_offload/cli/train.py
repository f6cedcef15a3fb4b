"""``hf-offload train``."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hf_offload.cli.console import clear_errors, loading_torch, print_table, visible_log
from hf_offload.cli.options import Overrides
from hf_offload.errors import EXIT_INTERRUPTED
from hf_offload.settings.recipes import load_recipe, read_recipe, text_override
from hf_offload.settings.sizes import format_bytes
from hf_offload.training.places import check_places


def train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe's file, or the name of a shipped one, such as gpt/demo.")
    ],
    overrides: Overrides = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the recipe's data.files are. Default: the current folder."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure memory, and write losses, times and memory: to a file that ends in .json, or as a page for a "
            "browser, with the plan and the drive's life, to one that ends in .html.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in the output directory.")
    ] = False,
) -> None:
    """Train what a recipe describes, evaluate it on the validation data, and save the model."""
    with clear_errors(), visible_log():
        changes = [*(overrides or []), *([] if data_dir is None else [text_override("data.data_dir", str(data_dir))])]
        check_places(read_recipe(recipe, changes), report=report, resume=resume)
        if context.obj is not None:
            context.obj()  # restarts with another allocator
        with loading_torch():
            loaded = load_recipe(recipe, changes)
            from hf_offload.training.run import run_recipe  # slow: only a good recipe is worth the wait

        given = [*([] if data_dir is None else ["--data-dir", str(data_dir)]), *(["--resume"] if resume else [])]
        command = shlex.join(["hf-offload", "train", recipe, *(overrides or []), *given])
        if report is None or report.suffix.lower() != ".html":
            result = run_recipe(loaded, report=report, resume=resume, command=command)
        else:
            from hf_offload.reports.run_page import ReportCallback, write_report

            seen = ReportCallback()
            result = run_recipe(loaded, measure=True, resume=resume, command=command, callbacks=[seen])
            write_report(report, seen.session, result)
    table = Table(title=f"{loaded.name}: {'done' if result.completed else 'stopped'}", show_header=False)
    table.add_row("steps", str(result.steps))
    if result.losses:
        table.add_row("loss", f"{result.losses[0]:.4f} first, {result.losses[-1]:.4f} last")
    for name, value in (result.metrics or {}).items():
        table.add_row(name.replace("_", " "), f"{value:.4f}")
    if result.median_step_s is not None:
        table.add_row("median step", f"{result.median_step_s:.3f} s")
    if result.peak_over_baseline_bytes is not None:
        table.add_row("activation peak", format_bytes(result.peak_over_baseline_bytes))
    if result.offload is not None:
        for name in ("offloaded_bytes", "written_bytes", "read_bytes"):
            table.add_row(name.removesuffix("_bytes"), format_bytes(result.offload[name]))
        table.add_row("waited", f"{result.offload['stall_s']:.2f} s")
    if report is not None:
        table.add_row("report", str(report))
    print_table(table)
    if not result.completed:
        raise typer.Exit(EXIT_INTERRUPTED)
