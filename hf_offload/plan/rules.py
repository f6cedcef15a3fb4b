"""How saved bytes move: the rules that the engine follows and the simulation plays, each of them written once.

Nothing here knows tensors, threads or time: an entry is a record of the engine or an item of the simulation.
"""

import enum
import itertools
from collections.abc import Iterable, Iterator
from typing import Protocol

WINDOW_RECORDS = 6
"""Records of average size that backward may have in memory early, unless a plan says how many bytes. With five or fewer,
backward waits where attention needs two large records at once; with more it waits no less, and every record costs memory."""

WRITE_BEHIND_BYTES = 160 << 20
"""Bytes that may wait to be written before forward is held back. On a CPU they are what offloading has not freed yet, so they
are part of the peak; with less, forward waits whenever attention saves its largest tensors in a row."""

RING_BYTES = 512 << 20
"""Pinned memory between an accelerator and a drive."""

# What loads that backward waits for may use of the ring, and stores and prefetches may not.
_URGENT_SHARE = 0.25
_CHUNK_BYTES = 32 << 20
_ALIGNMENT = 4096


class Entry(Protocol):
    """Saved bytes, and why they are in memory.

    Attributes:
        nbytes: How many.
        held: They are in memory, whatever else holds them there.
        leaving: Only until the tier has them, or, on an accelerator, until they are copied.
        ahead: Because backward asks for them soon.
        kept: Because the plan keeps them.
    """

    nbytes: int
    held: bool
    leaving: bool
    ahead: bool
    kept: bool


class Ledger:
    """Counts the bytes of all entries that are held, leaving, ahead and kept. Every transition may be repeated."""

    __slots__ = ("ahead_bytes", "kept_bytes", "leaving_bytes", "resident_bytes")

    def __init__(self) -> None:
        self.resident_bytes = self.leaving_bytes = self.ahead_bytes = self.kept_bytes = 0

    @property
    def own_bytes(self) -> int:
        """Bytes that are in memory for the window alone: on their way out, or early for backward."""
        return self.leaving_bytes + self.ahead_bytes

    def hold(self, entry: Entry) -> None:
        """The bytes are in memory."""
        if not entry.held:
            entry.held = True
            self.resident_bytes += entry.nbytes

    def drop(self, entry: Entry) -> None:
        """The bytes have left memory."""
        if entry.held:
            entry.held = False
            self.resident_bytes -= entry.nbytes
        self.stop_leaving(entry)

    def leave(self, entry: Entry) -> None:
        """A store has begun."""
        if not entry.leaving:
            entry.leaving = True
            self.leaving_bytes += entry.nbytes

    def stop_leaving(self, entry: Entry) -> None:
        """The store has ended, or does not take the bytes away any more."""
        if entry.leaving:
            entry.leaving = False
            self.leaving_bytes -= entry.nbytes

    def want(self, entry: Entry) -> None:
        """Backward asks for the bytes soon: they come back, or stay."""
        self.stop_leaving(entry)
        if not entry.ahead:
            entry.ahead = True
            self.ahead_bytes += entry.nbytes

    def asked(self, entry: Entry) -> None:
        """Backward has asked for the bytes: what it uses is not the window's."""
        if entry.ahead:
            entry.ahead = False
            self.ahead_bytes -= entry.nbytes

    def keep(self, entry: Entry, kept: bool = True) -> None:
        """The plan keeps the bytes, or no longer."""
        if entry.kept is not kept:
            entry.kept = kept
            self.kept_bytes += entry.nbytes if kept else -entry.nbytes

    def end(self, entry: Entry) -> None:
        """Autograd holds the bytes no more."""
        self.drop(entry)
        self.asked(entry)
        self.keep(entry, False)


def window_bytes(saved_bytes: int, records: int, count: int = WINDOW_RECORDS) -> int:
    """Bytes of ``count`` records of average size."""
    return count * saved_bytes // max(1, records)


def staying(sizes: Iterable[int], window: int) -> int:
    """How many records never leave, of those with these sizes in the order in which backward asks: the first that fit into
    its window together.
    """
    return sum(1 for _ in itertools.takewhile(lambda end: end <= window, itertools.accumulate(sizes)))


def holds_forward(waiting_bytes: int, write_behind_bytes: int) -> bool:
    """Whether forward has to wait, for the oldest store first, while so many bytes have not left."""
    return waiting_bytes > write_behind_bytes


def consumed_bytes(window: int, largest: int) -> int:
    """How much may be in memory of what backward has used and the graph still holds: more is dropped, oldest first, where the
    tier has it, too.
    """
    return window + 2 * largest


class Where(enum.Enum):
    """Where the bytes are that backward asks for next."""

    TIER = enum.auto()
    MEMORY = enum.auto()  # held by the engine: they have not left yet
    ELSEWHERE = enum.auto()  # in memory for another use, or in use already
    BETWEEN = enum.auto()  # no longer in memory, and not in the tier yet


class Ahead(enum.Enum):
    """What reading ahead does with a record."""

    PASS = enum.auto()
    LOAD = enum.auto()
    KEEP = enum.auto()  # a store does not take it away any more
    STOP = enum.auto()  # the window is full


def read_ahead(ledger: Ledger, entry: Entry, where: Where, window: int, at_least_one: bool = True) -> Ahead:
    """What to do with the record that backward asks for next of those that are not ahead yet."""
    if entry.ahead or entry.kept or where is Where.ELSEWHERE:
        return Ahead.PASS
    if where is Where.BETWEEN:
        return Ahead.STOP
    own = ledger.own_bytes
    # What still leaves is in memory until it has left: keeping it adds nothing.
    if own + (0 if entry.leaving else entry.nbytes) > window and not (own == 0 and at_least_one):
        return Ahead.STOP
    return Ahead.LOAD if where is Where.TIER else Ahead.KEEP


def ring_bytes_shared(capacity_bytes: int) -> int:
    """The part of a ring that stores and prefetches may use."""
    return int(capacity_bytes * (1 - _URGENT_SHARE))


def has_ring_room(used_bytes: int, nbytes: int, limit_bytes: int) -> bool:
    """Whether a ring with so much in use takes ``nbytes`` more: one buffer at a time, however large."""
    return not used_bytes or used_bytes + nbytes <= limit_bytes


def chunk_bytes(ring_bytes: int) -> int:
    """The size in which large records pass a ring."""
    return max(_ALIGNMENT, min(_CHUNK_BYTES, ring_bytes_shared(ring_bytes)) // _ALIGNMENT * _ALIGNMENT)


def chunk_sizes(nbytes: int, chunk: int) -> Iterator[int]:
    """The pieces of a record, whose last may be smaller."""
    return (min(chunk, nbytes - begin) for begin in range(0, nbytes, chunk))


# -- weights, gradients and optimizer state on their way: what the engine keeps to, and plans count on ---------------------

STATE_WINDOW_BYTES = 48 << 20
"""On the way to a tier and back at any time, of optimizer state and of gradients each, where there is no budget."""
PART_BYTES = 8 << 20
"""Of a parameter, where it can be cut, at most: an update then needs memory for the state of so much."""

_SMALLEST_PART_BYTES = 64 << 10
_PARTS = 3
"""Of a part that is updated: its state (AdamW's), and a copy."""
_WEIGHTS_WINDOW_BYTES = 64 << 20
_SPARE_PARTS = 4
_STATE_SHARE = 32
_WIDEST_STATE_WINDOW_BYTES = 96 << 20
WIDTHS = (2, 1)
"""Of the windows of gradients and state that plans try, as multiples of the narrowest: wider ones wait less for a drive."""
_WEIGHTS_SHARE = 4


def state_window(budget_bytes: int | None, width: int = 1) -> int:
    """Bytes of state, and as many of gradients, that may be on the way: of a memory budget, a small part at most, ``width``
    times as much where a plan has room for it.
    """
    if budget_bytes is None:
        return STATE_WINDOW_BYTES
    return min(_WIDEST_STATE_WINDOW_BYTES, budget_bytes * width // _STATE_SHARE)


def weights_window(staying_bytes: int, largest_bytes: int) -> int:
    """The same of weights, of which ``staying_bytes`` may be in memory, and the largest has ``largest_bytes``."""
    return max(2 * largest_bytes, min(_WEIGHTS_WINDOW_BYTES, staying_bytes // _WEIGHTS_SHARE))


def spare_bytes(window_bytes: int, smallest_bytes: int = 0) -> int:
    """Of a window, what may be kept in buffers that nothing uses, for the next of their size: none where even the smallest
    buffer is larger.
    """
    spare = window_bytes // _SPARE_PARTS
    return spare if smallest_bytes <= spare else 0


def part_bytes(budget_bytes: int | None) -> int:
    """Size of the parts that parameters are cut into: no larger than what may be on the way."""
    return min(PART_BYTES, max(_SMALLEST_PART_BYTES, state_window(budget_bytes)))


def update_bytes(needed_bytes: int, budget_bytes: int) -> int:
    """Memory of an update that takes ``needed_bytes`` for all parameters at once, where they are cut into parts."""
    return min(needed_bytes, _PARTS * part_bytes(budget_bytes))
