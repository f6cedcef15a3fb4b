"""Reading ahead: which records backward will need next, and how many bytes of them to have in memory early."""

import collections
import weakref
from collections.abc import Sequence

import torch

from hf_offload.engine.record import Record, State
from hf_offload.engine.transfer import Transfer
from hf_offload.plan import rules
from hf_offload.plan.plan import Keeping


class Tape:
    """What one forward (or several, before their backward) packed: records in that order, and the order in which backward
    asked for them. *Places* are positions in the latter.

    ``next`` is the first place that reading ahead has not come to.
    """

    def __init__(self) -> None:
        self.records: list[weakref.ref[Record]] = []
        self.sizes: list[int] = []
        self.kept: set[int] = set()  # ordinals of what stays in memory because the plan says so
        self._kept_bytes: dict[str, int] = {}  # by unit
        self._excess_bytes = 0  # beyond what the plan counts with
        self.staying_bytes = 0  # of what backward will ask for first
        self.nbytes = 0
        self.largest = 0
        self.narrowed_bytes: int | None = None  # reading ahead found no memory: its window since then
        self.asked: list[int] = []
        self._seen: set[int] = set()
        self.order: Sequence[int] = ()
        self.place: list[int] = []
        self.next = 0

    def add(self, record: Record) -> None:
        record.tape = self
        record.ordinal = len(self.records)
        self.records.append(weakref.ref(record))
        self.sizes.append(record.nbytes)
        self.nbytes += record.nbytes
        self.largest = max(self.largest, record.nbytes)

    def may_keep(self, unit: str, nbytes: int, keeping: Keeping) -> bool:
        """Whether ``unit`` may keep so many more bytes in memory. Counts them if it may."""
        planned = keeping.unit_bytes.get(unit, 0)
        before = self._kept_bytes.get(unit, 0)
        excess = max(0, before + nbytes - max(planned, before))
        if self._excess_bytes + excess > keeping.spare_bytes:
            return False
        self._excess_bytes += excess
        self._kept_bytes[unit] = before + nbytes
        return True

    @property
    def in_backward(self) -> bool:
        return bool(self.asked)

    def ask(self, ordinal: int) -> None:
        """Note when backward asks for a record for the first time."""
        if ordinal not in self._seen:
            self._seen.add(ordinal)
            self.asked.append(ordinal)

    def whole_order(self) -> list[int]:
        """As backward asked, then what it never asked for, from the end."""
        return self.asked + [index for index in range(len(self.records) - 1, -1, -1) if index not in self._seen]

    def expect(self, order: Sequence[int]) -> None:
        """Backward begins: expect it to go in ``order``."""
        self.order = order
        self.place = [0] * len(order)
        for index, ordinal in enumerate(order):
            self.place[ordinal] = index
        self.next = 0


class Prefetcher:
    """Decides what backward will need soon: what is loaded ahead of it, and what does not have to leave at all.

    How much that may be is the plan's window, and what is done within it is in :mod:`~hf_offload.plan.rules`. What the
    window holds when backward begins need not have left memory: which records those are is known from the last step, so they
    are not written at all.
    """

    _LENGTHS = 16

    def __init__(self, transfer: Transfer):
        self._transfer = transfer
        self._fixed: int | None = None
        self._limit: int | None = None
        self._most: int | None = None
        self.tape = Tape()
        # Number of records -> order of backward. Batches of other lengths save as many tensors, only of other sizes.
        self._learned: collections.OrderedDict[int, list[int]] = collections.OrderedDict()
        self._staying: frozenset[int] = frozenset()  # ordinals, if the next tape is like the last

    def apply_plan(
        self, window_bytes: int | None, limit_bytes: int | None = None, most_bytes: int | None = None
    ) -> None:
        """A new plan: its window, or None, the most bytes of saved tensors that may be in memory, or None, and of a window
        that it does not name.

        Which records stay has to be learned anew, for others are saved now.
        """
        self._fixed = window_bytes
        self._limit = limit_bytes
        self._most = most_bytes
        self._staying = frozenset()

    def packed(self, record: Record, kept: bool = False) -> bool:
        """A record was packed in forward. Returns whether backward will ask for it so soon that it is to stay in memory.

        What is ``kept`` by the plan takes none of the window.
        """
        self.tape.add(record)
        if kept:
            self.tape.kept.add(record.ordinal)
        if kept or record.ordinal not in self._staying:
            return False
        # The last tape may have been of a smaller batch.
        self.tape.staying_bytes += record.nbytes
        return self._fixed is None or self.tape.staying_bytes <= self._fixed

    def begin_tape(self) -> None:
        """A new forward begins after a backward."""
        tape = self.tape
        if tape.asked:
            order = tape.whole_order()
            self._learned[len(order)] = order
            self._learned.move_to_end(len(order))
            if len(self._learned) > self._LENGTHS:
                self._learned.popitem(last=False)
            self._staying = self._first_in_window(tape, order)
        self.tape = Tape()

    def _first_in_window(self, tape: Tape, order: list[int]) -> frozenset[int]:
        moved = [ordinal for ordinal in order if ordinal not in tape.kept]
        return frozenset(moved[: rules.staying((tape.sizes[ordinal] for ordinal in moved), self.window(tape))])

    def window(self, tape: Tape) -> int:
        """Bytes that may be in memory ahead of the backward of ``tape``."""
        if tape.narrowed_bytes is not None:
            return tape.narrowed_bytes
        if self._fixed is not None:
            return self._fixed
        usual = rules.window_bytes(tape.nbytes, len(tape.records))
        return usual if self._most is None else min(usual, self._most)

    def asked(self, record: Record) -> None:
        """Backward is about to use ``record``: note it, and read further ahead."""
        tape: Tape = record.tape
        with self._transfer.lock:
            if not tape.in_backward:
                tape.expect(self._learned.get(len(tape.records)) or range(len(tape.records) - 1, -1, -1))
            tape.ask(record.ordinal)
            if record.ordinal >= len(tape.place):
                return  # packed after this tape's backward had begun
            place = tape.place[record.ordinal]
            if place < tape.next - 1 and record.state is State.STORED and record.memory() is None:
                tape.next = place  # a second pass over the graph: read ahead from here again
            tape.next = max(tape.next, place + 1)

    def _fits(self, nbytes: int) -> bool:
        limit, transfer = self._limit, self._transfer
        return limit is None or transfer.ledger.resident_bytes + nbytes <= limit

    def fill(self, tape: Tape) -> None:
        """Start loads, in order, as far as the window allows."""
        transfer, window = self._transfer, self.window(tape)
        with transfer.lock:
            while tape.next < len(tape.order):
                record = tape.records[tape.order[tape.next]]()
                if record is not None:
                    todo = rules.read_ahead(
                        transfer.ledger, record.cleanup, _where(record), window, tape.narrowed_bytes is None
                    )
                    if todo is rules.Ahead.STOP or (todo is rules.Ahead.LOAD and not self._fits(record.nbytes)):
                        return
                    if todo is rules.Ahead.KEEP:
                        transfer.keep_for_backward(record)
                    elif todo is rules.Ahead.LOAD:
                        try:
                            transfer.start_load(record)
                        except torch.OutOfMemoryError:
                            # Reading ahead is a convenience. To try as much again would only flush the allocator's cache.
                            tape.narrowed_bytes = window // 2
                            return
                tape.next += 1


def _where(record: Record) -> rules.Where:
    if record.state is State.STORED:
        if record.buffer is None:
            return rules.Where.TIER if record.memory() is None else rules.Where.ELSEWHERE
        return rules.Where.MEMORY if record.cleanup.leaving else rules.Where.ELSEWHERE
    if record.state is State.STORING or record.state is State.RESIDENT:
        return rules.Where.BETWEEN if record.buffer is None else rules.Where.MEMORY
    return rules.Where.ELSEWHERE
