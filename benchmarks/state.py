"""Optimizer state and gradients in memory and on a drive, side by side: peak memory, time of a step, bytes moved."""

import dataclasses
import functools
import json as json_format
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.console import Json, names_of, numbers_of, show_table
from hf_offload import OffloadConfig
from hf_offload.allocator import environment_with
from hf_offload.cli.console import clear_errors, output, progress_bar
from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.optimizers.streamed import streaming_of
from hf_offload.planning.machine import probe_machine
from hf_offload.session import attach
from hf_offload.settings.load import choose
from hf_offload.training.gauges import choose_gauge

IN_MEMORY, LAZY, IN_BACKWARD = "memory", "ssd", "ssd-in-backward"
WAYS = (IN_MEMORY, LAZY, IN_BACKWARD)


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one process measures."""

    way: str
    layers: int
    width: int
    vocabulary: int
    batch: int
    sequence: int
    steps: int
    directory: str
    activations: str


def measure(cell: Cell) -> dict[str, Any]:
    """Train a GPT-2 of random weights on random tokens, and say what it took."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=cell.layers,
        n_embd=cell.width,
        n_head=cell.width // 64,
        vocab_size=cell.vocabulary,
        n_positions=cell.sequence,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    place = "none" if cell.way == IN_MEMORY else "ssd"
    settings = OffloadConfig(
        tier=cell.activations,
        optimizer=place,
        tiled_loss="on",
        directory=None if {cell.activations, place} == {"none"} else cell.directory,
    )
    session = attach(model, settings)
    session.prepare_optimizer(optimizer)
    session.update_in_backward(cell.way == IN_BACKWARD)
    random = torch.Generator().manual_seed(1)
    gauge = choose_gauge(torch.device("cpu"))
    seconds, processor, peaks, losses = [], [], [], []
    for _ in range(cell.steps):
        tokens = torch.randint(0, cell.vocabulary, (cell.batch, cell.sequence), generator=random)
        gauge.reset_peak()
        begin, begin_of_processor = time.perf_counter(), time.process_time()
        with session.scope():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        if cell.way != IN_BACKWARD:
            session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
        seconds.append(time.perf_counter() - begin)
        processor.append(time.process_time() - begin_of_processor)
        peaks.append(gauge.peak())
        losses.append(loss.item())
    streaming = streaming_of(optimizer)
    if streaming is not None:
        streaming.finish()
    trained = sum(p.nbytes for p in model.parameters())
    accounts = {
        name: {tier: vars(s)["written_bytes"] + vars(s)["read_bytes"] for tier, s in tiers.items()}
        for name, tiers in session.stats.accounts.items()
    }
    checksum = [p.detach().double().sum().item() for p in model.parameters()]
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "peaks": peaks,
        "losses": losses,
        "checksum": checksum,
        "weights_bytes": trained,
        "moved_bytes_per_step": {name: sum(each.values()) / cell.steps for name, each in accounts.items()},
    }


def state(
    tokens: Annotated[str, typer.Option(help="Tokens a step, several separated by commas.")] = "1024,2048",
    layers: Annotated[int, typer.Option(help="Layers of the GPT-2.")] = 12,
    width: Annotated[int, typer.Option(help="Its width.")] = 768,
    vocabulary: Annotated[int, typer.Option(help="Its vocabulary.")] = 50257,
    activations: Annotated[str, typer.Option(help="Tier of the activations.")] = "ssd",
    steps: Annotated[int, typer.Option(min=3, help="Steps of a run; the first two are not measured.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each way, in turns.")] = 3,
    directory: Annotated[Path | None, typer.Option(help="Where files go. Default: the temporary folder.")] = None,
    ways: Annotated[str, typer.Option(help="Ways, separated by commas.")] = ",".join(WAYS),
    json: Json = False,
) -> None:
    """Compare training with optimizer state in memory and on a drive."""
    folder = str(directory or tempfile.gettempdir())
    names = names_of(ways)
    rows: list[dict[str, Any]] = []
    with clear_errors(), progress_bar() as progress:
        sizes = numbers_of("--tokens", tokens, int, "1024,2048")
        for name in names:
            choose("way", name, WAYS)
        if IN_MEMORY not in names:
            raise OffloadConfigError(f"--ways: {IN_MEMORY} must be among them, for the others are compared with it.")
        task = progress.add_task("starting", total=len(sizes) * rounds * len(names))
        drive = probe_machine([folder]).drives[0]
        for size in sizes:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for number in range(rounds):
                for name in names:
                    progress.update(task, description=f"{size} tokens, round {number + 1}, {name}")
                    cell = Cell(
                        name, layers, width, vocabulary, max(1, size // 512), min(size, 512), steps, folder, activations
                    )
                    found[name].append(_run(cell))
                    progress.advance(task)
            rows += [_row(size, name, found, drive.both.bytes_per_s) for name in names]
    about = {
        "layers": layers,
        "width": width,
        "vocabulary": vocabulary,
        "activations": activations,
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
            "moved (MB a step)",
            "same bits",
        ),
        [_texts(row) for row in rows],
        left=("optimizer state", "same bits"),
        caption="Left in memory: of state and gradients, 1 where all stay. Ratio: time to that in memory, in the same round. "
        "Roofline: the ratio if the drive's transfers and the computation overlapped fully.",
    )


def _texts(row: dict[str, Any]) -> list[str]:
    return [
        str(row["tokens"]),
        row["way"],
        f"{row['peak_mb']:.0f}",
        f"{row['left_ratio']:.3f}",
        f"{row['step_s']:.2f}",
        f"{row['step_ratio']:.3f}",
        f"{row['roofline_ratio']:.2f}",
        f"{row['moved_mb']:.0f}",
        {True: "yes", False: "NO", None: "not compared"}[row["same_bits"]],
    ]


def _row(size: int, name: str, found: dict[str, list[dict[str, Any]]], bytes_per_s: float | None) -> dict[str, Any]:
    plain = found[IN_MEMORY]
    peaks = [max(one["peaks"][2:]) for one in found[name]]
    kept = 3 * plain[0]["weights_bytes"]
    saved = [max(one["peaks"][2:]) - peak for one, peak in zip(plain, peaks, strict=True)]
    times = [statistics.median(one["seconds"][2:]) for one in found[name]]
    before = [statistics.median(one["seconds"][2:]) for one in plain]
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
        "same_bits": None if name == IN_BACKWARD else all(map(functools.partial(_same, plain[0]), found[name])),
        "rounds": found[name],
    }


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("losses", "checksum"))


def _run(cell: Cell) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.state", json_format.dumps(dataclasses.asdict(cell))]
    done = subprocess.run(
        command, env=environment_with("auto") | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OffloadError(f"{cell.way}: the run ended with code {done.returncode}: {done.stderr[-2000:]}")
    return json_format.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.stdout.write(json_format.dumps(measure(Cell(**json_format.loads(sys.argv[1])))))
    sys.stdout.flush()
    os._exit(0)
