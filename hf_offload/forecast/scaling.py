"""Footprints for batches of other shapes, without counting each: they grow with rows and tokens in known ways."""

import dataclasses
from collections.abc import Callable, Sequence

from hf_offload.plan.footprint import Footprint


class Family:
    """Footprints of one model for any number of rows and tokens.

    Everything but gradients is proportional to the rows of a batch. Along the tokens it is ``a * tokens + b * tokens**2``
    (attention matrices, and attention's arithmetic), which a second counted length tells apart.
    """

    def __init__(self, batch: int, sequence: int, counted: Footprint, other: tuple[int, Footprint] | None):
        self._batch = batch
        self._sequence = sequence
        self._counted = counted
        # Another number of segments: the model takes another path at that length.
        alike = (
            other is not None
            and len(other[1].segments) == len(counted.segments)
            and len(other[1].saved) == len(counted.saved)
        )
        self._other = other if alike else None

    @property
    def knows_lengths(self) -> bool:
        """Whether :meth:`at` may be asked for other numbers of tokens."""
        return self._other is not None

    def at(self, batch: int, sequence: int) -> Footprint:
        """The footprint of ``batch`` rows of ``sequence`` tokens."""
        rows, tokens = batch / self._batch, sequence / self._sequence
        if tokens != 1 and self._other is None:
            raise ValueError("only batches of the counted length are known")
        counted = self._counted
        ratio, compared = (1.0, counted) if self._other is None else (self._other[0] / self._sequence, self._other[1])

        def of(get: Callable[[Footprint], Sequence[float]]) -> list[float]:
            values = []
            for one, two in zip(get(counted), get(compared), strict=True):
                square = max(0.0, (two - ratio * one) / (ratio * ratio - ratio)) if ratio != 1 else 0.0
                values.append(rows * ((one - square) * tokens + square * tokens**2))
            return values

        live = of(lambda footprint: [segment.live_bytes - segment.gradient_bytes for segment in footprint.segments])
        measured = of(lambda footprint: [segment.measured_bytes for segment in footprint.segments])
        seconds = of(lambda footprint: [segment.seconds for segment in footprint.segments])
        saved = of(lambda footprint: [one.nbytes for one in footprint.saved])
        boundaries = of(lambda footprint: [span.boundary_bytes for span in footprint.blocks])
        return dataclasses.replace(
            counted,
            segments=tuple(
                dataclasses.replace(
                    segment, live_bytes=round(nbytes) + segment.gradient_bytes, measured_bytes=round(more), seconds=time
                )
                for segment, nbytes, more, time in zip(counted.segments, live, measured, seconds, strict=True)
            ),
            saved=tuple(
                dataclasses.replace(one, nbytes=round(nbytes)) for one, nbytes in zip(counted.saved, saved, strict=True)
            ),
            blocks=tuple(
                dataclasses.replace(span, boundary_bytes=round(nbytes))
                for span, nbytes in zip(counted.blocks, boundaries, strict=True)
            ),
        )
