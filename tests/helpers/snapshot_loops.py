"""A loop of two layers and twelve steps that takes snapshots: what is not about a Trainer is tested with it in a moment."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from hf_offload import OffloadConfig, attach

STEPS, EVERY = 12, 2
WAIT_S = 600
"""Longer than tests wait for a process to end: one that should have ended may not do so for want of a next training."""


class Stops(Exception):
    """What a loop leaves when its process is killed, snapshots are left by that, too."""


class Holds:
    """An object whose state is this, such as a running mean of losses, as users register it."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        """What a snapshot holds of it."""
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """Go on with another one."""
        self.state = state


def net() -> nn.Module:
    """Weights that are the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))


def batches() -> list[torch.Tensor]:
    """Those of one epoch."""
    return list(torch.randn(STEPS, 2, 4, generator=torch.Generator().manual_seed(1)))


def in_order() -> StatefulDataLoader[torch.Tensor]:
    """The same, of a loader that knows its place."""
    return StatefulDataLoader(batches(), batch_size=None)


def trained(
    folder: Path, stop: int | None = None, *, resume: bool | None = False, model: nn.Module | None = None,
    optimizer: Any = None, loader: Any = None, epochs: int = 1, objects: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[int, dict[str, torch.Tensor]]:  # fmt: skip
    """The step where it began, and the weights at its end. At ``stop``, it raises :class:`Stops`."""
    model = net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer
    session = attach(model, OffloadConfig(tier="none", snapshot_steps=EVERY, snapshot_wait_s=WAIT_S, **settings))
    try:
        with session.snapshots(folder, optimizer=optimizer, resume=resume, **(objects or {})) as snapshots:
            begun = snapshots.step
            for _ in range(snapshots.epoch, epochs):
                for batch in snapshots.batches(in_order() if loader is None else loader):
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    snapshots.end_step()
                    if snapshots.step == stop:
                        raise Stops
    finally:
        session.detach()
    return begun, {name: one.detach().clone() for name, one in model.state_dict().items()}
