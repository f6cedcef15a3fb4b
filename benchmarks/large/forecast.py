"""What a run is expected to take, before it starts."""

import dataclasses
from typing import Any

from benchmarks.large.shape import Shape
from hf_offload.settings.sizes import format_bytes

_SAVED = 11
"""Tensors of the size of a block's input that a block saves, with elementwise operations recomputed: inputs of both norms and
of the linear layers, queries, keys and values."""
_SAVED_IN_FULL = 29
"""Without that: each operation of GPT-2's GELU saves its inputs, too, which are four times as wide."""
_PROCESS_BYTES = 600 << 20
"""Python, PyTorch, transformers and their buffers."""
_OVERHEAD = 1.2
"""Time of a step to the roofline."""
RATED_BYTES = 600e12
"""What a usual drive of 1 TB is rated to take."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Bytes and seconds; ``read`` and ``written`` are those of a step."""

    peak_bytes: float
    read_bytes: float
    written_bytes: float
    making_bytes: float
    room_bytes: float
    step_s: float
    total_s: float
    total_written_bytes: float

    def text(self, shape: Shape, directory: str) -> str:
        """What is announced."""
        return (
            f"GPT-2 with {shape.layers} layers, {shape.width} wide: {shape.weights / 1e9:.2f} billion weights, trained in "
            f"full in fp32. Weights, gradients and AdamW's state are {4 * shape.weight_bytes / 1e9:.1f} GB; the budget is "
            f"{format_bytes(shape.budget_bytes)}.\n"
            f"It will write about {self.total_written_bytes / 1e9:.0f} GB to {directory}, where it needs "
            f"{self.room_bytes / 1e9:.0f} GB of room until it ends, and take about {self.total_s / 60:.0f} minutes: "
            f"{shape.steps} steps of {shape.tokens} tokens, {self.step_s:.0f} s each. Ctrl-C ends it and removes its files."
        )


def roofline_s(roofline: dict[str, Any], moved_bytes: float) -> float:
    """Seconds of a step if computation and transfers overlapped fully: of one in memory, or of the drive."""
    return max(roofline["compute_s"], moved_bytes / (roofline["both_bytes_per_s"] or float("inf")))


def forecast(shape: Shape, roofline: dict[str, Any]) -> Forecast:
    """Of a run whose weights are updated in backward."""
    weights, largest = shape.weight_bytes, 4 * shape.width * max(shape.vocabulary, 4 * shape.width)
    kept = min(weights, shape.budget_bytes // 2)
    # A share of the weights stays from forward to backward, and one from backward to the next forward.
    moved = weights if kept < weights else 0
    saved = (_SAVED_IN_FULL if shape.automatic else _SAVED) * 4 * shape.tokens * shape.width * shape.layers
    read = 2 * (weights - kept) + 2 * weights + saved
    written = moved + 2 * weights + saved
    step_s = _OVERHEAD * roofline_s(roofline, read + written)
    making_s = weights / (roofline["write_bytes_per_s"] or float("inf")) + shape.weights / 50e6
    return Forecast(
        # The head's gradient, the embedding's, and the windows of the weights' store.
        peak_bytes=kept + 4 * largest + _PROCESS_BYTES,
        read_bytes=read,
        written_bytes=written,
        making_bytes=weights,
        room_bytes=3 * weights + 2 * saved,
        step_s=step_s,
        total_s=making_s + shape.steps * step_s,
        total_written_bytes=weights + shape.steps * written,
    )
