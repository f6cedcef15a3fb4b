"""The table of ``hf-offload plan --modes``."""

import dataclasses
import json as json_format
from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hf_offload.cli.console import messages, output

if TYPE_CHECKING:
    from hf_offload.forecast.workload import Workload
    from hf_offload.plan.hardware import Hardware


def show_modes(
    workload: "Workload",
    hardware: "Hardware",
    names: list[str] | None,
    settings: str | None,
    budget: int | None,
    json: bool,
) -> None:
    """Count the modes ``names`` (None: all there are) and print what each needs. Raises as ``compare_modes`` does."""
    from hf_offload.forecast.compare_modes import compare_modes

    with messages().status("Counting") as status:
        found = compare_modes(
            workload,
            hardware,
            names,
            settings=settings,
            budget_bytes=budget,
            on_mode=lambda name: status.update(f"Counting: {name}"),
        )
    if json:
        content = {"model": workload.name, "batch": workload.batch, "sequence": workload.sequence}
        typer.echo(json_format.dumps(content | dataclasses.asdict(found), indent=2))
        return
    dtype = str(workload.dtype).removeprefix("torch.")
    table = Table(
        title=escape(
            f"{workload.name}: {workload.shape} in {dtype} on {hardware.name}, budget {_gib(found.budget_bytes)} GiB"
        ),
        box=SIMPLE_HEAD,
    )
    table.add_column("memory mode")
    columns = ("weights", "gradients", "state", "activations", "peak", "fits", "batch", "recomputed")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        parts = (row.weights_bytes, row.gradient_bytes, row.state_bytes, row.activation_bytes, row.peak_bytes)
        table.add_row(
            row.mode,
            *map(_gib, parts),
            "yes" if row.fits else "no",
            str(row.largest_batch),
            str(row.largest_batch_recomputed),
        )
    for mode in found.refused:
        table.add_row(mode, *["-"] * len(columns))
    table.caption = (
        f"GiB, predicted. none: {workload.optimizer}. state: the optimizer's. activations: the rest of the peak, with "
        "everything kept, or what the optimizer's step needs. batch, recomputed: the largest batch that fits, with "
        "everything kept and with activation checkpointing."
    )
    table.caption_justify = "left"
    output().print(table)
    for mode, reason in found.refused.items():
        messages().print(escape(f"{mode}: {reason}"), highlight=False, soft_wrap=True)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"
