"""What is known of a step before it is played: what happens when, and how much memory there is without what moves.

What stays in memory comes and goes in the same segments however long the others take: it is added up at once. What moves is
all that is left to be played.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hf_offload.plan.columns import Column, Mask, SavedColumns
from hf_offload.plan.footprint import BlockSpan, Footprint
from hf_offload.plan.plan import Placement

RELEASED, TRANSFERRED, RECOMPUTED, PACKED, GONE, NEEDED = range(6)
"""What happens when a segment begins, in this order."""
_KINDS = 6


class Item:
    """Saved bytes that have a place on a tier, during the play."""

    __slots__ = (
        "ahead", "arrives_s", "asked", "begins_s", "gone", "held", "kept", "leaves_s", "leaving", "nbytes", "needed",
        "number", "others_bytes", "released", "resident", "stays", "stored_s", "tier", "unit",
    )  # fmt: skip

    def __init__(
        self, unit: str, nbytes: int, gone: int, needed: int, released: int, tier: str, number: int, others_bytes: int
    ):
        self.unit = unit
        self.nbytes = nbytes
        self.gone = gone
        self.needed = needed
        self.released = released
        self.tier = tier
        self.number = number  # in the footprint; -1: the input of a recomputed block
        self.others_bytes = (
            others_bytes  # that the engine holds when this is packed, of those that have no place on a tier
        )
        self.resident = False  # held, and by nothing else
        self.held = self.leaving = self.ahead = self.kept = self.asked = False
        self.stays = False  # it could leave, but backward needs it first
        self.begins_s = self.leaves_s = self.stored_s = 0.0  # of its store
        self.arrives_s = 0.0  # when its load ends

    @property
    def is_asked_for(self) -> bool:
        return self.needed < self.released


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """A step before it is played.

    Attributes:
        events: (segment, what happens, number) in order. The number is the place in ``items`` of what is packed, gone, needed
            or released there, or -1 if it stays in memory; of a transfer, that in the footprint.
        items: What may leave memory, in the order of the footprint.
        recomputed: Segment -> the block that is recomputed when it begins.
        memory_bytes: In each segment, all memory but that of ``items``.
        measured_bytes: The same while the step is measured.
        alone_before: Of it, saved bytes that nothing else holds, before what is gone in the segment is gone.
        dropped_bytes: In each segment, live bytes of the footprint that recompute has dropped, and not brought back yet.
        held_bytes: In each segment, what the engine holds of saved bytes that stay in memory.
        largest_bytes: The largest saved bytes.
        alone_bytes: In each segment, saved bytes that stay and nothing else holds, less what is idle there of ``base_bytes``.
    """

    events: Iterator[tuple[int, int, int]]
    items: list[Item]
    recomputed: Mapping[int, BlockSpan]
    memory_bytes: list[int]
    measured_bytes: list[int]
    alone_before: list[int]
    dropped_bytes: list[int]
    held_bytes: list[int]
    largest_bytes: int
    alone_bytes: list[int]

    def in_order(self) -> list[Item]:
        """``items`` as backward asks for them; what it never asks for comes last, from the end."""
        return sorted(
            self.items,
            key=lambda item: (item.needed, 0) if item.is_asked_for else (math.inf, -item.number),
        )


def schedule_of(footprint: Footprint, placements: Mapping[str, Placement]) -> Schedule:
    """The schedule of a step. ``placements`` names every unit of the footprint."""
    spans = [span for span in footprint.blocks if placements.get(span.name, Placement.KEEP).recomputes]
    rows = _rows(footprint, spans, placements)
    staying, segments, end = rows.saved.where(~rows.moves), footprint.segment_columns, len(footprint.segments)
    packed, released = _sums(staying.packed, staying.nbytes, end), _sums(staying.released, staying.nbytes, end)
    alone = staying.where(staying.gone < staying.released)
    gone = _sums(alone.gone, alone.nbytes, end)
    resident = np.cumsum(gone - _sums(alone.released, alone.nbytes, end))
    dropped = footprint.dropped_bytes(spans)
    idle = footprint.idle_bytes
    memory = footprint.base_bytes + segments.live_bytes + resident - dropped - idle
    return Schedule(
        events=_events(footprint, rows, spans),
        items=_items(footprint, rows, placements, np.cumsum(released)),
        recomputed={span.backward: span for span in spans},
        memory_bytes=memory.tolist(),
        measured_bytes=(memory + segments.measured_bytes).tolist(),
        alone_before=(resident - gone - idle).tolist(),
        dropped_bytes=dropped.tolist(),
        held_bytes=np.cumsum(packed - released).tolist(),
        largest_bytes=int(rows.saved.nbytes[(rows.number >= 0) | rows.moves].max(initial=0)),
        alone_bytes=(resident - dropped - idle).tolist(),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """All that is saved in a step in which some blocks are recomputed, whose inputs come last.

    Attributes:
        saved: When it is there.
        number: In the footprint; -1: a recomputed block's input, or what its recompute saves.
        moves: Whether it has a place on a tier.
    """

    saved: SavedColumns
    number: Column
    moves: Mask


def _rows(footprint: Footprint, spans: Sequence[BlockSpan], placements: Mapping[str, Placement]) -> _Rows:
    saved, begins = footprint.saved_columns, {span.name: span.backward for span in spans}
    on_tier = np.array([placements[unit].tier is not None for unit in footprint.units], np.bool_)
    number = np.arange(len(saved.nbytes))
    if not spans:
        return _Rows(saved, number, on_tier[saved.unit])
    again = np.array([begins.get(block or "", -1) for block in footprint.units.values()], np.int64)[saved.unit]
    # There again from the recompute on, in memory that nothing else holds; or released before.
    is_again, is_there = again >= 0, saved.released > again
    packed, gone = (np.where(is_again, again, times) for times in (saved.packed, saved.gone))
    once = dataclasses.replace(saved, packed=packed, gone=gone).where(is_there)
    number, moves = np.where(is_again, -1, number)[is_there], (on_tier[saved.unit] & ~is_again)[is_there]
    places, last = {unit: place for place, unit in enumerate(footprint.units)}, footprint.released_last
    inputs = [
        (places[one.name], one.boundary_bytes, *one.forward, one.backward, max(last.get(one.name, 0), one.backward + 1))
        for one in spans
    ]
    of_inputs = SavedColumns(*np.array(inputs, np.int64).T)
    return _Rows(
        once.and_then(of_inputs),
        np.concatenate([number, np.full(len(spans), -1)]),
        np.concatenate([moves, on_tier[of_inputs.unit]]),
    )


def _sums(segments: Column, nbytes: Column, end: int) -> Column:
    """Segment -> the bytes of all rows in it."""
    return np.bincount(segments, nbytes, end)[:end].astype(np.int64)  # exact: no step saves 2**53 bytes


def _items(
    footprint: Footprint, rows: _Rows, placements: Mapping[str, Placement], released_bytes: Column
) -> list[Item]:
    """What moves. Of the others, ``released_bytes`` are released up to each segment, including it."""
    moving, number = rows.saved.where(rows.moves), np.flatnonzero(rows.moves)
    order = np.argsort(rows.saved.packed, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    packed_bytes = np.cumsum(np.where(rows.moves, 0, rows.saved.nbytes)[order])
    others_bytes = packed_bytes[place[number]] - released_bytes[moving.packed]
    units = list(footprint.units)
    tiers = [placements[unit].tier or "" for unit in units]
    columns = (moving.nbytes, moving.gone, moving.needed, moving.released, rows.number[number], others_bytes)
    return [
        Item(units[unit], nbytes, gone, needed, released, tiers[unit], number, others)
        for unit, nbytes, gone, needed, released, number, others in zip(
            moving.unit.tolist(), *(column.tolist() for column in columns), strict=True
        )
    ]


def _events(footprint: Footprint, rows: _Rows, spans: Sequence[BlockSpan]) -> Iterator[tuple[int, int, int]]:
    saved, moves, number = rows.saved, rows.moves, np.arange(len(rows.moves))
    count = max(len(number), len(footprint.transfers)) + 1

    def events(segment: Column, kind: int, numbers: Column | int) -> Column:
        return (segment * _KINDS + kind) * count + numbers  # as one number, by which they are sorted

    is_needed = saved.needed < saved.released
    if not moves.any():  # then only the beginning of backward matters
        is_needed &= saved.needed == saved.needed[is_needed].min(initial=len(footprint.segments))
    is_gone = moves & (saved.gone < saved.released)
    found = np.concatenate(
        [
            events(saved.released[moves], RELEASED, number[moves]),
            events(footprint.transfers_at, TRANSFERRED, np.arange(len(footprint.transfers))),
            events(np.array([span.backward for span in spans], np.int64), RECOMPUTED, 0),
            events(saved.packed[moves], PACKED, number[moves]),
            events(saved.gone[is_gone], GONE, number[is_gone]),
            events(saved.needed[is_needed], NEEDED, number[is_needed]),
        ]
    )
    found = np.sort(found[found < len(footprint.segments) * _KINDS * count])
    place = np.full(count, -1)
    place[: len(number)][moves] = np.arange(np.count_nonzero(moves))
    kinds, numbers = found // count % _KINDS, found % count
    numbers = np.where(kinds == TRANSFERRED, numbers, place[numbers])
    # Where backward asks several times in a row for what stays, nothing happens after the first.
    stays = (kinds == NEEDED) & (numbers < 0)
    again = stays[1:] & stays[:-1] & (found[1:] // count == found[:-1] // count)
    once = np.concatenate([[True], ~again])[: len(found)]
    return zip((found // count // _KINDS)[once].tolist(), kinds[once].tolist(), numbers[once].tolist(), strict=True)
