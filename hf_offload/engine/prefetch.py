"""Reading ahead: which records backward will need next, and how many bytes of them to have in memory early."""

import collections
import itertools
import time
from typing import NamedTuple

import torch

from hf_offload.engine.record import Record, State
from hf_offload.engine.tape import Tape
from hf_offload.engine.transfer import Transfer


class _Before(NamedTuple):
    window_bytes: int
    waited_share: float


class Prefetcher:
    """Decides what backward will need soon: what is loaded ahead of it, and what does not have to leave at all.

    ``window_bytes`` of records are kept loaded, or on their way, ahead of backward; one record at least, however large.
    Without a fixed window it adapts. A backward that waited for more than a small share of its time widens it; if that did
    not help, because the disk is the limit, it is taken back and not tried again for a while. Many backwards in a row that
    hardly waited narrow it. It stays between four records of usual size, with which it begins, and five. Seven to ten would
    hide most of what is waited for when attention needs two large records at once, but every record costs its size in peak
    memory; whoever wants that trade sets the window.

    What the window holds when backward begins need not have left memory. Which records those are is known from the last
    step, so they are not written at all.
    """

    _WIDEN = 1.25
    _NARROW = 0.85
    _WAITED_SHARE = 0.04
    _HELPED_SHARE = 0.8
    _CALM_STEPS = 16
    _HOPELESS_STEPS = 32
    _FEWEST_RECORDS = 4
    _MOST_RECORDS = 5
    _LENGTHS = 16

    def __init__(self, transfer: Transfer, fixed_window_bytes: int | None):
        self._transfer = transfer
        self._fixed = fixed_window_bytes
        self.window_bytes = fixed_window_bytes or 0
        self.tape = Tape()
        # Number of records -> order of backward. Batches of other lengths save as many tensors, only of other sizes.
        self._learned: collections.OrderedDict[int, list[int]] = collections.OrderedDict()
        self._staying: frozenset[int] = frozenset()  # ordinals, if the next tape is like the last
        self._calm = 0
        self._pause = 0
        self._widened_from: _Before | None = None

    def packed(self, record: Record) -> bool:
        """A record was packed in forward. Returns whether backward will ask for it so soon that it is to stay in memory."""
        self.tape.add(record)
        return record.ordinal in self._staying

    def begin_tape(self, load_stall_s: float) -> None:
        """A new forward begins after a backward, in which ``load_stall_s`` seconds were spent waiting."""
        tape = self.tape
        if tape.asked:
            order = tape.whole_order()
            self._learned[len(order)] = order
            self._learned.move_to_end(len(order))
            if len(self._learned) > self._LENGTHS:
                self._learned.popitem(last=False)
            if self._fixed is None:
                self._adapt(tape, load_stall_s)
            self._staying = self._first_in_window(tape, order)
        self.tape = Tape()

    def _first_in_window(self, tape: Tape, order: list[int]) -> frozenset[int]:
        ends = itertools.accumulate(tape.sizes[ordinal] for ordinal in order)
        return frozenset(ordinal for ordinal, end in zip(order, ends, strict=True) if end <= self._window(tape))

    def _adapt(self, tape: Tape, load_stall_s: float) -> None:
        window = self._window(tape)
        waited_share = load_stall_s / (time.perf_counter() - tape.backward_began_s)
        before, self._widened_from = self._widened_from, None
        self._pause = max(0, self._pause - 1)
        if before is not None and waited_share > self._HELPED_SHARE * before.waited_share:
            window = before.window_bytes
            self._pause = self._HOPELESS_STEPS
        elif waited_share > self._WAITED_SHARE:
            self._calm = 0
            if self._pause == 0:
                self._widened_from = _Before(window, waited_share)
                window = round(window * self._WIDEN)
        else:
            self._calm += 1
            if self._calm >= self._CALM_STEPS:
                self._calm = 0
                window = round(window * self._NARROW)
        smallest, largest = tape.usual_records(self._FEWEST_RECORDS), tape.usual_records(self._MOST_RECORDS)
        self.window_bytes = min(max(window, smallest), largest)

    def _window(self, tape: Tape) -> int:
        if self._fixed is not None:
            return self._fixed
        return max(self.window_bytes, tape.usual_records(self._FEWEST_RECORDS))

    def asked(self, record: Record) -> None:
        """Backward is about to use ``record``: note it, and read further ahead."""
        tape: Tape = record.tape
        with self._transfer.lock:
            if not tape.in_backward:
                tape.follow(self._learned.get(len(tape.records)) or range(len(tape.records) - 1, -1, -1))
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
                    # What still leaves is in memory, too, until it has left; keeping it then adds nothing.
                    more = 0 if record.leaving else record.nbytes
                    has_room = transfer.own_bytes + more <= window or transfer.own_bytes == 0
                    if record.state in (State.STORING, State.RESIDENT):
                        if not has_room:
                            return
                        transfer.keep_for_backward(record)
                    elif record.state is State.STORED and record.memory() is None:
                        if not has_room:
                            return
                        try:
                            transfer.start_load(record)
                        except torch.OutOfMemoryError:
                            return  # reading ahead is a convenience; what is needed now has its memory
                tape.next += 1
