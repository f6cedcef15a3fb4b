"""Footprints for batches of other shapes, without counting each: they grow with rows and tokens in known ways."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from hf_offload.plan.footprint import Footprint, Saved, Segment

_Terms = tuple[float, float, float]
"""Constant, linear and square."""


def _fit(lengths: Sequence[float], values: Sequence[float]) -> _Terms:
    """The terms of one to three ``values``, the first of which is at length 1."""
    one = values[0]
    if len(values) == 1:
        return 0.0, one, 0.0
    if len(values) == 2:
        ratio = lengths[1]
        square = max(0.0, (values[1] - ratio * one) / (ratio * ratio - ratio))
        return 0.0, one - square, square
    slopes = [(value - one) / (length - 1) for length, value in zip(lengths[1:], values[1:], strict=True)]
    square = max(0.0, (slopes[1] - slopes[0]) / (lengths[2] - lengths[1]))
    linear = slopes[1] - square * (lengths[2] + 1)
    return one - linear - square, linear, square


class Family:
    """Footprints of one model for any number of rows and tokens.

    Everything but gradients is proportional to the rows of a batch. Along the tokens it is ``a * tokens + b * tokens**2``
    (attention matrices, and attention's arithmetic), which a second counted length tells apart. With a third one there is a
    constant as well, for any batch: gradients that a tiled loss adds up, weights that are read.
    """

    def __init__(self, batch: int, sequence: int, counted: Footprint, others: Sequence[tuple[int, Footprint]] = ()):
        self._batch = batch
        self._sequence = sequence
        self._counted = counted
        # Another number of segments: the model takes another path at that length.
        self.knows_lengths = bool(others) and all(
            len(other.segments) == len(counted.segments) and len(other.saved) == len(counted.saved)
            for _, other in others
        )
        """Whether :meth:`at` may be asked for other numbers of tokens."""
        known = [(length / sequence, other) for length, other in others] if self.knows_lengths else []
        reduced = [(length, other.elementwise) for length, other in others if other.elementwise is not None]
        self._elementwise = None
        if counted.elementwise is not None and len(reduced) == len(others):
            self._elementwise = Family(batch, sequence, counted.elementwise, reduced)

        def terms(get: Callable[[Footprint], Iterable[float]]) -> list[_Terms]:
            values = zip(get(counted), *(get(other) for _, other in known), strict=True)
            return [_fit((1.0, *(ratio for ratio, _ in known)), one) for one in values]

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

        def scaled(terms: Iterable[_Terms]) -> Iterator[float]:
            return (
                max(0.0, constant + rows * (linear * tokens + square * tokens**2)) for constant, linear, square in terms
            )

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
            elementwise=self._elementwise_at(batch, sequence),
        )

    def _elementwise_at(self, batch: int, sequence: int) -> Footprint | None:
        same = sequence == self._sequence
        if self._elementwise is None or not (same or self._elementwise.knows_lengths):
            return None
        return self._elementwise.at(batch, sequence)
