"""``python -m benchmarks mezo``: the run and the table."""

import dataclasses
import json as json_format
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.console import show_table
from benchmarks.large.command import events_of
from benchmarks.large.shape import Shape
from hf_offload.cli.console import clear_errors, messages, output, progress_bar
from hf_offload.cli.options import Json
from hf_offload.errors import OffloadError

_SHAPE = Shape(tokens=256, steps=3)
_FRACTIONS = ("read_bytes", "written_bytes")


def mezo(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the GPT-2.")] = _SHAPE.layers,
    width: Annotated[int, typer.Option(min=64, help="Its width.")] = _SHAPE.width,
    vocabulary: Annotated[int, typer.Option(min=256, help="Its vocabulary.")] = _SHAPE.vocabulary,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens a step.")] = _SHAPE.tokens,
    steps: Annotated[int, typer.Option(min=2, help="Steps; the first one is not measured.")] = _SHAPE.steps,
    minutes: Annotated[float, typer.Option(help="No step begins that would end later.")] = 8,
    directory: Annotated[Path | None, typer.Option(help="Where files go. Default: the temporary folder.")] = None,
    output_folder: Annotated[Path, typer.Option("--output", help="Of the results.")] = Path("runs/mezo"),
    json: Json = False,
) -> None:
    """Train all weights of GPT-2 XL in fp32 with MeZO, with two blocks of them in memory."""
    with clear_errors():
        shape = Shape(layers, width, vocabulary, tokens, steps)
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=directory) as folder:
            found = _run(shape, folder, 60 * minutes)
        output_folder.mkdir(parents=True, exist_ok=True)
        (output_folder / "mezo.json").write_text(json_format.dumps(found, indent=1) + "\n")
        if json:
            output().print_json(json_format.dumps(found))
            return
        show_table(
            ("", "measured"),
            rows_of(found),
            left=("",),
            caption="Roofline: two forward passes in memory, extended from models of few layers, and three directions, or "
            "all transfers at this drive's rate, whichever takes longer.",
        )
        output().print(f"Results: {output_folder}", markup=False, highlight=False)


def _run(shape: Shape, folder: str, seconds: float) -> dict[str, Any]:
    messages().print(
        f"{shape.weights / 1e9:.2f} billion weights; about {(2 + shape.steps) * shape.weight_bytes / 1e9:.0f} GB are written "
        f"to {folder}.",
        highlight=False,
        markup=False,
    )
    given = {"shape": dataclasses.asdict(shape), "directory": folder, "seconds": seconds}
    roofline = list(events_of("benchmarks.mezo.roofline", given))[-1]
    made: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    with progress_bar() as progress:
        task = progress.add_task("making the model", total=shape.steps)
        for event in events_of("benchmarks.mezo.run", given):
            if event.pop("event") == "made":
                made = event
            else:
                steps.append(event)
                progress.advance(task)
            progress.update(task, description=f"step {len(steps) + 1}")
    if len(steps) < 2:
        raise OffloadError("No step was measured within --minutes.")
    return {
        **dataclasses.asdict(shape),
        "weights": shape.weights,
        "roofline": roofline,
        "made": made,
        "steps_taken": steps,
        "measured": _measured(shape, roofline, made, steps),
    }


def _measured(
    shape: Shape, roofline: dict[str, Any], made: dict[str, Any], steps: list[dict[str, Any]]
) -> dict[str, Any]:
    def of_steps(name: str) -> float:
        return statistics.median(one[name] for one in steps[1:])  # the first one also takes checksums

    moved = {name: of_steps(name) for name in _FRACTIONS}
    drive_s = sum(moved.values()) / roofline["both_bytes_per_s"]
    cores_s = 2 * roofline["forward_s"] + roofline["directions_s"]
    found = {
        "peak_bytes": max(made["peak_bytes"], *(one["peak_bytes"] for one in steps)),
        "step_s": of_steps("seconds"),
        "step_cores_s": of_steps("cores_s"),
        "cores_s": 2 * roofline["forward_cores_s"] + roofline["directions_cores_s"],
        **moved,
        **{f"{name}_per_weight": count / shape.weights for name, count in moved.items()},
        "forwards_s": 2 * roofline["forward_s"],
        "directions_s": roofline["directions_s"],
        "drive_s": drive_s,
        "roofline_s": max(cores_s, drive_s),
    }
    return found | {
        "roofline_ratio": found["step_s"] / found["roofline_s"],
        "cores_ratio": found["step_cores_s"] / found["cores_s"],
    }


def rows_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of the table."""
    measured = found["measured"]
    return [
        ("peak of the process", f"{measured['peak_bytes'] / 2**30:.2f} GiB"),
        ("step", f"{measured['step_s']:.1f} s"),
        ("roofline: two forward passes in memory", f"{measured['forwards_s']:.1f} s"),
        ("roofline: three directions", f"{measured['directions_s']:.1f} s"),
        ("roofline: transfers", f"{measured['drive_s']:.1f} s"),
        ("step, ratio to the roofline", f"{measured['roofline_ratio']:.3f}"),
        ("step, of all cores", f"{measured['step_cores_s']:.1f} s"),
        ("two forward passes in memory and three directions, of all cores", f"{measured['cores_s']:.1f} s"),
        ("ratio of these", f"{measured['cores_ratio']:.3f}"),
        (
            "read a step",
            f"{measured['read_bytes'] / 1e9:.2f} GB, {measured['read_bytes_per_weight']:.2f} bytes a weight",
        ),
        (
            "written a step",
            f"{measured['written_bytes'] / 1e9:.2f} GB, {measured['written_bytes_per_weight']:.2f} bytes a weight",
        ),
    ]
