"""``python -m benchmarks large``: the run, the table and the picture."""

import dataclasses
import json as json_format
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.console import show_table
from benchmarks.large.forecast import RATED_BYTES, Forecast, forecast, roofline_s
from benchmarks.large.picture import draw_memory
from benchmarks.large.shape import Shape
from hf_offload.allocator import environment_with
from hf_offload.cli.console import clear_errors, messages, output, progress_bar
from hf_offload.cli.options import Json
from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.reports.plots import require_matplotlib
from hf_offload.settings.sizes import parse_bytes

_SHAPE = Shape()
_PICTURED_SAMPLES = 300
_END_S = 30
_LEARNING = 4
"""Steps that a plan usually takes: one is measured, and another one where state or elementwise operations are elsewhere."""


def large(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the GPT-2.")] = _SHAPE.layers,
    width: Annotated[int, typer.Option(min=64, help="Its width.")] = _SHAPE.width,
    vocabulary: Annotated[int, typer.Option(min=256, help="Its vocabulary.")] = _SHAPE.vocabulary,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens a step.")] = _SHAPE.tokens,
    steps: Annotated[int, typer.Option(min=2, help="Steps; the first one is not measured.")] = _SHAPE.steps,
    budget: Annotated[str, typer.Option(help="Memory for everything.")] = "6GiB",
    auto: Annotated[
        bool,
        typer.Option("--auto", help="Name the budget alone: a plan says where everything is, from the first steps on."),
    ] = False,
    minutes: Annotated[float, typer.Option(help="No step begins that would end later.")] = 15,
    most_written: Annotated[str, typer.Option(help="Most bytes to write.")] = "150GB",
    directory: Annotated[Path | None, typer.Option(help="Where files go. Default: the temporary folder.")] = None,
    output_folder: Annotated[Path, typer.Option("--output", help="Of the results.")] = Path("runs/large"),
    json: Json = False,
) -> None:
    """Train GPT-2 XL in full with AdamW in fp32 within a budget of memory that its weights alone exceed."""
    with clear_errors():
        require_matplotlib()
        shape = Shape(layers, width, vocabulary, tokens, steps, parse_bytes(budget, "--budget"), auto)
        if auto and steps <= _LEARNING:
            raise OffloadConfigError(f"--auto learns from the first {_LEARNING} steps: give more --steps.")
        limit = parse_bytes(most_written, "--most-written")
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=directory) as folder:
            found = _run(shape, folder, limit, 60 * minutes)
        output_folder.mkdir(parents=True, exist_ok=True)
        (output_folder / "large.json").write_text(json_format.dumps(found, indent=1) + "\n")
        draw_memory(
            found["memory"],
            found["memory_forward_s"],
            shape.budget_bytes,
            f"{shape.weights / 1e9:.2f} billion weights, AdamW in fp32: a step of {tokens} tokens",
            output_folder / "memory.png",
        )
        if json:
            output().print_json(json_format.dumps(found))
            return
        show_table(
            ("", "predicted", "measured"),
            rows_of(found),
            left=("",),
            caption="Roofline: a step in memory on these cores, extended from models of few layers, or all transfers at this "
            "drive's rate, whichever takes longer; the faster of before and after the run.",
        )
        output().print(f"Results: {output_folder}", markup=False, highlight=False)


def _run(shape: Shape, folder: str, limit: int, seconds: float) -> dict[str, Any]:
    messages().print("Measuring these cores and this drive: one or two minutes, 4 GB are written.", highlight=False)
    before = _roofline(shape, folder)
    expected = forecast(shape, before)
    if expected.total_written_bytes > limit:
        raise OffloadConfigError(
            f"About {expected.total_written_bytes / 1e9:.0f} GB would be written, and --most-written allows "
            f"{limit / 1e9:.0f} GB: take fewer --steps."
        )
    free = shutil.disk_usage(folder).free
    if expected.room_bytes > free:
        raise OffloadConfigError(
            f"The run needs {expected.room_bytes / 1e9:.0f} GB of disk space, and {folder} has {free / 1e9:.0f} GB: name "
            "another --directory."
        )
    messages().print(expected.text(shape, folder), markup=False, highlight=False)
    given = {
        "shape": dataclasses.asdict(shape),
        "directory": folder,
        "most_written_bytes": limit,
        "seconds": seconds,
    }
    made: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    with progress_bar() as progress:
        task = progress.add_task("making the model", total=shape.steps)
        for event in events_of("benchmarks.large.run", given):
            if event.pop("event") == "made":
                made = event
            else:
                steps.append(event)
                progress.advance(task)
                progress.console.print(
                    f"step {len(steps)}: {event['seconds']:.1f} s, loss {event['loss']:.4f}, peak of the process "
                    f"{event['peak_bytes'] / 1e9:.2f} GB",
                    highlight=False,
                )
            progress.update(task, description=f"step {len(steps) + 1}")
    if len(steps) <= _steps_before(shape, steps):
        raise OffloadError("No step was measured: give more --minutes, or more --steps.")
    return _result(shape, expected, [before, _roofline(shape, folder)], made, steps)


def _result(
    shape: Shape, expected: Forecast, rooflines: list[dict[str, Any]], made: dict[str, Any], steps: list[dict[str, Any]]
) -> dict[str, Any]:
    pictured = steps[(1 + len(steps)) // 2]
    samples = [one.pop("samples") for one in steps][steps.index(pictured)]
    thinned = samples[:: 1 + len(samples) // _PICTURED_SAMPLES]
    return {
        **dataclasses.asdict(shape),
        "weights": shape.weights,
        "rooflines": rooflines,
        "predicted": dataclasses.asdict(expected) | _of_plan(shape, steps),
        "measured": _measured(shape, rooflines, made, steps),
        "made": made,
        "steps_taken": steps,
        "memory_forward_s": pictured["forward_s"],
        "memory": [{kind: round(value, 2) for kind, value in one.items()} for one in thinned],
    }


def _of_plan(shape: Shape, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """What the plan predicted before the steps that count."""
    if not shape.automatic:
        return {}
    planned = steps[_steps_before(shape, steps) - 1]["planned"]
    return {"peak_bytes": planned["peak_bytes"], "step_s": planned["step_s"]}


def _steps_before(shape: Shape, steps: list[dict[str, Any]]) -> int:
    """How many steps come before those that are measured: the first has no state to read, and a plan is made in some."""
    if not shape.automatic:
        return 1
    return next((number for number, one in enumerate(steps, 1) if one["planned"] is not None), len(steps))


def _measured(
    shape: Shape, rooflines: list[dict[str, Any]], made: dict[str, Any], steps: list[dict[str, Any]]
) -> dict[str, Any]:
    # The fastest of before and after: others on the machine may have slowed the cores or the drive meanwhile.
    roofline = {
        name: (max if name.endswith("_per_s") else min)(one[name] for one in rooflines) for name in rooflines[0]
    }

    def of_steps(name: str) -> float:
        return statistics.median(one[name] for one in steps[_steps_before(shape, steps) :])

    moved = of_steps("read_bytes") + of_steps("written_bytes")
    measured = {
        "peak_bytes": max(made["peak_bytes"], *(one["peak_bytes"] for one in steps)),
        "anonymous_bytes": max(made["anonymous_bytes"], *(one["anonymous_bytes"] for one in steps)),
        "step_s": of_steps("seconds"),
        "read_bytes": of_steps("read_bytes"),
        "written_bytes": of_steps("written_bytes"),
        "compute_s": roofline["compute_s"],
        "drive_s": moved / roofline["both_bytes_per_s"],
        "roofline_s": roofline_s(roofline, moved),
        "total_written_bytes": made["written_bytes"] + sum(one["written_bytes"] for one in steps),
        "total_s": made["seconds"] + sum(one["seconds"] for one in steps),
    }
    return measured | {"roofline_ratio": measured["step_s"] / measured["roofline_s"]}


def rows_of(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The lines of the table: what, predicted, measured."""
    predicted, measured = found["predicted"], found["measured"]

    def gigabytes(name: str) -> tuple[str, str]:
        return tuple(f"{each[name] / 1e9:.2f} GB" for each in (predicted, measured))  # type: ignore[return-value]

    anonymous = measured.get("anonymous_bytes")  # which earlier runs did not measure
    return [
        ("peak of the process", *gigabytes("peak_bytes")),
        *([] if anonymous is None else [("the same without cached pages of files", "-", f"{anonymous / 1e9:.2f} GB")]),
        ("step", f"{predicted['step_s']:.1f} s", f"{measured['step_s']:.1f} s"),
        ("roofline: computation in memory", "-", f"{measured['compute_s']:.1f} s"),
        ("roofline: transfers", "-", f"{measured['drive_s']:.1f} s"),
        ("step, ratio to the roofline", "-", f"{measured['roofline_ratio']:.3f}"),
        ("read a step", *gigabytes("read_bytes")),
        ("written a step", *gigabytes("written_bytes")),
        ("written in all", *gigabytes("total_written_bytes")),
        (
            f"steps in the life of a drive ({RATED_BYTES / 1e12:.0f} TB)",
            f"{RATED_BYTES / predicted['written_bytes']:,.0f}",
            f"{RATED_BYTES / measured['written_bytes']:,.0f}",
        ),
        ("the whole run", f"{predicted['total_s']:.0f} s", f"{measured['total_s']:.0f} s"),
    ]


def _roofline(shape: Shape, folder: str) -> dict[str, Any]:
    return list(events_of("benchmarks.large.roofline", {"shape": dataclasses.asdict(shape), "directory": folder}))[-1]


def events_of(module: str, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON lines that a process of its own prints. It ends with this one."""
    command = [sys.executable, "-m", module, json_format.dumps(given)]
    environment = environment_with("auto") | {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json_format.loads(line)
            if process.wait():
                errors.seek(0)
                raise OffloadError(f"{module} ended with code {process.returncode}: {errors.read()[-3000:]}")
        finally:
            process.stdout.close()
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
