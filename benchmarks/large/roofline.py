"""What these cores and this drive allow, in a process of its own: ``python -m benchmarks.large.roofline JSON``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.large.shape import LEARNING_RATE, Shape
from benchmarks.roofline import drive_rates, print_measured, seconds_in_memory


def measure(shape: Shape, directory: str) -> dict[str, Any]:
    """Seconds of a step in memory, and the rates of the drive."""
    return {"compute_s": seconds_in_memory(shape, _step), **drive_rates(shape, directory)}


def _step(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    print_measured(measure)
