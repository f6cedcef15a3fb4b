"""What these cores and this drive allow, in a process of its own: ``python -m benchmarks.mezo.roofline JSON``."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.large.shape import Shape
from benchmarks.roofline import drive_rates, median_s, print_measured, seconds_in_memory
from hf_offload.methods.mezo.directions import BACK, MINUS, PLUS, Move, Shift, Update, make_moves, memory_for

_DRAWN = 1 << 24


@torch.no_grad()
def measure(shape: Shape, directory: str) -> dict[str, Any]:
    """Seconds of a forward pass in memory and of the three directions that a step draws with the moves along them, by the
    clock and of all cores, which others on the machine do not slow; and the rates of the drive.
    """
    drawn = shape.weights / _DRAWN
    return {
        "forward_s": seconds_in_memory(shape, _forward),
        "forward_cores_s": seconds_in_memory(shape, _forward, time.process_time),
        "directions_s": _of_directions(time.perf_counter) * drawn,
        "directions_cores_s": _of_directions(time.process_time) * drawn,
        **drive_rates(shape, directory),
    }


def _forward(model: nn.Module, tokens: Tensor) -> Callable[[], object]:
    model.eval()
    return lambda: model(input_ids=tokens, labels=tokens)


def _of_directions(clock: Callable[[], float]) -> float:
    """The moves of a step, as a weight on a tier makes them."""
    weight = torch.randn(_DRAWN)
    last: list[Move] = [Shift(MINUS, 1e-3), Shift(BACK, 1e-3), Update(0.1, 1e-6, 0.0)]
    drawn = lambda seed: torch.Generator().manual_seed(seed)  # noqa: E731

    def moves() -> None:
        memory = memory_for(weight, weight.device)
        make_moves(weight, memory, drawn(0), last)
        make_moves(weight, memory, drawn(1), [Shift(PLUS, 1e-3)])
        make_moves(weight, memory, drawn(1), [Shift(MINUS, 1e-3)])

    return median_s(moves, clock)


if __name__ == "__main__":
    print_measured(measure)
