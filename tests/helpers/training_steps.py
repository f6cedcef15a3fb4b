"""The training loop of a session, step by step."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from hf_offload import OffloadConfig, offload_activations
from hf_offload.session import OffloadSession


def training_steps(
    model: nn.Module,
    config: OffloadConfig,
    count: int,
    loss_of: Callable[[int], torch.Tensor],
    *,
    micro_batches: int = 1,
    learning_rate: float = 1e-3,
) -> Iterator[tuple[OffloadSession, list[float]]]:
    """Each of ``count`` steps of AdamW when it has ended: the session, and the losses of its micro-batches.

    ``loss_of(step)`` computes one of them; it is gone, with its graph, before the next.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    with offload_activations(model, config) as session:
        for step in range(count):
            losses = []
            for _ in range(micro_batches):
                loss = loss_of(step)
                loss.backward()
                losses.append(loss.item())
                del loss
            optimizer.step()
            optimizer.zero_grad()
            session.end_step()
            yield session, losses


def end_step(optimizer: torch.optim.Optimizer, session: OffloadSession | None = None) -> None:
    """What a loop does of a step once its backwards have run."""
    optimizer.step()
    optimizer.zero_grad()
    if session is not None:
        session.end_step()


def weight_bytes(model: nn.Module) -> int:
    """Of all parameters of a model."""
    return sum(parameter.nbytes for parameter in model.parameters())
