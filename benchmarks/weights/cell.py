"""One way, measured in a process of its own: ``python -m benchmarks.weights.cell JSON``."""

import dataclasses
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.state.kernel import NO_LIMIT, drive_bytes, group_peak, limit_memory, reset_group_peak
from benchmarks.weights.ways import FORWARD, LORA, PEERS, prepared, settings_of, with_adapters
from hf_offload.optimizers.streamed import streaming_of
from hf_offload.session import attach
from hf_offload.training.gauges import choose_gauge

WARM_UP = 1
"""Steps that are not measured: there is no optimizer state to read, and no order of uses is known."""
LEARNING_RATE = 1e-4


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
    model: Any = GPT2LMHeadModel(config)
    if cell.task == LORA:
        model = with_adapters(model)
    model = prepared(model, cell.way, cell.task, Path(cell.directory)).train(cell.task != FORWARD)
    session = attach(model, settings_of(cell.way, cell.task, cell.budget, cell.directory))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True) if cell.task != FORWARD else None
    if optimizer is not None:
        session.prepare_optimizer(optimizer)
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
        with session.scope(), torch.set_grad_enabled(optimizer is not None):
            loss = model(input_ids=tokens, labels=tokens).loss
            if optimizer is not None:
                loss.backward()
        if optimizer is not None:
            session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
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
    if optimizer is not None and (streaming := streaming_of(optimizer)) is not None:
        streaming.finish()
    return {
        "seconds": seconds,
        "peaks": peaks,
        "losses": losses,
        "group_peak": peak_of_group,
        "weights_bytes": sum(p.nbytes for p in model.parameters()),
        "drive_bytes_per_step": on_drive,
        "moved_bytes_per_step": moved,
        "weights_sha256": None if cell.way in PEERS else _digest(model),
    }


def _digest(model: torch.nn.Module) -> str:
    """Of the bytes of all weights, one after the other."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().clone().numpy().tobytes())
    return digest.hexdigest()


def main(text: str) -> None:
    """Print what was measured as the last line. A peer's error is a result."""
    cell = Cell(**json.loads(text))
    try:
        result = measure(cell)
    except Exception as error:
        if cell.way not in PEERS:
            raise
        result = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(f"\n{json.dumps(result)}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
