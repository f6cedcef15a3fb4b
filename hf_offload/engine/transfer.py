"""State changes of records: storing, forwarding, loading, eviction, and cleanup when one is gone.

Note: threads and the lock
    Training threads pack and unpack, device threads unpack (several at once), I/O threads finish transfers. One re-entrant
    lock guards every record's state and the byte counts; no thread waits for a transfer while holding it. Finalizers take no
    lock: they put a :class:`~hf_offload.engine.record.Cleanup` on the queue ``finalized``, and ``reap`` carries it out.
"""

import collections
import logging
import queue
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

import torch

from hf_offload.engine.device import Device
from hf_offload.engine.movers import Mover
from hf_offload.engine.record import Cleanup, ConsumedCopies, Record, State, WritesInFlight
from hf_offload.engine.stats import OffloadStats
from hf_offload.errors import OffloadError, StandstillError, StorageError, TierFullError
from hf_offload.interrupts import signals_deferred
from hf_offload.plan.rules import Ledger, holds_forward
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.tier import Tier

logger = logging.getLogger(__name__)


class Transfer:
    """Moves records between the device and one tier."""

    def __init__(self, device: Device, tier: Tier, mover: Mover, stats: OffloadStats):
        self.lock = threading.RLock()
        self.finalized: queue.SimpleQueue[Cleanup] = queue.SimpleQueue()
        self.tier = tier
        self.ledger = Ledger()
        self._cleanups: set[Cleanup] = set()  # of all records that are alive, or not cleaned up after yet
        self._device = device
        self.mover = mover
        self._stats = stats
        self._writes = WritesInFlight(self.lock)
        self._consumed = ConsumedCopies()
        # What the plan keeps in memory, oldest first: what backward needs last.
        self._kept: collections.deque[weakref.ref[Record]] = collections.deque()
        self._warned = False
        self._outlived = False  # the session is over, and a thread cleans up after the last records

    @property
    def live_records(self) -> int:
        """How many records graphs still hold."""
        return len(self._cleanups)

    def resident_storages(self) -> list[torch.UntypedStorage]:
        """Of what records hold in memory."""
        with self.lock:
            records = [cleanup() for cleanup in self._cleanups]
            buffers = [None if record is None else record.buffer for record in records]
        return [buffer.untyped_storage() for buffer in buffers if buffer is not None]

    # -- storing ------------------------------------------------------------------------------------------------------

    def adopt(self, record: Record) -> None:
        """Count a new record, whose bytes are in memory."""
        with self.lock:
            self._cleanups.add(record.cleanup)
            self._hold(record)

    def store(self, record: Record, write_behind_bytes: int, place: str | None = None) -> None:
        """Begin to store a resident record, in the part of the tier named ``place``; if it is refused, it stays in memory.

        Waits until at most ``write_behind_bytes`` wait to be written, this one among them where they wait in the memory that
        is short. Raises :class:`~hf_offload.errors.StandstillError` if none of them are any more.
        """
        buffer = record.buffer
        assert buffer is not None, "a resident record holds its bytes"
        reference = weakref.ref(record)
        slot = None
        try:
            slot = self.mover.reserve(record.nbytes, place)
            future = self.mover.store(buffer, slot, partial(self._drop_source, reference), record.unit)
        except BaseException as error:  # Ctrl-C, too, which may come while a place in the queue is waited for
            if slot is not None:
                self.mover.free(slot)
            if isinstance(error, StandstillError) or not isinstance(error, (TierFullError, StorageError)):
                raise
            self.refused(record.nbytes, record.unit, error)
            return
        del buffer
        # A copy into memory is where it belongs in stream order, and there is nothing to wait for but the source.
        settled = None if self.mover.drops_early and future.done() else threading.Event()
        with self.lock:
            cleanup = record.cleanup
            cleanup.slot, cleanup.future, record.settled = slot, future, settled
            record.state = State.STORED if settled is None else State.STORING
            self.ledger.leave(cleanup)
            if settled is not None:
                self._writes.begin(settled, record.nbytes)
        self._stats.step.offloaded_bytes += record.nbytes
        if settled is not None:
            future.add_done_callback(partial(self._settle, settled, reference, record.nbytes))
        self._wait_for_writes(write_behind_bytes)

    def _wait_for_writes(self, limit_bytes: int) -> None:
        """Hold forward back while too much is on its way out of the memory that is short: a slow tier must not raise the
        peak. From an accelerator it has left once it is copied, and then its mover's staging memory is the limit.
        """
        self.mover.advance(limit_bytes)
        if not self._device.is_host or not holds_forward(self._writes.nbytes, limit_bytes):
            return
        begin = time.perf_counter()
        oldest = self._writes.oldest()
        while holds_forward(self._writes.nbytes, limit_bytes) and oldest is not None:
            self._wait_for(oldest)  # its callback has handled a failed store: that is not an error here
            oldest = self._writes.oldest()
        self._stats.step.store_stall_s += time.perf_counter() - begin

    def settle(self) -> None:
        """Wait until whatever is on its way out has left memory. Raises StandstillError if it never will."""
        self.mover.advance(0)
        while (oldest := self._writes.oldest()) is not None:
            self._wait_for(oldest)

    def _wait_for(self, end: "threading.Event | Future[Any]") -> None:
        """Wait until ``end`` is done, whatever became of it. Raises StandstillError if that will not be."""
        if isinstance(end, threading.Event):
            self.tier.wait_for(end.wait)
        elif not end.done():
            self.tier.wait_until_done(end)

    def _settle(
        self, settled: threading.Event, reference: "weakref.ref[Record]", nbytes: int, future: "Future[None]"
    ) -> None:
        # Threads that wait for a future are woken before its callbacks run, and the buffer goes in one of them.
        try:
            self._stored(reference, nbytes, future)
        finally:
            settled.set()

    def _stored(self, reference: "weakref.ref[Record]", nbytes: int, future: "Future[None]") -> None:
        with self.lock:
            self._writes.nbytes -= nbytes
            record = reference()
            if record is None or record.cleanup.future is not future:
                return
            try:
                error = future.exception()
            except CancelledError:  # by code that keeps the bytes in memory, and does the rest
                return
            if error is not None:
                self._become_resident(record)
                self.refused(record.nbytes, record.unit, error)
                return
            record.state = State.STORED
            if not self.mover.drops_early and not record.wanted:
                self._release_buffer(record)

    def _drop_source(self, reference: "weakref.ref[Record]") -> None:
        with self.lock:
            record = reference()
            if record is not None and record.state in (State.STORING, State.STORED) and not record.wanted:
                self._release_buffer(record)

    def refused(self, nbytes: int, unit: str, error: BaseException) -> None:
        """The tier refused a tensor: it stays in memory, with one warning for all."""
        self._stats.step.refused_bytes += nbytes
        if not self._warned:
            self._warned = True
            logger.warning(
                "The %s tier refused %s (%s), so it stays in memory, as will everything it refuses later: %s",
                self.tier.name,
                unit,
                format_bytes(nbytes),
                str(error),  # not the error: stored log records would keep the record alive through its traceback
            )

    def _become_resident(self, record: Record) -> None:
        slot, record.slot, record.future = record.slot, None, None
        record.state = State.RESIDENT
        self.ledger.stop_leaving(record.cleanup)
        if slot is not None:
            self.mover.free(slot)

    # -- keeping ------------------------------------------------------------------------------------------------------

    def keep(self, record: Record) -> None:
        """``record`` stays in memory, as long as :meth:`make_room` finds room for it."""
        with self.lock:
            while self._kept and self._kept[0]() is None:
                self._kept.popleft()
            self.ledger.keep(record.cleanup)
            self._kept.append(weakref.ref(record))

    def make_room(self, limit_bytes: int, write_behind_bytes: int) -> None:
        """Move what was to be kept, oldest first, until at most ``limit_bytes`` of saved tensors are in memory.

        Waits for what is on its way out, too. What then is left has no other place: the tier refused it, or backward needs it
        first. Raises :class:`~hf_offload.errors.StandstillError` if nothing that is on its way arrives any more.
        """
        ledger = self.ledger
        while ledger.resident_bytes > limit_bytes:
            record = self._oldest_kept() if ledger.resident_bytes - ledger.leaving_bytes > limit_bytes else None
            if record is not None:
                self.store(record, write_behind_bytes)
                continue
            oldest = self._writes.oldest()
            if oldest is None:
                return
            begin = time.perf_counter()
            self.mover.advance(0)
            if ledger.resident_bytes > limit_bytes:
                self._wait_for(oldest)
            self._stats.step.store_stall_s += time.perf_counter() - begin
            self.reap()

    def _oldest_kept(self) -> Record | None:
        with self.lock:
            while self._kept:
                record = self._kept.popleft()()
                if record is not None and record.cleanup.kept:
                    self.ledger.keep(record.cleanup, False)
                    if record.state is State.RESIDENT and not record.wanted:
                        return record
        return None

    # -- needing again ------------------------------------------------------------------------------------------------

    def keep_for_backward(self, record: Record) -> None:
        """Backward comes to ``record`` soon: do not let it leave memory any more. Cancels a store that has not begun."""
        with self.lock:
            if record.buffer is None or record.wanted:
                return
            record.wanted = True
            self.ledger.want(record.cleanup)
            self._stats.step.forwarded_bytes += record.nbytes
            if record.state is State.STORING and record.future is not None and record.future.cancel():
                self._become_resident(record)

    def start_load(self, record: Record, urgent: bool = False) -> None:
        """Begin to load a stored record. The caller holds the lock and has seen state STORED and no memory."""
        slot = record.slot
        assert slot is not None, "a stored record has a slot"
        target = self._device.allocate(record.nbytes, record.phase)
        record.future = self.mover.load(slot, target, urgent)
        record.hold(target)
        record.state = State.LOADING
        self._hold(record)
        self.ledger.want(record.cleanup)
        self._stats.step.loaded_bytes += record.nbytes

    def fetch(self, record: Record) -> tuple[torch.UntypedStorage, int]:
        """The storage that holds the record's bytes and their offset in it, in order with this thread's compute.

        Waits for a load if it must. Raises :class:`~hf_offload.errors.OffloadError` if the bytes cannot be read back.
        """
        self.mover.advance()
        begin, tried = 0.0, False
        while True:
            with self.lock:
                if record.state is State.LOADING and _has_succeeded(record.future):
                    record.state = State.LOADED
                memory = record.memory()
                if memory is not None and record.state is not State.LOADING:
                    there = self._hand_out(record)
                    break
                if record.state is State.STORED:
                    self.start_load(record, urgent=True)
                    tried = True
                # A store is over for us when its callback has changed the state: after its future, which wakes us before.
                end = record.settled if record.state is State.STORING else record.future
            begin = begin or time.perf_counter()
            self._await(record, end, tried)
        if there is not None:
            self.mover.arrive(there, memory[0])
        if begin:
            self._stats.step.load_stall_s += time.perf_counter() - begin
        return memory

    def _hand_out(self, record: Record) -> "Future[Any] | None":
        """Backward gets what memory holds of ``record``. The transfer that compute has to be behind, if there is one."""
        if record.buffer is None:
            self._stats.step.aliased_bytes += record.nbytes
        elif record.state in (State.STORING, State.STORED):
            self.keep_for_backward(record)
        self._consume(record)
        # Also of a copy that was evicted and is still alive: this stream may not have waited for it.
        return record.future if record.state in (State.LOADED, State.STORED) else None

    def _await(self, record: Record, end: "threading.Event | Future[Any] | None", is_last_try: bool) -> None:
        """Wait for the store or load that ``record`` needs to end: what has become of it is in its state, or seen next."""
        assert end is not None, "a record whose bytes are not in memory has a transfer on its way"
        try:
            self._wait_for(end)
            if isinstance(end, Future):
                end.result()
            return  # of a store, the device buffer is gone, and its bytes were on their way: now they can be loaded
        except BaseException as error:
            if not isinstance(error, Exception):
                raise  # Ctrl-C while waiting: the load goes on
            with self.lock:  # what a load that stands still would fill is never looked at again
                if record.future is end and record.state is State.LOADING:
                    self._release_buffer(record)
                    record.forget_memory()
                    self.ledger.asked(record.cleanup)
                    record.state = State.STORED
            # Its traceback would hold this frame, which holds the future, which holds the error.
            cause = error.with_traceback(None)
            if not is_last_try and isinstance(error, StorageError) and not isinstance(error, StandstillError):
                return  # it was read ahead, perhaps long ago: whether it can be read is seen when it is needed
            raise OffloadError(
                f"Activations of {record.unit} ({format_bytes(record.nbytes)}) could not be read back, so this backward "
                "cannot go on; no weight was changed by this step, unless backward itself updates weights: then load the "
                f"last checkpoint. {error}"
            ) from cause

    def _consume(self, record: Record) -> None:
        """``record`` has been handed to backward."""
        self.ledger.asked(record.cleanup)
        if record.state in (State.LOADED, State.STORED) and record.buffer is not None:
            self._consumed.add(record)

    def evict_beyond(self, limit_bytes: int) -> None:
        """Drop the oldest consumed copies beyond ``limit_bytes``; the tier still has their bytes."""
        ledger = self.ledger
        if ledger.resident_bytes - ledger.ahead_bytes - ledger.kept_bytes <= limit_bytes or not self._consumed:
            return
        with self.lock:
            for record in self._consumed.beyond(limit_bytes):
                record.state = State.STORED
                record.wanted = False
                self._release_buffer(record)

    # -- accounts -----------------------------------------------------------------------------------------------------

    @signals_deferred
    def reap(self) -> None:
        """Carry out what finalizers left to do: free slots, cancel stores that are not needed, correct the counts."""
        while not self._outlived and not self.finalized.empty():
            try:
                self._clean_up(self.finalized.get_nowait())
            except queue.Empty:
                break
        self.mover.advance()

    def _clean_up(self, cleanup: Cleanup) -> None:
        with self.lock:
            self._cleanups.discard(cleanup)
            self.ledger.end(cleanup)
            self._consumed.forget(cleanup.key)
            if cleanup.slot is not None:
                if cleanup.future is not None:
                    cleanup.future.cancel()
                self.mover.free(cleanup.slot)

    def _hold(self, record: Record) -> None:
        self.ledger.hold(record.cleanup)
        self._stats.step.peak_resident_bytes = max(self._stats.step.peak_resident_bytes, self.ledger.resident_bytes)

    def _release_buffer(self, record: Record) -> None:
        record.buffer = None
        self.ledger.drop(record.cleanup)

    def close_when_unused(self) -> None:
        """Close mover and tier: now, or in a thread once the last graph that holds a record has gone."""
        self.reap()
        if self.live_records == 0:
            self._close()
        else:
            self._outlived = True
            threading.Thread(target=self._outlive, name="hf_offload-outlive", daemon=True).start()

    def _outlive(self) -> None:
        self._device.make_current()
        while self.live_records > 0:
            self._clean_up(self.finalized.get())
        self._close()

    def _close(self) -> None:
        try:
            self.mover.close()
        finally:
            self.tier.close()


def _has_succeeded(future: "Future[Any] | None") -> bool:
    try:
        return future is not None and future.done() and future.exception() is None
    except CancelledError:
        return False
