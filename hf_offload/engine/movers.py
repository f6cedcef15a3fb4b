"""How a buffer gets from the device into a tier and back.

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
    Reading ahead loads on the stream of whoever reads ahead, and another one may use what was loaded: it waits for the load,
    too, and the allocator is told. The memory of a slot that is copied to and from directly is ordered slot by slot, for
    no compute stream need be behind another: a load waits for the copy into the slot, and once a slot is free the next
    copy into its memory waits for the last one out of it.

Note: chunks
    What goes through the ring goes in chunks, each with a slot of its own: while one is written, the next is copied. A
    record as large as the ring would leave drive and link waiting for each other, and a larger one would pin its size.
"""

import abc
import collections
import dataclasses
import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, NamedTuple

import torch

from hf_offload.engine.device import Device, Event, Stream
from hf_offload.errors import TierFullError
from hf_offload.storage.buffers import PAGE
from hf_offload.storage.ram import RamTier
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
    """When a load has ended, for which stream its target was allocated, and who keeps that until compute is behind it."""

    event: Event
    stream: Stream
    landing: "weakref.ref[_Landing]"


class Mover(abc.ABC):
    """Moves bytes for the transfer layer. A load's future gives what compute has to wait for, or None."""

    def __init__(self, tier: Tier):
        self._tier = tier

    def reserve(self, nbytes: int, place: str | None = None) -> Slot:
        """Room for a buffer, in the part of the tier named ``place``. Raises as the tier does."""
        return self._tier.reserve(nbytes, place)

    def free(self, slot: Slot) -> None:
        """Give the room back, as the tier does."""
        self._tier.free(slot)

    @abc.abstractmethod
    def store(self, buffer: torch.Tensor, slot: Slot, drop: Callable[[], None]) -> "Future[None]":
        """Start writing. ``drop`` is called in a training thread as soon as the engine may let go of ``buffer``, unless
        the future already says so (see :attr:`drops_early`).
        """

    @abc.abstractmethod
    def load(self, slot: Slot, target: torch.Tensor, urgent: bool) -> "Future[Arrival] | Future[None]":
        """Start reading into ``target``."""

    @abc.abstractmethod
    def arrive(self, there: "Future[Any]", storage: torch.UntypedStorage) -> None:
        """Order the calling thread's compute behind the last transfer to or from ``storage``, which is done."""

    def advance(self, limit_bytes: int | None = None) -> None:  # noqa: B027  nothing to do where nothing is copied
        """Let go of device buffers that have been copied, without waiting. Called in training threads.

        Beyond ``limit_bytes``, compute waits for copies that have not ended, oldest first, and those buffers go, too.
        """

    def time_stalls(self) -> None:  # noqa: B027  what a host waits for it can time itself
        """Find out from now on how long streams wait for copies, which their host does not see."""

    def stalled_s(self) -> float:
        """Seconds for which compute streams have waited for copies, as far as they have computed yet."""
        return 0.0

    drops_early: bool
    """Whether buffers go through ``drop``. If not, the buffer is free when the store's future is done."""

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for what runs. The tier is closed by its owner."""


class HostMover(Mover):
    """The tier reads and writes the tensors' own memory: no copy at all."""

    drops_early = False

    def store(self, buffer: torch.Tensor, slot: Slot, drop: Callable[[], None]) -> "Future[None]":
        return self._tier.write(slot, buffer)

    def load(self, slot: Slot, target: torch.Tensor, urgent: bool) -> "Future[Arrival] | Future[None]":
        return self._tier.read(slot, target, urgent)

    def arrive(self, there: "Future[Any]", storage: torch.UntypedStorage) -> None:
        pass

    def close(self) -> None:
        pass


@dataclasses.dataclass(slots=True, eq=False)
class ChunkedSlot(Slot):
    """Room for a buffer that is moved in chunks: their slots, in order."""

    chunks: list[Slot]


class StagedMover(Mover):
    """Device memory, pinned memory, tier: copies on side streams, disk I/O behind them on worker threads.

    Tiers of pinned memory (``tier.host_view``) are copied to and from directly. Others go through a ring of pinned
    buffers; demand loads may always take one more than prefetches may.
    """

    drops_early = True
    _CHUNK_BYTES = 32 << 20

    def __init__(
        self,
        device: Device,
        tier: Tier,
        ring_bytes: int,
        report: Callable[[BaseException, int], None],
        pinned: bool = True,
    ):
        super().__init__(tier)
        self._device = device
        self.store_stream = device.new_stream()
        self.load_stream = device.new_stream()
        self._chunk_bytes = max(PAGE, min(self._CHUNK_BYTES, PinnedRing.shared(ring_bytes)) // PAGE * PAGE)
        self._ring = PinnedRing(ring_bytes, pinned)
        self._ring.behind = tier
        self._report = report
        self._rescued: dict[Slot, torch.Tensor] = {}
        self._in_use: set[Slot] = set()
        # Into or out of a slot's own memory, which comes along where nobody else holds it until the copy has ended.
        self._last_copy: dict[Slot, tuple[Event, torch.Tensor | None]] = {}
        # Event waits and ring waits of the two directions never share a thread: neither can hold the other up.
        self._store_workers = WorkerPool("hf_offload-store", 1, device.make_current)
        self._load_workers = WorkerPool("hf_offload-load", 1, device.make_current)
        # Never behind a prefetch that waits for room.
        self._urgent_workers = WorkerPool("hf_offload-urgent", 1, device.make_current)
        self._arrival_workers = WorkerPool("hf_offload-arrive", 1, device.make_current)
        self._leaving: collections.deque[tuple[Event, Stream, torch.Tensor, Callable[[], None]]] = collections.deque()
        self._leaving_bytes = 0
        self._leaving_lock = threading.Lock()
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
            for begin in range(0, nbytes, self._chunk_bytes):
                chunked.chunks.append(self._tier.reserve(min(self._chunk_bytes, nbytes - begin), place))
        except BaseException:
            for chunk in chunked.chunks:
                self._tier.free(chunk)
            raise
        return chunked

    def free(self, slot: Slot) -> None:
        for chunk, _, _ in _chunks(slot):
            self._in_use.discard(chunk)
            self._rescued.pop(chunk, None)
            last, view = self._last_copy.pop(chunk, (None, None))
            if last is not None:
                self._device.wait(self.store_stream, last)
                if view is not None and not self._device.has_happened(last):
                    self._arrival_workers.submit(partial(_hold, self._device, last, view))
            self._tier.free(chunk)

    # -- out ----------------------------------------------------------------------------------------------------------

    def store(self, buffer: torch.Tensor, slot: Slot, drop: Callable[[], None]) -> "Future[None]":
        device, chunks = self._device, _chunks(slot)
        store = _Store(len(chunks))
        compute = device.current_stream()
        device.wait(self.store_stream, device.record(compute))
        try:
            for chunk, begin, end in chunks:
                self._in_use.add(chunk)
                view = self._tier.host_view(chunk)
                staging = view if view is not None else self._ring.acquire(end - begin)
                device.copy(staging, buffer[begin:end], self.store_stream)
                copied = device.record(self.store_stream)
                if view is not None:
                    # In stream order the bytes are there already; nobody on the host has to wait for them.
                    self._last_copy[chunk] = copied, view
                    self._tier.copied(chunk, "write")
                    store.end()
                else:
                    self._store_workers.submit(partial(self._write, chunk, staging, copied, store))
        except BaseException:  # no room any more, or Ctrl-C while it was waited for: chunks on their way need not go on
            store.done.cancel()
            raise
        with self._leaving_lock:
            self._leaving.append((copied, compute, buffer, drop))
            self._leaving_bytes += buffer.numel()
        return store.done

    def _write(self, slot: Slot, staging: torch.Tensor, copied: Event, store: "_Store") -> None:
        self._device.synchronize(copied)
        if not store.begin() or slot not in self._in_use:
            self._ring.release(staging)
            return

        def written(error: BaseException | None) -> None:
            try:
                if error is not None and slot in self._in_use:
                    # The device buffer has left in stream order: these are the last bytes there are.
                    self._rescued[slot] = staging.clone()
                    if slot not in self._in_use:  # freed meanwhile: nobody will ask for them
                        self._rescued.pop(slot, None)
                    self._report(error, staging.numel())
            except Exception as failure:  # no memory for them: whoever loads them is told that nothing is stored
                logger.error(
                    "Nothing is left of %d bytes that could not be stored (%s): %s", staging.numel(), error, failure
                )
            finally:
                self._ring.release(staging)
                store.end()

        _then(lambda: self._tier.write(slot, staging), written)

    def advance(self, limit_bytes: int | None = None) -> None:
        while self._leaving:
            with self._leaving_lock:
                if not self._leaving:
                    return
                copied, compute, buffer, drop = self._leaving[0]
                if not self._device.has_happened(copied):
                    if limit_bytes is None or self._leaving_bytes <= limit_bytes:
                        return
                    # The stream on which the block was in use, so that whoever gets it next is behind the copy.
                    self._wait(compute, copied)
                self._leaving.popleft()
                self._leaving_bytes -= buffer.numel()
            drop()
            del buffer

    # -- in -----------------------------------------------------------------------------------------------------------

    def load(self, slot: Slot, target: torch.Tensor, urgent: bool) -> "Future[Arrival] | Future[None]":
        device, chunks = self._device, _chunks(slot)
        compute = device.current_stream()
        free = device.record(compute)
        landing = _Landing(target)
        whose = weakref.ref(landing)
        load = _Load(len(chunks), lambda: Arrival(device.record(self.load_stream), compute, whose))
        workers = self._urgent_workers if urgent else self._load_workers
        for chunk, begin, end in chunks:
            view = self._rescued.get(chunk)
            if view is None:
                view = self._tier.host_view(chunk)
            if view is None:
                workers.submit(partial(self._read, chunk, begin, end, landing, urgent, free, load))
                continue
            last, _ = self._last_copy.get(chunk, (None, None))
            if last is not None:
                device.wait(self.load_stream, last)
            copied = self._copy_in(view, landing.part(begin, end), free)
            self._last_copy[chunk] = copied, None
            # Both ends must outlive the copy even if they are dropped at once: a thread holds them until then.
            self._arrival_workers.submit(partial(_hold, device, copied, landing, view))
            self._tier.copied(chunk, "read")
            load.end()
        return load.arrived

    def _read(
        self, slot: Slot, begin: int, end: int, landing: _Landing, urgent: bool, free: Event, load: "_Load"
    ) -> None:
        if not load.begin():
            return
        try:
            staging = self._ring.acquire(end - begin, urgent)
        except BaseException as error:  # whoever waits for the load has to hear of it
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
        load: "_Load",
    ) -> None:
        try:
            if error is not None:
                raise error
            copied = self._copy_in(staging, landing.part(begin, begin + staging.numel()), free)
            load.end()
            self._device.synchronize(copied)
        except BaseException as failure:  # of the read or of the device: whoever waits has to hear of it
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
            copied, _, _, drop = self._leaving.popleft()
            self._device.synchronize(copied)
            drop()
        self._ring.close()


def _chunks(slot: Slot) -> list[tuple[Slot, int, int]]:
    """The slots of a buffer's chunks, and where in the buffer each begins and ends."""
    slots = slot.chunks if isinstance(slot, ChunkedSlot) else [slot]
    ends = list(itertools.accumulate(chunk.nbytes for chunk in slots))
    return list(zip(slots, [0, *ends[:-1]], ends, strict=True))


class _Store:
    """A buffer on its way out: :attr:`done` when its last chunk is."""

    def __init__(self, chunks: int):
        self.done: Future[None] = Future()
        self._left = chunks
        self._goes_on: bool | None = None
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """A chunk is about to be written. Whether it still is to be."""
        with self._lock:
            if self._goes_on is None:
                self._goes_on = self.done.set_running_or_notify_cancel()
            return self._goes_on

    def end(self) -> None:
        """A chunk is where it belongs."""
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self.done.set_result(None)


class _Load:
    """A buffer on its way in: :attr:`arrived` when the copies of all its chunks are queued, or one has failed."""

    def __init__(self, chunks: int, arrival: Callable[[], Arrival]):
        self.arrived: Future[Arrival] = Future()
        self._arrival = arrival
        self._left = chunks
        self._goes_on: bool | None = None
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """A chunk is about to be read. Whether it still is to be."""
        with self._lock:
            if self._goes_on is None:
                self._goes_on = self.arrived.set_running_or_notify_cancel()
            return self._goes_on and not self.arrived.done()

    def end(self, error: BaseException | None = None) -> None:
        """The copy of a chunk is queued, or will never be. The last one's event stands for all: they share a stream."""
        with self._lock:
            if self.arrived.done():
                return
            self._left -= 1
            if error is None and self._left > 0:
                return
            arrival = None if error is not None else self._arrival()
        if error is not None:
            self.arrived.set_exception(error)
        else:
            assert arrival is not None
            self.arrived.set_result(arrival)


class PinnedRing:
    """Pinned staging buffers of any size, cut from one piece of memory; acquiring one waits until there is room.

    Demand loads (``urgent``) may use the last part, which stores and prefetches leave alone: a prefetch that waits for room
    never starves the load that backward needs.
    """

    _RESERVED = 0.25
    behind: Tier | None = None
    """The tier whose transfers make room: whoever waits for room stops waiting when it comes to a standstill."""

    def __init__(self, capacity_bytes: int, pinned: bool = True):
        self._capacity = -(-capacity_bytes // PAGE) * PAGE
        self._memory = RamTier(pinned=pinned, budget_bytes=self._capacity, arena_bytes=self._capacity)
        self._slots: dict[int, Slot] = {}
        self._used = 0
        self._released = 0
        self._room = threading.Condition()

    @classmethod
    def shared(cls, capacity_bytes: int) -> int:
        """The part of a ring that stores and prefetches may use, in bytes."""
        return int(capacity_bytes * (1 - cls._RESERVED))

    def acquire(self, nbytes: int, urgent: bool = False) -> torch.Tensor:
        limit = self._capacity if urgent else self.shared(self._capacity)
        with self._room:
            slot = self._take(nbytes, limit)
            view = self._memory.host_view(slot)
            if view is None:
                raise TierFullError("The pinned ring has no memory of its own to copy to.")
            self._slots[view.data_ptr()] = slot
            self._used += nbytes
            return view

    def _take(self, nbytes: int, limit_bytes: int) -> Slot:
        tried = -1  # how often room had been given back then

        def may_fit() -> bool:
            return self._released != tried and (not self._used or self._used + nbytes <= limit_bytes)

        while True:
            (self.behind or self._memory).wait_for(lambda seconds: self._room.wait_for(may_fit, seconds))
            try:
                return self._memory.reserve(nbytes)
            except TierFullError:  # there is room, but in several pieces
                if not self._used:
                    raise
                tried = self._released

    def release(self, buffer: torch.Tensor) -> None:
        with self._room:
            self._memory.free(self._slots.pop(buffer.data_ptr()))
            self._used -= buffer.numel()
            self._released += 1
            self._room.notify_all()

    def close(self) -> None:
        self._memory.close()


def _hold(device: Device, event: Event, *ends: object) -> None:
    device.synchronize(event)


def _then(start: "Callable[[], Future[None]]", finish: Callable[[BaseException | None], None]) -> None:
    """Call ``finish`` with the error, or None, once what ``start`` begins has ended, or at once if it cannot begin."""
    callbacks = [finish]
    del finish

    def ended(future: "Future[None]") -> None:
        # A future keeps its callbacks, and whoever holds it would hold the buffers of this one.
        callbacks.pop()(CancelledError() if future.cancelled() else future.exception())

    try:
        future = start()
    except BaseException as error:  # a buffer is to be given back, and somebody may wait for what it brings
        callbacks.pop()(error)
    else:
        future.add_done_callback(ended)
