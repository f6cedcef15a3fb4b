"""Optimizer state and gradients in memory and on a drive, side by side: peak memory, time of a step, bytes moved."""

import json as json_format
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cells import Result
from benchmarks.console import names_of, numbers_of, show_table
from benchmarks.state.cell import WARM_UP, Cell
from benchmarks.state.peers import LIMITED, PEERS, TORCHAO_GRADIENTS
from benchmarks.state.runs import run_round
from benchmarks.state.ways import IN_BACKWARD, IN_MEMORY, LAZY, WAYS
from hf_offload.cli.console import clear_errors, output, progress_bar
from hf_offload.cli.options import Json
from hf_offload.errors import OffloadConfigError
from hf_offload.planning.machine import probe_machine
from hf_offload.settings.load import choose

UNCLIPPED = (IN_BACKWARD, TORCHAO_GRADIENTS)


def state(
    tokens: Annotated[str, typer.Option(help="Tokens a step, several separated by commas.")] = "1024,2048",
    layers: Annotated[int, typer.Option(help="Layers of the GPT-2.")] = 12,
    width: Annotated[int, typer.Option(help="Its width.")] = 768,
    vocabulary: Annotated[int, typer.Option(help="Its vocabulary.")] = 50257,
    activations: Annotated[str, typer.Option(help="Tier of the activations.")] = "ssd",
    tiled_loss: Annotated[bool, typer.Option(help="Tile the loss. DeepSpeed's ZeRO-3 cannot.")] = True,
    steps: Annotated[int, typer.Option(min=3, help="Steps of a run; the first two are not measured.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each way, in turns.")] = 3,
    directory: Annotated[Path | None, typer.Option(help="Where files go. Default: the temporary folder.")] = None,
    ways: Annotated[
        str, typer.Option(help=f"Ways, separated by commas: of {', '.join(WAYS)}, and of others, {', '.join(PEERS)}.")
    ] = ",".join(WAYS),
    json: Json = False,
) -> None:
    """Compare training with optimizer state in memory, on a drive, and as others offload it."""
    names = names_of(ways)
    rows: list[dict[str, Any]] = []
    with (
        clear_errors(),
        progress_bar() as progress,
        tempfile.TemporaryDirectory(prefix="benchmark-", dir=directory) as folder,
    ):
        sizes = numbers_of("--tokens", tokens, int, "1024,2048")
        for name in names:
            choose("way", name, (*WAYS, *PEERS))
        if IN_MEMORY not in names:
            raise OffloadConfigError(f"--ways: {IN_MEMORY} must be among them, for the others are compared with it.")
        limited = [name for name in LIMITED if name in names]
        if limited and LAZY not in names:
            raise OffloadConfigError(
                f"--ways: {LAZY} must be among them, for {limited[0]} gets the memory that it takes."
            )
        task = progress.add_task("starting", total=len(sizes) * rounds * len(names))
        drive = probe_machine([folder]).drives[0]
        for size in sizes:
            found: dict[str, list[Result]] = {name: [] for name in names}
            for number in range(rounds):

                def begin(name: str, size: int = size, number: int = number) -> None:
                    progress.update(task, advance=1, description=f"{size} tokens, round {number + 1}, {name}")

                base = Cell(
                    way=IN_MEMORY,
                    layers=layers,
                    width=width,
                    vocabulary=vocabulary,
                    batch=max(1, size // 512),
                    sequence=min(size, 512),
                    steps=steps,
                    activations=activations,
                    tiled_loss=tiled_loss,
                    directory=folder,
                )
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    for name, result in run_round(names, base, Path(own), begin).items():
                        found[name].append(result)
            rows += [_row(size, name, found, drive.both.bytes_per_s) for name in names]
    about = {
        "layers": layers,
        "width": width,
        "vocabulary": vocabulary,
        "activations": activations,
        "tiled_loss": tiled_loss,
        "steps": steps,
        "rounds": rounds,
    }
    about["drive_bytes_per_s"] = drive.both.bytes_per_s
    if json:
        output().print_json(json_format.dumps({**about, "rows": rows}, default=str))
        return
    show_table(
        (
            "tokens",
            "optimizer state",
            "peak (MB)",
            "left in memory",
            "step (s)",
            "ratio",
            "roofline",
            "moved (MB a step)",
            "same bits",
        ),
        [_texts(row) for row in rows],
        left=("optimizer state", "same bits"),
        caption="Left in memory: of state and gradients, 1 where all stay. Ratio: time to that in memory, in the same round. "
        "Roofline: the ratio if the drive's transfers and the computation overlapped fully. "
        "Without the same bits: the largest difference of a weight.",
    )
    for row in rows:
        if "error" in row:
            output().print(f"{row['way']}: {row['error']}", markup=False, highlight=False)


def _texts(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [str(row["tokens"]), row["way"], *6 * ["-"], "failed"]
    return [
        str(row["tokens"]),
        row["way"],
        f"{row['peak_mb']:.0f}",
        f"{row['left_ratio']:.3f}",
        f"{row['step_s']:.2f}",
        f"{row['step_ratio']:.3f}",
        f"{row['roofline_ratio']:.2f}",
        f"{row['moved_mb']:.0f}",
        {True: "yes", False: f"NO: {row['weight_difference']:.1e}", None: "not compared"}[row["same_bits"]],
    ]


def _row(size: int, name: str, found: dict[str, list[Result]], bytes_per_s: float | None) -> dict[str, Any]:
    errors = [one["error"] for one in found[name] if "error" in one]
    if errors:
        return {"tokens": size, "way": name, "error": errors[0], "rounds": found[name]}
    plain = found[IN_MEMORY]
    peaks = [max(one["peaks"][WARM_UP:]) for one in found[name]]
    kept = 3 * plain[0]["weights_bytes"]
    saved = [max(one["peaks"][WARM_UP:]) - peak for one, peak in zip(plain, peaks, strict=True)]
    times = [statistics.median(one["seconds"][WARM_UP:]) for one in found[name]]
    before = [statistics.median(one["seconds"][WARM_UP:]) for one in plain]
    moved = found[name][0]["moved_bytes_per_step"]
    return {
        "tokens": size,
        "way": name,
        "peak_mb": statistics.median(peaks) / 1e6,
        "left_ratio": 1 - statistics.median(saved) / kept,
        "step_s": statistics.median(times),
        "step_ratio": statistics.median(own / other for own, other in zip(times, before, strict=True)),
        "moved_mb": sum(value for account, value in moved.items() if account != "activations") / 1e6,
        "moved_by_account": moved,
        # Everything overlapped: a step takes as long as the computation or the drive, whichever needs longer.
        "roofline_ratio": max(1.0, sum(moved.values()) / (bytes_per_s or float("inf")) / statistics.median(before)),
        # Clipping is off there.
        "same_bits": None if name in UNCLIPPED else all(one["same_bits"] for one in found[name]),
        "loss_difference": max(one["loss_difference"] for one in found[name]),
        "weight_difference": max(one["weight_difference"] for one in found[name]),
        "rounds": found[name],
    }
