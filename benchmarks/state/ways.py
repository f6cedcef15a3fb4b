"""How a step is taken: with optimizer state in memory, and with what this package moves."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hf_offload.session import OffloadSession
from hf_offload.state.optimizer import streaming_of

IN_MEMORY, LAZY, IN_BACKWARD = "memory", "ssd", "ssd-in-backward"
WAYS = (IN_MEMORY, LAZY, IN_BACKWARD)
LEARNING_RATE, MAX_NORM = 1e-4, 1.0


@dataclasses.dataclass(frozen=True)
class Loop:
    """What a step of training consists of, and the weights after the last one."""

    forward: Callable[..., Any]
    backward: Callable[[torch.Tensor], object]
    update: Callable[[], None]
    """Clips gradients, steps, and clears gradients."""
    weights: Callable[[], Iterable[torch.Tensor]]


def train_in_torch(way: str, model: torch.nn.Module, session: OffloadSession) -> Loop:
    """``torch.optim.AdamW``, whose state is where the session's configuration says."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    session.prepare_optimizer(optimizer)
    session.defer_updates()

    def update() -> None:
        if way != IN_BACKWARD:
            session.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    def weights() -> Iterable[torch.Tensor]:
        streaming = streaming_of(optimizer)
        if streaming is not None:
            streaming.finish()
        return model.parameters()

    return Loop(model, torch.Tensor.backward, update, weights)
