"""Reading ahead: what backward will need, in which order, and how many bytes early.

A *tape* is what one forward (or several, before their backward) packed. Backward mostly unpacks it in reverse; how it
really did is learned and used the next time a tape of the same shape begins its backward.
"""

import collections
import time
import weakref
from typing import NamedTuple

import torch

from hf_offload.engine.record import Record, State
from hf_offload.engine.transfer import Transfer

Shape = tuple[int, int]


class Tape:
    """Records in the order in which they were packed, and the order in which backward asked for them."""

    def __init__(self) -> None:
        self.records: list[weakref.ref[Record]] = []
        self.nbytes = 0
        self.largest = 0
        self.asked: list[int] = []
        self._seen: set[int] = set()
        self.order: list[int] = []
        self.place: list[int] = []
        self.next = 0
        self.backward_began_s = 0.0

    def add(self, record: Record) -> None:
        record.tape = self
        record.ordinal = len(self.records)
        self.records.append(weakref.ref(record))
        self.nbytes += record.nbytes
        self.largest = max(self.largest, record.nbytes)

    @property
    def shape(self) -> Shape:
        return len(self.records), self.nbytes

    @property
    def smallest_window(self) -> int:
        """Bytes below which reading ahead would run dry between two records."""
        return max(self.largest, self.usual_records(4))

    def usual_records(self, count: int) -> int:
        """Bytes of ``count`` records of average size."""
        return count * self.nbytes // max(1, len(self.records))

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

    def follow(self, order: list[int]) -> None:
        """Use ``order`` for what is ahead."""
        self.order = order
        self.backward_began_s = time.perf_counter()
        self.place = [0] * len(order)
        for index, ordinal in enumerate(order):
            self.place[ordinal] = index
        self.next = 0


class _Before(NamedTuple):
    window_bytes: int
    waited_share: float


class Prefetcher:
    """Keeps ``window_bytes`` of records loaded, or on their way, ahead of backward.

    Without a fixed window it adapts. A backward that waited for more than a small share of its time widens it; if that
    did not help, because the disk is the limit, it is taken back and not tried again for a while. Backwards that hardly
    waited narrow it, down to where one last waited. It stays between four and ten records of usual size, one of the largest
    at least: what more does not hide is the disk's bandwidth, and more would only be memory.
    """

    _FIRST_RECORDS = 8
    _WIDEN = 1.25
    _NARROW = 0.85
    _WAITED_SHARE = 0.04
    _HELPED_SHARE = 0.8
    _CALM_STEPS = 4
    _HOPELESS_STEPS = 32
    _MOST_RECORDS = 10
    _SHAPES = 16

    def __init__(self, transfer: Transfer, fixed_window_bytes: int | None):
        self._transfer = transfer
        self._fixed = fixed_window_bytes
        self.window_bytes = fixed_window_bytes or 0
        self.tape = Tape()
        self._learned: collections.OrderedDict[Shape, list[int]] = collections.OrderedDict()
        self._narrowest = 0  # the widest window with which backward still waited
        self._calm = 0
        self._pause = 0
        self._widened_from: _Before | None = None

    def packed(self, record: Record) -> None:
        """A record was packed in forward."""
        self.tape.add(record)

    def begin_tape(self, load_stall_s: float) -> None:
        """A new forward begins after a backward, in which ``load_stall_s`` seconds were spent waiting."""
        tape = self.tape
        if tape.asked:
            self._learned[tape.shape] = tape.whole_order()
            self._learned.move_to_end(tape.shape)
            if len(self._learned) > self._SHAPES:
                self._learned.popitem(last=False)
            if self._fixed is None:
                self._adapt(tape, load_stall_s)
        self.tape = Tape()

    def _adapt(self, tape: Tape, load_stall_s: float) -> None:
        smallest = tape.smallest_window
        window = self._window(tape)
        waited_share = load_stall_s / (time.perf_counter() - tape.backward_began_s)
        before, self._widened_from = self._widened_from, None
        self._pause = max(0, self._pause - 1)
        if before is not None and waited_share > self._HELPED_SHARE * before.waited_share:
            window = before.window_bytes
            self._pause = self._HOPELESS_STEPS
        elif waited_share > self._WAITED_SHARE:
            self._calm = 0
            self._narrowest = window
            if self._pause == 0:
                self._widened_from = _Before(window, waited_share)
                window = round(window * self._WIDEN)
        else:
            self._calm += 1
            if self._calm >= self._CALM_STEPS:
                self._calm = 0
                narrower = round(window * self._NARROW)
                window = narrower if narrower > self._narrowest else window
        self.window_bytes = min(max(window, smallest), max(smallest, tape.usual_records(self._MOST_RECORDS)))

    def _window(self, tape: Tape) -> int:
        if self._fixed is not None:
            return self._fixed
        if not self.window_bytes:
            return max(tape.smallest_window, tape.usual_records(self._FIRST_RECORDS))
        return max(self.window_bytes, tape.smallest_window)

    def asked(self, record: Record) -> None:
        """Backward is about to use ``record``: note it, and read further ahead."""
        tape: Tape = record.tape
        with self._transfer.lock:
            if not tape.in_backward:
                tape.follow(self._learned.get(tape.shape) or list(range(len(tape.records) - 1, -1, -1)))
            tape.ask(record.ordinal)
            if record.ordinal >= len(tape.place):
                return  # packed after this tape's backward had begun
            place = tape.place[record.ordinal]
            if place < tape.next - 1 and record.state is State.STORED and record.memory() is None:
                tape.next = place  # a second pass over the graph: read ahead from here again
            tape.next = max(tape.next, place + 1)

    def fill(self, tape: Tape) -> None:
        """Start loads, in order, as far as the window allows."""
        transfer = self._transfer
        window = self._window(tape)
        with transfer.lock:
            while tape.next < len(tape.order):
                record = tape.records[tape.order[tape.next]]()
                if record is not None and not record.ahead:
                    if record.state is State.STORING and record.buffer is None:
                        return  # between the device and the tier: next time
                    if record.state in (State.STORING, State.RESIDENT):
                        if transfer.ahead_bytes + record.nbytes > window:
                            return
                        transfer.keep_for_backward(record)
                    elif record.state is State.STORED and record.memory() is None:
                        if transfer.ahead_bytes + record.nbytes > window:
                            return
                        try:
                            transfer.start_load(record)
                        except torch.OutOfMemoryError:
                            return  # reading ahead is a convenience; what is needed now has its memory
                tape.next += 1
