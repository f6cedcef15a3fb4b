"""Steps in which some blocks recompute their elementwise operations, put together from one without any and one with all.

What a block saves, and how long it takes, does not depend on what the others do: every part of a step that belongs to one
block is taken from the one step or from the other.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hf_offload.plan.footprint import BlockSpan, Column, Footprint, Saved, Segment

_MOST_KNOWN = 64
"""Steps that are kept, of the many that a search looks at."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """Consecutive segments of a step: of one block, or (``block`` is None) between blocks."""

    block: str | None
    begin: int
    end: int


class Mixed:
    """All steps that differ in which blocks recompute their elementwise operations.

    Attributes:
        blocks: The blocks that save less so, in order.
        more_s: Block -> how much longer it computes so.
    """

    def __init__(self, plain: "Footprint", reduced: "Footprint"):
        self._plain, self._reduced = plain, reduced
        self._known: dict[frozenset[str], Footprint] = {}
        names = set(_parts(plain)) & set(_parts(reduced))
        both = [_all_parts(one, names) for one in (plain, reduced)]
        if [one.block for one in both[0]] != [one.block for one in both[1]]:  # they do not go through the same blocks
            names = set()
            both = [_all_parts(one, names) for one in (plain, reduced)]
        self._parts = both
        of_plain, of_reduced = (_saved_bytes(one) for one in (plain, reduced))
        self.blocks = tuple(
            span.name for span in plain.blocks if span.name in names and of_reduced[span.name] < of_plain[span.name]
        )
        self._pace = [self._pace_of(*pair) for pair in zip(*self._parts, strict=True)]
        self.more_s = self._more_s()
        self._times = [_Times(step.saved, parts) for step, parts in self._pairs]
        spans = {span.name: span for span in reduced.blocks}
        self._spans = plain.blocks, tuple(spans[span.name] if span.name in names else span for span in plain.blocks)
        self._of_spans = [_Moments(*pair) for pair in zip(map(_times_of_spans, self._spans), self._parts, strict=True)]

    def __reduce__(self) -> tuple[type["Mixed"], tuple["Footprint", "Footprint"]]:
        return Mixed, (self._plain, self._reduced)

    @property
    def _pairs(self) -> Iterable[tuple["Footprint", list[_Part]]]:
        return zip((self._plain, self._reduced), self._parts, strict=True)

    def step(self, blocks: frozenset[str]) -> "Footprint":
        """The step in which ``blocks`` do it, and no others."""
        found = self._known.get(blocks)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[blocks] = self._put_together(blocks)
        return found

    def _pace_of(self, plain: _Part, reduced: _Part) -> float:
        """What the times of a part are multiplied by: to compute more takes no less time, whatever clocks say."""
        usual, found = _seconds(self._plain, plain), _seconds(self._reduced, reduced)
        return max(1.0, usual / found) if found else 1.0

    def _more_s(self) -> dict[str, float]:
        found = dict.fromkeys(self.blocks, 0.0)
        for plain, reduced, pace in zip(*self._parts, self._pace, strict=True):
            if plain.block in found:
                found[plain.block] += pace * _seconds(self._reduced, reduced) - _seconds(self._plain, plain)
        return found

    def moment(self, at: int) -> int:
        """The segment of the step in which all blocks do it that is where ``at`` is in the one in which none does."""
        chosen = [one.block in self.more_s for one in self._parts[0]]
        parts = zip(*self._parts, chosen, strict=True)
        sizes = (one.end - one.begin if is_reduced else usual.end - usual.begin for usual, one, is_reduced in parts)
        begins = [0, *itertools.accumulate(sizes)]
        now = _Clock(self._parts[0], begins, chosen, False).at(_Moments([at], self._parts[0]))
        return min(int(now[0]), begins[-1] - 1)

    def _put_together(self, blocks: frozenset[str]) -> "Footprint":
        segments: list[Segment] = []
        begins: list[int] = []
        for plain, reduced, pace in zip(*self._parts, self._pace, strict=True):
            begins.append(len(segments))
            if plain.block in blocks:
                part = self._reduced.segments[reduced.begin : reduced.end]
                segments += part if pace == 1.0 else _slower(part, pace)
            else:
                segments += self._plain.segments[plain.begin : plain.end]
        begins.append(len(segments))
        chosen = [one.block in blocks for one in self._parts[0]]
        clocks = [_Clock(parts, begins, chosen, which) for parts, which in zip(self._parts, (False, True), strict=True)]
        units = self._plain.units
        saved: list[Saved] = []
        for (step, _), times, clock, is_reduced in zip(self._pairs, self._times, clocks, (False, True), strict=True):
            saved += (
                type(one)(one.unit, one.nbytes, *now)
                for one, now in zip(step.saved, clock.all_of(times), strict=True)
                if (units[one.unit] in blocks) is is_reduced
            )
        spans = []
        rows = [
            clock.at(moments).reshape(-1, 3).tolist() for clock, moments in zip(clocks, self._of_spans, strict=True)
        ]
        for place, span in enumerate(self._plain.blocks):
            is_reduced = span.name in blocks
            begin, end, backward = rows[is_reduced][place]
            own = self._spans[is_reduced][place]
            spans.append(dataclasses.replace(own, forward=(begin, end), backward=backward, not_twice=span.not_twice))
        return dataclasses.replace(
            self._plain,
            segments=tuple(segments),
            saved=tuple(sorted(saved, key=lambda one: one.packed)),
            blocks=tuple(spans),
            elementwise=None,
        )


def _seconds(step: "Footprint", part: _Part) -> float:
    return sum(one.seconds for one in step.segments[part.begin : part.end])


def _saved_bytes(step: "Footprint") -> dict[str | None, int]:
    found: dict[str | None, int] = dict.fromkeys((span.name for span in step.blocks), 0)
    for one in step.saved:
        block = step.units[one.unit]
        found[block] = found.get(block, 0) + one.nbytes
    return found


def _parts(step: "Footprint") -> dict[str, tuple[_Part, _Part]]:
    """Block -> its parts of forward and of backward, which goes through the blocks from the last to the first.

    What one block has saved may be needed in the backward of later ones, too: that is a part of theirs.
    """
    segments, units = step.segments, step.units
    last = {units[one.unit]: index for index, one in enumerate(segments) if one.backward}
    at = next((index for index, one in enumerate(segments) if one.backward), len(segments))
    found = {}
    for span in sorted(step.blocks, key=lambda span: -span.forward[0]):
        (begin, left), end = span.forward, last.get(span.name, -1) + 1
        while at < end and units[segments[at].unit] != span.name:
            at += 1
        if left > begin and at < end:
            found[span.name] = _Part(span.name, begin, left), _Part(span.name, at, end)
            at = end
    return found


def _all_parts(step: "Footprint", names: set[str]) -> list[_Part]:
    """The whole step in order, with what is between the parts of the blocks ``names``."""
    own = sorted(
        (one for name, pair in _parts(step).items() if name in names for one in pair), key=lambda one: one.begin
    )
    found, at = [], 0
    for one in own:
        found += [_Part(None, at, one.begin), one]
        at = one.end
    return [*found, _Part(None, at, len(step.segments))]


class _Moments:
    """Segments of one of the two steps, each as the part that it lies in and how far it is into it."""

    def __init__(self, moments: Sequence[int], parts: Sequence[_Part]):
        begins = np.array([one.begin for one in parts], np.int64)
        at = np.array(moments, np.int64)
        self.parts = np.maximum(np.searchsorted(begins, at, side="right") - 1, 0)
        self.offsets = at - begins[self.parts]


class _Times:
    """When saved bytes are packed, gone, needed and released, and which are asked for."""

    def __init__(self, saved: Sequence["Saved"], parts: Sequence[_Part]):
        fields = ("packed", "gone", "needed", "released")
        self.moments = [_Moments([getattr(one, field) for one in saved], parts) for field in fields]
        self.asked = np.array([one.released > one.needed for one in saved], np.int64)


def _times_of_spans(spans: Sequence["BlockSpan"]) -> list[int]:
    return [at for span in spans for at in (*span.forward, span.backward)]


class _Clock:
    """Turns moments of one of the two steps into moments of the step that is put together from them."""

    def __init__(self, parts: Sequence[_Part], begins: Sequence[int], chosen: Sequence[bool], is_reduced: bool):
        self._begins = np.array(begins, np.int64)
        # Where the part comes from the other step, moments are as far into it as they were.
        self._shares = np.array(
            [
                1.0 if own is is_reduced else (end - begin) / max(1, one.end - one.begin)
                for one, own, begin, end in zip(parts, chosen, begins, begins[1:], strict=False)
            ]
        )

    def at(self, moments: _Moments) -> "Column":
        """Indices of segments."""
        # Rounded as Python rounds, to even numbers.
        return self._begins[moments.parts] + np.rint(moments.offsets * self._shares[moments.parts]).astype(np.int64)

    def all_of(self, times: _Times) -> list[list[int]]:
        """When each of them is packed, gone, needed and released here."""
        packed, gone, needed, released = map(self.at, times.moments)
        # An operation that uses what it has asked for takes one segment at least.
        rows = np.stack([packed, gone, needed, np.maximum(released, needed + times.asked)], axis=1)
        found: list[list[int]] = rows.tolist()
        return found


def _slower(segments: Iterable["Segment"], pace: float) -> "list[Segment]":
    return [dataclasses.replace(one, seconds=one.seconds * pace) for one in segments]
