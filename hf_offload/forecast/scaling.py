"""Footprints for batches of other shapes, without counting each: they grow with rows and tokens in known ways."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from hf_offload.plan.footprint import Footprint, Saved, Segment


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
        self.knows_lengths = (
            other is not None
            and len(other[1].segments) == len(counted.segments)
            and len(other[1].saved) == len(counted.saved)
        )
        """Whether :meth:`at` may be asked for other numbers of tokens."""
        ratio, compared = 1.0, counted
        if other is not None and self.knows_lengths:
            ratio, compared = other[0] / sequence, other[1]

        def terms(get: Callable[[Footprint], Iterable[float]]) -> list[tuple[float, float]]:
            found = []
            for one, two in zip(get(counted), get(compared), strict=True):
                square = max(0.0, (two - ratio * one) / (ratio * ratio - ratio)) if ratio != 1 else 0.0
                found.append((one - square, square))
            return found

        self._live = terms(lambda one: (segment.live_bytes - segment.gradient_bytes for segment in one.segments))
        self._measured = terms(lambda one: (segment.measured_bytes for segment in one.segments))
        self._seconds = terms(lambda one: (segment.seconds for segment in one.segments))
        self._saved = terms(lambda one: (each.nbytes for each in one.saved))
        self._boundaries = terms(lambda one: (span.boundary_bytes for span in one.blocks))

    def at(self, batch: int, sequence: int) -> Footprint:
        """The footprint of ``batch`` rows of ``sequence`` tokens."""
        rows, tokens = batch / self._batch, sequence / self._sequence
        if tokens != 1 and not self.knows_lengths:
            raise ValueError("only batches of the counted length are known")
        counted = self._counted

        def scaled(terms: Iterable[tuple[float, float]]) -> Iterator[float]:
            return (rows * (linear * tokens + square * tokens**2) for linear, square in terms)

        segments = zip(counted.segments, scaled(self._live), scaled(self._measured), scaled(self._seconds), strict=True)
        return dataclasses.replace(
            counted,
            segments=tuple(
                Segment(
                    one.unit, one.backward, round(nbytes) + one.gradient_bytes, one.gradient_bytes, seconds, round(more)
                )
                for one, nbytes, more, seconds in segments
            ),
            saved=tuple(
                Saved(one.unit, round(nbytes), one.packed, one.gone, one.needed, one.released)
                for one, nbytes in zip(counted.saved, scaled(self._saved), strict=True)
            ),
            blocks=tuple(
                dataclasses.replace(span, boundary_bytes=round(nbytes))
                for span, nbytes in zip(counted.blocks, scaled(self._boundaries), strict=True)
            ),
        )
