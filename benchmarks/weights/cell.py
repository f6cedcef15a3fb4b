"""One way, measured in a process of its own: ``python -m benchmarks.weights.cell JSON``."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import answer, digest_of, random_gpt2
from benchmarks.kernel import NO_LIMIT, drive_bytes, group_peak, limit_memory, reset_group_peak
from benchmarks.weights.ways import FORWARD, LORA, PEERS, prepared, settings_of, training, with_adapters
from hf_offload.session import attach
from hf_offload.training.gauges import choose_gauge

WARM_UP = 1
"""Steps that are not measured: there is no optimizer state to read, and no order of uses is known."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one process measures."""

    way: str
    task: str
    layers: int
    width: int
    vocabulary: int
    batch: int
    sequence: int
    steps: int
    budget: str | None
    directory: str
    limit_bytes: int | None = None
    """Of memory, in ``group``, once everything is prepared."""
    group: str | None = None


def measure(cell: Cell) -> dict[str, Any]:
    """Train a GPT-2 of random weights on random tokens, or compute forwards, and say what it took."""
    model: Any = random_gpt2(cell.layers, cell.width, cell.vocabulary, cell.sequence)
    if cell.task == LORA:
        model = with_adapters(model)
    weights_bytes = sum(p.nbytes for p in model.parameters())
    model = prepared(model, cell.way, cell.task, Path(cell.directory)).train(cell.task != FORWARD)
    session = attach(model, settings_of(cell.way, cell.task, cell.budget, cell.directory))
    loop = None if cell.task == FORWARD else training(cell.way, model, session, Path(cell.directory))
    forward = model if loop is None else loop.forward
    gauge = choose_gauge(torch.device("cpu"))
    group = None if cell.group is None else Path(cell.group)
    random = torch.Generator().manual_seed(1)
    seconds, peaks, losses = [], [], []
    before = drive_bytes()
    for number in range(cell.steps):
        tokens = torch.randint(0, cell.vocabulary, (cell.batch, cell.sequence), generator=random)
        gauge.settle()
        gauge.reset_peak()
        if group is not None and number == WARM_UP:
            reset_group_peak(group)
        if group is not None and number == 0 and cell.limit_bytes is not None:
            limit_memory(group, cell.limit_bytes)
        begin = time.perf_counter()
        with session.scope(), torch.set_grad_enabled(loop is not None):
            loss = forward(input_ids=tokens, labels=tokens).loss
            if loop is not None:
                loop.backward(loss)
        if loop is not None:
            loop.update()
        session.end_step()
        seconds.append(time.perf_counter() - begin)
        peaks.append(gauge.peak())
        losses.append(loss.item())
    moved = {
        f"{account} {kind}": sum(getattr(tier, kind) for tier in tiers.values()) / cell.steps
        for account, tiers in session.stats.accounts.items()
        for kind in ("read_bytes", "written_bytes")
    }
    on_drive = (drive_bytes() - before) / cell.steps
    peak_of_group = None
    if group is not None:
        peak_of_group = group_peak(group)
        limit_memory(group, NO_LIMIT)
    return {
        "seconds": seconds,
        "peaks": peaks,
        "losses": losses,
        "group_peak": peak_of_group,
        "weights_bytes": weights_bytes,
        "drive_bytes_per_step": on_drive,
        "moved_bytes_per_step": moved,
        "weights_sha256": None
        if cell.way in PEERS
        else digest_of(model.parameters() if loop is None else loop.weights()),
    }


if __name__ == "__main__":
    answer(measure, Cell(**json.loads(sys.argv[1])), PEERS)
