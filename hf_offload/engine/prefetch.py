"""Reading ahead: what backward will need, in which order, and how many bytes early.

A *tape* is what one forward (or several, before their backward) packed. Backward mostly unpacks it in reverse; how it
really did is learned and used the next time a tape of the same shape begins its backward.
"""

import collections
import time
import weakref

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
        return max(self.largest, 4 * self.nbytes // max(1, len(self.records)))

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


class Prefetcher:
    """Keeps ``window_bytes`` of records loaded, or on their way, ahead of backward.

    Without a fixed window it adapts: a backward that waited for more than a small share of its time widens it, some that
    did not narrow it again, down to where one last waited. It never falls below two usual records or one of the largest.
    """

    _WIDEN = 1.25
    _NARROW = 0.85
    _CALM_STEPS = 4
    _WAITED_SHARE = 0.02
    _MAX_SHARE = 0.2
    _SHAPES = 16

    def __init__(self, transfer: Transfer, fixed_window_bytes: int | None):
        self._transfer = transfer
        self._fixed = fixed_window_bytes
        self.window_bytes = fixed_window_bytes or 0
        self.tape = Tape()
        self._learned: collections.OrderedDict[Shape, list[int]] = collections.OrderedDict()
        self._narrowest = 0
        self._calm = 0

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
        ceiling = max(tape.smallest_window, round(tape.nbytes * self._MAX_SHARE))
        if load_stall_s > self._WAITED_SHARE * (time.perf_counter() - tape.backward_began_s):
            self._calm = 0
            self._narrowest = self.window_bytes
            self.window_bytes = round(self.window_bytes * self._WIDEN)
        else:
            self._calm += 1
            if self._calm >= self._CALM_STEPS:
                self._calm = 0
                narrower = round(self.window_bytes * self._NARROW)
                if narrower > self._narrowest:
                    self.window_bytes = narrower
        self.window_bytes = min(max(self.window_bytes, tape.smallest_window), ceiling)

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
        window = self.window_bytes if self._fixed is not None else max(self.window_bytes, tape.smallest_window)
        with transfer.lock:
            while tape.next < len(tape.order):
                record = tape.records[tape.order[tape.next]]()
                if record is not None and not record.ahead:
                    if record.state in (State.STORING, State.RESIDENT):
                        if transfer.ahead_bytes + record.nbytes > window:
                            return
                        transfer.keep_for_backward(record)
                    elif record.state is State.STORED and record.memory() is None:
                        if transfer.ahead_bytes + record.nbytes > window:
                            return
                        transfer.start_load(record)
                tape.next += 1
