"""The way of a buffer through copies: device memory, pinned memory, tier.

Note: stream order
    A device block may go back to the allocator only when no queued work reads it any more, and the allocator knows only
    of the stream on which the block was made. So the block is dropped in *stream order*: once more bytes are on their way
    out than the plan allows, the compute stream waits for the copy's event, then the reference goes. Whatever is allocated
    there afterwards is ordered behind the copy. Polling from the host alone, or ``record_stream``, would hold blocks while
    later allocations are already made, and the peak would not fall. In the other direction the target is allocated on the
    compute stream in the hook's thread; the load stream waits for an event recorded there, so that it cannot write into
    memory whose former user still runs; compute waits for the load's own event. From then on the target may go, in stream
    order, too: a host that is far ahead of its device would otherwise have all targets of a backward in memory at once.

Note: several compute streams
    Reading ahead loads on the stream of the thread that does so, and another one may use the result: it waits for the load,
    too, and the allocator learns of it. The memory of a slot that is copied to and from directly is ordered slot by slot, for
    no compute stream need be behind another: a load waits for the copy into the slot, and once a slot is free the next
    copy into its memory waits for the last one out of it.
"""

import collections
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, NamedTuple

import torch

from hf_offload.engine.device import Device, Event, Stream
from hf_offload.engine.movers import Mover
from hf_offload.engine.ring import ChunkedSlot, ChunkedTransfer, PinnedRing, chunks_of
from hf_offload.plan import rules
from hf_offload.storage.tier import Slot, Tier
from hf_offload.storage.workers import WorkerPool

logger = logging.getLogger(__name__)


class _Landing:
    """Keeps a load's target for as long as only the load stream knows of it. Held by who copies."""

    __slots__ = ("__weakref__", "target")

    def __init__(self, target: torch.Tensor):
        self.target: torch.Tensor | None = target

    def part(self, begin: int, end: int) -> torch.Tensor:
        assert self.target is not None, "compute is behind a load only once all of it is queued"
        return self.target[begin:end]


class Arrival(NamedTuple):
    """When a load has ended, for which stream its target was allocated, and what keeps it until compute is behind it."""

    event: Event
    stream: Stream
    landing: "weakref.ref[_Landing]"


class StagedMover(Mover):
    """Device memory, pinned memory, tier: copies on side streams, disk I/O behind them on worker threads.

    Tiers of pinned memory (``tier.host_view``) are copied to and from directly. Others go through a ring of pinned
    buffers; demand loads may always take one more than prefetches may.
    """

    drops_early = True

    def __init__(
        self,
        device: Device,
        tier: Tier,
        ring_bytes: int,
        report: Callable[[int, str, BaseException], None],
        pinned: bool = True,
    ):
        super().__init__(tier)
        self._device = device
        self.store_stream = device.new_stream()
        self.load_stream = device.new_stream()
        self._chunk_bytes = rules.chunk_bytes(ring_bytes)
        self._ring = PinnedRing(ring_bytes, pinned)
        self._ring.behind = tier
        self._report = report
        self._rescued: dict[Slot, torch.Tensor] = {}
        self._in_use: set[Slot] = set()
        # Into or out of a slot's own memory, which is held here if nothing else keeps it until the copy has ended.
        self._last_copy: dict[Slot, tuple[Event, torch.Tensor | None]] = {}
        # Event waits and ring waits of the two directions never share a thread: neither can hold the other up.
        self._store_workers = WorkerPool("hf_offload-store", 1, device.make_current)
        self._load_workers = WorkerPool("hf_offload-load", 1, device.make_current)
        # Never behind a prefetch that waits for room.
        self._urgent_workers = WorkerPool("hf_offload-urgent", 1, device.make_current)
        self._arrival_workers = WorkerPool("hf_offload-arrive", 1, device.make_current)
        self._leaving: collections.deque[tuple[Event, Stream, torch.Tensor, Callable[[], None]]] = collections.deque()
        self._leaving_bytes = 0
        # Both ends of a copy outlive it, even if all others let go of them at once: `advance` looks whether it has ended.
        self._ends: collections.deque[tuple[Event, _Landing | None, torch.Tensor]] = collections.deque()
        self._lock = threading.Lock()  # of what is leaving, and of ends
        self._times_stalls = False
        self._stalls: collections.deque[tuple[Event, Event]] = collections.deque()  # when each began and ended
        self._stalled_s = 0.0
        self._stalls_lock = threading.Lock()

    # -- slots --------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, place: str | None = None) -> Slot:
        slot = self._tier.reserve(nbytes, place)
        if nbytes <= self._chunk_bytes or self._tier.host_view(slot) is not None:
            return slot
        self._tier.free(slot)
        chunked = ChunkedSlot(nbytes, [])
        try:
            for size in rules.chunk_sizes(nbytes, self._chunk_bytes):
                chunked.chunks.append(self._tier.reserve(size, place))
        except BaseException:
            for chunk in chunked.chunks:
                self._tier.free(chunk)
            raise
        return chunked

    def free(self, slot: Slot) -> None:
        for chunk, _, _ in chunks_of(slot):
            self._in_use.discard(chunk)
            self._rescued.pop(chunk, None)
            last, view = self._last_copy.pop(chunk, (None, None))
            if last is not None:
                self._device.wait(self.store_stream, last)
                if view is not None:
                    self._ends.append((last, None, view))
            self._tier.free(chunk)

    # -- out ----------------------------------------------------------------------------------------------------------

    def store(
        self, buffer: torch.Tensor, slot: Slot, drop: Callable[[], None], unit: str = "a tensor"
    ) -> "Future[None]":
        compute = self._device.current_stream()
        self._device.wait(self.store_stream, self._device.record(compute))
        view = None if isinstance(slot, ChunkedSlot) else self._tier.host_view(slot)
        if view is not None:
            copied = self._copy_to_tier(buffer, slot, view)
            done = _STORED
        else:
            copied, done = self._store_in_chunks(buffer, slot, unit)
        with self._lock:
            self._leaving.append((copied, compute, buffer, drop))
            self._leaving_bytes += buffer.numel()
        return done

    def _store_in_chunks(self, buffer: torch.Tensor, slot: Slot, unit: str) -> tuple[Event, "Future[None]"]:
        chunks = chunks_of(slot)
        store = ChunkedTransfer[None](len(chunks), lambda: None)
        try:
            for chunk, begin, end in chunks:
                view = self._tier.host_view(chunk)
                if view is not None:
                    copied = self._copy_to_tier(buffer[begin:end], chunk, view)
                    store.end()
                    continue
                self._in_use.add(chunk)
                staging = self._ring.acquire(end - begin)
                copied = self._copy_out(buffer[begin:end], staging)
                self._store_workers.submit(partial(self._write, chunk, staging, copied, store, unit))
        except BaseException:  # no room any more, or Ctrl-C while it was waited for: chunks on their way need not go on
            store.done.cancel()
            raise
        return copied, store.done

    def _copy_to_tier(self, source: torch.Tensor, slot: Slot, view: torch.Tensor) -> Event:
        """In stream order the bytes are in ``view``, the tier's own memory, at once: no thread of the host waits for them."""
        copied = self._copy_out(source, view)
        self._last_copy[slot] = copied, view
        self._tier.copied(slot, "write")
        return copied

    def _copy_out(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        self._device.copy(target, source, self.store_stream)
        return self._device.record(self.store_stream)

    def _write(self, slot: Slot, staging: torch.Tensor, copied: Event, store: ChunkedTransfer[None], unit: str) -> None:
        self._device.synchronize(copied)
        if not store.begin() or slot not in self._in_use:
            self._ring.release(staging)
            return

        def written(error: BaseException | None) -> None:
            try:
                if error is not None and slot in self._in_use:
                    # The device buffer has left in stream order: these are the last bytes there are.
                    self._rescued[slot] = staging.clone()
                    if slot not in self._in_use:  # freed meanwhile: they will not be loaded
                        self._rescued.pop(slot, None)
                    self._report(staging.numel(), unit, error)
            except Exception as failure:  # no memory for them: loading them will raise that nothing is stored
                logger.error(
                    "%d bytes of %s could not be stored and are lost (%s): %s",
                    staging.numel(),
                    unit,
                    error,
                    failure,
                )
            finally:
                self._ring.release(staging)
                store.end()

        _then(lambda: self._tier.write(slot, staging), written)

    def _let_go_of_ends(self) -> None:
        gone = []  # so that nothing is freed under the lock
        with self._lock:
            while self._ends and self._device.has_happened(self._ends[0][0]):
                gone.append(self._ends.popleft())

    def advance(self, limit_bytes: int | None = None) -> None:
        if self._ends:
            self._let_go_of_ends()
        while self._leaving:
            with self._lock:
                if not self._leaving:
                    return
                copied, compute, buffer, drop = self._leaving[0]
                if not self._device.has_happened(copied):
                    if limit_bytes is None or not rules.holds_forward(self._leaving_bytes, limit_bytes):
                        return
                    # The stream on which the block was in use, so that its next use comes after the copy.
                    self._wait(compute, copied)
                self._leaving.popleft()
                self._leaving_bytes -= buffer.numel()
            drop()
            del buffer

    # -- in -----------------------------------------------------------------------------------------------------------

    def load(self, slot: Slot, target: torch.Tensor, urgent: bool) -> "Future[Any]":
        compute = self._device.current_stream()
        free = self._device.record(compute)
        landing = _Landing(target)
        chunks = chunks_of(slot)
        if len(chunks) == 1 and (view := self._view(slot)) is not None:
            done: Future[Arrival] = Future()
            copied = self._copy_from_tier(slot, view, landing, target, free)
            done.set_result(Arrival(copied, compute, weakref.ref(landing)))
            return done
        whose = weakref.ref(landing)
        # The last copy's event stands for all: they share a stream.
        load = ChunkedTransfer(len(chunks), lambda: Arrival(self._device.record(self.load_stream), compute, whose))
        workers = self._urgent_workers if urgent else self._load_workers
        for chunk, begin, end in chunks:
            view = self._view(chunk)
            if view is None:
                workers.submit(partial(self._read, chunk, begin, end, landing, urgent, free, load))
            else:
                self._copy_from_tier(chunk, view, landing, landing.part(begin, end), free)
                load.end()
        return load.done

    def _view(self, slot: Slot) -> torch.Tensor | None:
        """The memory that holds what was stored in ``slot``, unless a drive does."""
        rescued = self._rescued.get(slot)
        return self._tier.host_view(slot) if rescued is None else rescued

    def _copy_from_tier(
        self, slot: Slot, view: torch.Tensor, landing: _Landing, target: torch.Tensor, free: Event
    ) -> Event:
        last, _ = self._last_copy.get(slot, (None, None))
        if last is not None:
            self._device.wait(self.load_stream, last)
        copied = self._copy_in(view, target, free)
        self._last_copy[slot] = copied, None
        self._ends.append((copied, landing, view))
        self._tier.copied(slot, "read")
        return copied

    def _read(
        self,
        slot: Slot,
        begin: int,
        end: int,
        landing: _Landing,
        urgent: bool,
        free: Event,
        load: ChunkedTransfer[Arrival],
    ) -> None:
        if not load.begin():
            return
        try:
            staging = self._ring.acquire(end - begin, urgent)
        except BaseException as error:  # the waiting thread has to raise it
            load.end(error.with_traceback(None))  # which would hold this frame, and with it the target
            return

        def read(error: BaseException | None) -> None:
            self._arrival_workers.submit(partial(self._arrive, error, staging, begin, landing, free, load))

        _then(lambda: self._tier.read(slot, staging, urgent), read)

    def _arrive(
        self,
        error: BaseException | None,
        staging: torch.Tensor,
        begin: int,
        landing: _Landing,
        free: Event,
        load: ChunkedTransfer[Arrival],
    ) -> None:
        try:
            if error is not None:
                raise error
            copied = self._copy_in(staging, landing.part(begin, begin + staging.numel()), free)
            load.end()
            self._device.synchronize(copied)
        except BaseException as failure:  # of the read or of the device: the waiting thread has to raise it
            load.end(failure.with_traceback(None))  # which would hold this frame, and with it the target
        finally:
            self._ring.release(staging)

    def _copy_in(self, source: torch.Tensor, target: torch.Tensor, free: Event) -> Event:
        self._device.wait(self.load_stream, free)
        self._device.copy(target, source, self.load_stream)
        return self._device.record(self.load_stream)

    def arrive(self, there: "Future[Any]", storage: torch.UntypedStorage) -> None:
        arrival: Arrival | None = there.result()
        if arrival is None:  # it was a store
            return
        compute = self._device.current_stream()
        self._wait(compute, arrival.event)
        if compute != arrival.stream:
            target = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._device.use(target, compute)
        landing = arrival.landing()
        if landing is not None:
            landing.target = None

    # -- compute behind copies ----------------------------------------------------------------------------------------

    def _wait(self, compute: Stream, copied: Event) -> None:
        """Let ``compute`` wait for a copy."""
        device = self._device
        if not self._times_stalls or device.has_happened(copied):
            device.wait(compute, copied)
            return
        begin = device.record(compute, timed=True)
        device.wait(compute, copied)
        self._stalls.append((begin, device.record(compute, timed=True)))

    def time_stalls(self) -> None:
        self._times_stalls = True

    def stalled_s(self) -> float:
        with self._stalls_lock:
            while self._stalls and self._device.has_happened(self._stalls[0][1]):
                self._stalled_s += self._device.seconds_between(*self._stalls.popleft())
            return self._stalled_s

    def close(self) -> None:
        for stream in (self.store_stream, self.load_stream):  # the tier's memory goes next
            self._device.synchronize(self._device.record(stream))
        for pool in (self._store_workers, self._load_workers, self._urgent_workers, self._arrival_workers):
            pool.close()
        while self._leaving:
            _, _, _, drop = self._leaving.popleft()
            drop()
        self._ends.clear()
        self._ring.close()


_STORED: "Future[None]" = Future()
"""Of all stores whose bytes are where they belong in stream order."""
_STORED.set_result(None)


def _then(start: "Callable[[], Future[None]]", finish: Callable[[BaseException | None], None]) -> None:
    """Call ``finish`` with the error, or None, once what ``start`` begins has ended, or at once if it cannot begin."""
    callbacks = [finish]
    del finish

    def ended(future: "Future[None]") -> None:
        # A future keeps its callbacks: as long as it is referenced, so would be the buffers of this one.
        callbacks.pop()(CancelledError() if future.cancelled() else future.exception())

    try:
        future = start()
    except BaseException as error:  # a buffer is to be given back, and a thread may wait for its bytes
        callbacks.pop()(error)
    else:
        future.add_done_callback(ended)
