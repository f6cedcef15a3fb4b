"""One way, measured in a process of its own: ``python -m benchmarks.state.cell JSON``."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import answer, random_gpt2
from benchmarks.kernel import NO_LIMIT, drive_bytes, group_limit, group_peak, limit_memory, reset_group_peak
from benchmarks.state.peers import PEERS
from benchmarks.state.ways import IN_BACKWARD, LAZY, train_in_torch
from hf_offload import OffloadConfig
from hf_offload.session import attach
from hf_offload.training.gauges import choose_gauge

WARM_UP = 2
"""Steps that are not measured."""


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
    activations: str
    tiled_loss: bool
    directory: str
    """Is empty at the start; the weights after the last step are saved there."""
    group: str | None = None
    """The memory group it runs in."""


def weights_in(directory: Path) -> Path:
    """The file of weights."""
    return directory / "weights.pt"


def measure(cell: Cell) -> dict[str, Any]:
    """Train a GPT-2 of random weights on random tokens, and say what it took."""
    model = random_gpt2(cell.layers, cell.width, cell.vocabulary, cell.sequence)
    place = "ssd" if cell.way in (LAZY, IN_BACKWARD) else "none"
    settings = OffloadConfig(
        tier=cell.activations,
        optimizer=place,
        update_in_backward=cell.way == IN_BACKWARD,
        tiled_loss="on" if cell.tiled_loss else "off",
        directory=None if {cell.activations, place} == {"none"} else cell.directory,
    )
    session = attach(model, settings)
    peer = PEERS.get(cell.way)
    loop = train_in_torch(cell.way, model, session) if peer is None else peer(model, session, Path(cell.directory))
    random = torch.Generator().manual_seed(1)
    gauge = choose_gauge(torch.device("cpu"))
    seconds, processor, peaks, losses = [], [], [], []
    before = drive_bytes()
    for number in range(cell.steps):
        tokens = torch.randint(0, cell.vocabulary, (cell.batch, cell.sequence), generator=random)
        gauge.reset_peak()
        if cell.group is not None and number == WARM_UP:
            reset_group_peak(Path(cell.group))
        begin, begin_of_processor = time.perf_counter(), time.process_time()
        with session.scope():
            loss = loop.forward(input_ids=tokens, labels=tokens).loss
            loop.backward(loss)
        loop.update()
        session.end_step()
        seconds.append(time.perf_counter() - begin)
        processor.append(time.process_time() - begin_of_processor)
        peaks.append(gauge.peak())
        losses.append(loss.item())
    on_drive = drive_bytes() - before
    in_group = {}
    if cell.group is not None:
        group = Path(cell.group)
        in_group = {"group_peak": group_peak(group), "group_limit": group_limit(group)}
        # Saving is not measured, and fails where dirty pages of mapped files fill the group.
        limit_memory(group, NO_LIMIT)
    weights = [p.detach() for p in loop.weights()]
    torch.save(weights, weights_in(Path(cell.directory)))
    moved = {
        name: sum(vars(one)["written_bytes"] + vars(one)["read_bytes"] for one in tiers.values())
        for name, tiers in session.stats.accounts.items()
    }
    if peer is not None:
        moved["peer"] = max(0, on_drive - moved.get("activations", 0))
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "peaks": peaks,
        **in_group,
        "losses": losses,
        "weights_bytes": sum(p.nbytes for p in weights),
        "drive_bytes_per_step": on_drive / cell.steps,
        "moved_bytes_per_step": {name: count / cell.steps for name, count in moved.items()},
    }


if __name__ == "__main__":
    answer(measure, Cell(**json.loads(sys.argv[1])), PEERS)
