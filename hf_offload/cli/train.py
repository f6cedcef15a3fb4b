"""``hf-offload train``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from hf_offload.cli.console import clear_errors, loading_torch, make_table, print_table, visible_log
from hf_offload.cli.options import Overrides
from hf_offload.errors import EXIT_INTERRUPTED
from hf_offload.settings.recipes import load_recipe, read_recipe
from hf_offload.settings.sizes import format_bytes
from hf_offload.training.places import check_places


def train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe's file, or the name of a shipped one, such as gpt/demo.")
    ],
    overrides: Overrides = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure memory, and write losses, times and memory as JSON.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in the output directory.")
    ] = False,
) -> None:
    """Train what a recipe describes, evaluate it on the validation data, and save the model."""
    with clear_errors(), visible_log():
        check_places(read_recipe(recipe, overrides or ()), report=report, resume=resume)
        if context.obj is not None:
            context.obj()  # restarts with another allocator
        with loading_torch():
            loaded = load_recipe(recipe, overrides or ())
            from hf_offload.training.run import run_recipe  # slow: only a good recipe is worth the wait

        result = run_recipe(loaded, report=report, resume=resume)
    rows = [("steps", str(result.steps))]
    if result.losses:
        rows.append(("loss", f"{result.losses[0]:.4f} first, {result.losses[-1]:.4f} last"))
    rows += [(name.replace("_", " "), f"{value:.4f}") for name, value in (result.metrics or {}).items()]
    if result.median_step_s is not None:
        rows.append(("median step", f"{result.median_step_s:.3f} s"))
    if result.peak_over_baseline_bytes is not None:
        rows.append(("activation peak", format_bytes(result.peak_over_baseline_bytes)))
    if result.offload is not None:
        names = ("offloaded_bytes", "written_bytes", "read_bytes")
        rows += [(name.removesuffix("_bytes"), format_bytes(result.offload[name])) for name in names]
        rows.append(("waited", f"{result.offload['stall_s']:.2f} s"))
    if report is not None:
        rows.append(("report", escape(str(report))))
    table = make_table(f"{loaded.name}: {'done' if result.completed else 'stopped'}", ("", ""), left=("",))
    for row in rows:
        table.add_row(*row)
    print_table(table)
    if not result.completed:
        raise typer.Exit(EXIT_INTERRUPTED)
