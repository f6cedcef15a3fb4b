"""Weights in memory and on a drive, side by side: peak memory, time of a step, bytes moved, bits."""

import contextlib
import dataclasses
import json as json_format
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cells import PEER_TIMEOUT_S, Result, run_cell
from benchmarks.console import names_of, show_table
from benchmarks.kernel import memory_group
from benchmarks.weights.cell import WARM_UP, Cell
from benchmarks.weights.ways import FORWARD, FULL, IN_MEMORY, LORA, MAPPED, PEERS, SSD, TASKS, WAYS
from hf_offload.cli.console import clear_errors, output, progress_bar
from hf_offload.cli.options import Json
from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.settings.load import choose


def weights(
    tasks: Annotated[str, typer.Option(help=f"Tasks, separated by commas: {', '.join(TASKS)}.")] = f"{FULL},{LORA}",
    layers: Annotated[int, typer.Option(help="Layers of the GPT-2.")] = 24,
    width: Annotated[int, typer.Option(help="Its width.")] = 1024,
    vocabulary: Annotated[int, typer.Option(help="Its vocabulary.")] = 50257,
    batch: Annotated[int, typer.Option(help="Rows a step.")] = 4,
    sequence: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a run; the first one is not measured.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each way, in turns.")] = 3,
    budget: Annotated[str | None, typer.Option(help="Memory budget. Default: two blocks stay in memory.")] = None,
    directory: Annotated[Path | None, typer.Option(help="Where files go. Default: the temporary folder.")] = None,
    ways: Annotated[
        str, typer.Option(help=f"Ways, separated by commas: {', '.join(WAYS)}; of others, {', '.join(PEERS)}.")
    ] = ",".join(WAYS),
    json: Json = False,
) -> None:
    """Compare models whose weights are in memory, on a drive, and as others offload them."""
    with (
        clear_errors(),
        progress_bar() as progress,
        tempfile.TemporaryDirectory(prefix="benchmark-", dir=directory) as folder,
    ):
        names, chosen = names_of(ways), names_of(tasks)
        for name in names:
            choose("way", name, (*WAYS, *PEERS))
        for one in chosen:
            choose("task", one, TASKS)
        if IN_MEMORY not in names:
            raise OffloadConfigError(f"--ways: {IN_MEMORY} must be among them, for the others are compared with it.")
        if MAPPED in names and SSD not in names:
            raise OffloadConfigError(f"--ways: {SSD} must be among them, for {MAPPED} gets the memory that it takes.")
        bar = progress.add_task("starting", total=len(chosen) * rounds * len(names))
        rows: list[dict[str, Any]] = []
        for one in chosen:
            found: dict[str, list[Result]] = {name: [] for name in names}
            for number in range(rounds):
                for name in sorted(names, key=(*WAYS, *PEERS).index):
                    progress.update(bar, advance=1, description=f"{one}, round {number + 1}, {name}")
                    cell = Cell(name, one, layers, width, vocabulary, batch, sequence, steps, budget, folder)
                    found[name].append(_run(cell, found))
            rows += [_row(one, name, found) for name in names]
    about = {
        "layers": layers,
        "width": width,
        "vocabulary": vocabulary,
        "batch": batch,
        "sequence": sequence,
        "steps": steps,
        "rounds": rounds,
        "budget": budget,
    }
    if json:
        output().print_json(json_format.dumps({**about, "rows": rows}))
        return
    show_table(
        ("task", "weights", "peak (MB)", "step (s)", "ratio", "read (MB a step)", "written", "same bits"),
        [_texts(row) for row in rows],
        left=("task", "weights", "same bits"),
        caption="Ratio: time to that in memory, in the same round. Same bits: losses, and where it trains all weights.",
    )
    for row in rows:
        if "error" in row:
            output().print(f"{row['way']}: {row['error']}", markup=False, highlight=False)


def _run(cell: Cell, found: dict[str, list[Result]]) -> Result:
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory(dir=cell.directory) as own:
        group = None
        try:
            if cell.task == FORWARD:
                group = stack.enter_context(memory_group())
        except OSError as error:
            if cell.way == MAPPED:
                return {"error": f"OSError: {error}"}
        limit = found[SSD][-1]["group_peak"] if cell.way == MAPPED else None
        cell = dataclasses.replace(cell, directory=own, group=None if group is None else str(group), limit_bytes=limit)
        try:
            return run_cell("benchmarks.weights.cell", cell, group, PEER_TIMEOUT_S if cell.way in PEERS else None)
        except (OffloadError, subprocess.TimeoutExpired) as error:
            if cell.way not in PEERS:
                raise
            return {"error": f"{type(error).__name__}: {error}"}


def _row(task: str, name: str, found: dict[str, list[Result]]) -> dict[str, Any]:
    rounds, plain = found[name], found[IN_MEMORY]
    errors = [one["error"] for one in rounds if "error" in one]
    if errors:
        return {"task": task, "way": name, "error": errors[0], "rounds": rounds}
    times = [statistics.median(one["seconds"][WARM_UP:]) for one in rounds]
    before = [statistics.median(one["seconds"][WARM_UP:]) for one in plain]
    moved = rounds[0]["moved_bytes_per_step"]
    same = [
        one["losses"] == other["losses"] and one["weights_sha256"] in (None, other["weights_sha256"])
        for one, other in zip(rounds, plain, strict=True)
    ]
    return {
        "task": task,
        "way": name,
        "peak_mb": statistics.median(max(one["peaks"][WARM_UP:]) for one in rounds) / 1e6,
        "step_s": statistics.median(times),
        "step_ratio": statistics.median(own / other for own, other in zip(times, before, strict=True)),
        "read_mb": sum(value for what, value in moved.items() if what.endswith("read_bytes")) / 1e6,
        "written_mb": sum(value for what, value in moved.items() if what.endswith("written_bytes")) / 1e6,
        "drive_mb": rounds[0]["drive_bytes_per_step"] / 1e6,
        "same_bits": all(same),
        "rounds": rounds,
    }


def _texts(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["task"], row["way"], *5 * ["-"], "failed"]
    figures = (f"{row['peak_mb']:.0f}", f"{row['step_s']:.2f}", f"{row['step_ratio']:.3f}")
    moved = (f"{row['read_mb']:.0f}", f"{row['written_mb']:.0f}")
    return [row["task"], row["way"], *figures, *moved, "yes" if row["same_bits"] else "NO"]
