"""Steps in which some blocks recompute their elementwise operations, put together from one without any and one with all.

What a block saves, and how long it takes, does not depend on what the others do: every part of a step that belongs to one
block is taken from the one step or from the other.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_offload.plan.footprint import Footprint, Saved, Segment

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
            both, names = [[], []], set()
        self._parts = both
        of_plain, of_reduced = (_saved_bytes(one) for one in (plain, reduced))
        self.blocks = tuple(
            span.name for span in plain.blocks if span.name in names and of_reduced[span.name] < of_plain[span.name]
        )
        self._pace = [self._pace_of(*pair) for pair in zip(*self._parts, strict=True)]
        self.more_s = self._more_s()
        self._moments = [[_moments(one, parts) for one in step.saved if self.blocks] for step, parts in self._pairs]

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
        return min(_Clock(self._parts[0], begins, chosen, False).at(at), begins[-1] - 1)

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
        is_plain, is_reduced = (
            _Clock(self._parts[0], begins, chosen, False),
            _Clock(self._parts[1], begins, chosen, True),
        )
        units = self._plain.units
        saved = [
            is_plain.saved(one, moments)
            for one, moments in zip(self._plain.saved, self._moments[0], strict=True)
            if units[one.unit] not in blocks
        ]
        saved += (
            is_reduced.saved(one, moments)
            for one, moments in zip(self._reduced.saved, self._moments[1], strict=True)
            if units[one.unit] in blocks
        )
        reduced_spans = {span.name: span for span in self._reduced.blocks}
        spans = []
        for span in self._plain.blocks:
            own, clock = (reduced_spans[span.name], is_reduced) if span.name in blocks else (span, is_plain)
            forward = clock.at(own.forward[0]), clock.at(own.forward[1])
            spans.append(
                dataclasses.replace(own, forward=forward, backward=clock.at(own.backward), not_twice=span.not_twice)
            )
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


def _moments(saved: "Saved", parts: Sequence[_Part]) -> tuple[tuple[int, int], ...]:
    return tuple(_moment(at, parts) for at in (saved.packed, saved.gone, saved.needed, saved.released))


def _moment(at: int, parts: Sequence[_Part]) -> tuple[int, int]:
    """The part that ``at`` lies in, and how far into it."""
    place = max(0, bisect.bisect_right(parts, at, key=lambda one: one.begin) - 1)
    return place, at - parts[place].begin


class _Clock:
    """Turns moments of one of the two steps into moments of the step that is put together from them."""

    def __init__(self, parts: Sequence[_Part], begins: Sequence[int], chosen: Sequence[bool], is_reduced: bool):
        self._parts = parts
        self._begins = begins
        # Where the part comes from the other step, moments are as far into it as they were.
        self._shares = [
            None if own is is_reduced else (end - begin) / max(1, one.end - one.begin)
            for one, own, begin, end in zip(parts, chosen, begins, begins[1:], strict=False)
        ]

    def at(self, moment: int) -> int:
        """An index of a segment."""
        return self._of(_moment(moment, self._parts))

    def saved(self, one: "Saved", moments: tuple[tuple[int, int], ...]) -> "Saved":
        """Saved bytes whose times are ``moments``."""
        packed, gone, needed, released = map(self._of, moments)
        # An operation that uses what it has asked for takes one segment at least.
        return type(one)(
            one.unit, one.nbytes, packed, gone, needed, max(released, needed + (one.released > one.needed))
        )

    def _of(self, moment: tuple[int, int]) -> int:
        place, offset = moment
        share = self._shares[place]
        return self._begins[place] + (offset if share is None else round(offset * share))


def _slower(segments: Iterable["Segment"], pace: float) -> "list[Segment]":
    return [dataclasses.replace(one, seconds=one.seconds * pace) for one in segments]
