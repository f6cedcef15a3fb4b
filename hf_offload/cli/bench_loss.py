"""``hf-offload bench loss``."""

import dataclasses
import json as json_format
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from hf_offload.cli.console import clear_errors, output, progress_bar
from hf_offload.settings.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hf_offload.bench.loss import LossRow


def loss(
    shapes: Annotated[
        str, typer.Argument(help="gpt2, llama-3.2-1b, or both with a comma between.")
    ] = "gpt2,llama-3.2-1b",
    dtype: Annotated[str, typer.Option(help="Of hidden states and weights: float32 or bfloat16.")] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="How often each way runs; they take turns.")] = 3,
    tile_bytes: Annotated[
        str | None, typer.Option(help="Size of the logits of one piece, such as 64MiB. Default: a sixteenth of all.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Measure the output head and the loss alone: the usual way, in pieces, and with Liger's kernel where it is installed."""
    with clear_errors():
        from hf_offload.bench.loss import SHAPES, bench_loss, dtype_of  # slow: it loads torch
        from hf_offload.settings.load import choose

        names = [name.strip() for name in shapes.split(",")]
        for name in names:
            choose("shape", name, SHAPES)
        size = None if tile_bytes is None else parse_bytes(tile_bytes, "tile_bytes")
        found: list[LossRow] = []
        with progress_bar(counted=False) as progress:
            task = progress.add_task("starting", total=None)
            for name in names:
                found += bench_loss(
                    name,
                    dtype_of(dtype),
                    rounds,
                    size,
                    lambda what, name=name: progress.update(task, description=f"{name}, {what}"),  # type: ignore[misc]
                )
    if json:
        typer.echo(json_format.dumps([dataclasses.asdict(row) for row in found], indent=2))
        return
    table = Table(title=f"Output head and loss, forward and backward, {dtype} on {found[0].device}", box=SIMPLE_HEAD)
    table.add_column("shape")
    table.add_column("way")
    for name in ("memory", "of untiled", "time", "of untiled", "spread", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        usual = next(one for one in found if one.shape == row.shape)
        table.add_row(
            row.shape,
            row.way,
            format_bytes(row.extra_bytes),
            f"{row.extra_bytes / usual.extra_bytes:.3f}",
            f"{row.median_s:.3g} s",
            f"{row.median_s / usual.median_s:.3f}",
            f"{min(row.seconds):.3g}..{max(row.seconds):.3g} s",
            f"{row.loss:.6f}",
        )
    table.caption = "Memory: beside hidden states, weights and their gradients. Time: median."
    table.caption_justify = "left"
    output().print(table, highlight=False)
