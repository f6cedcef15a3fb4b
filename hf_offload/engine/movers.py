"""How a buffer gets from the device into a tier and back.

Note: stream order
    A device block may go back to the allocator only when no queued work reads it any more, and the allocator knows only
    of the stream on which the block was made. So the block is dropped in *stream order*: a few stores later the compute
    stream waits for the copy's event, then the reference goes. Whatever is allocated there afterwards is ordered behind
    the copy. Polling from the host, or ``record_stream``, would hold blocks while later allocations are already made, and
    the peak would not fall. In the other direction the target is allocated on the compute stream in the hook's thread;
    the load stream waits for an event recorded there, so that it cannot write into memory whose former user still runs;
    compute waits for the load's own event.

Note: several compute streams
    Reading ahead loads on the stream of whoever reads ahead, and another one may use what was loaded: it waits for the load,
    too, and the allocator is told. The memory of a slot that is copied to and from directly is ordered slot by slot, for
    no compute stream need be behind another: a load waits for the copy into the slot, and once a slot is free the next
    copy into its memory waits for the last one out of it.
"""

import abc
import collections
import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import NamedTuple

import torch

from hf_offload.engine.device import Device, Event, Stream
from hf_offload.errors import TierFullError
from hf_offload.storage.ram import RamTier
from hf_offload.storage.tier import Slot, Tier
from hf_offload.storage.workers import WorkerPool

logger = logging.getLogger(__name__)


class Arrival(NamedTuple):
    """When a load has ended, and for which stream its target was allocated."""

    event: Event
    stream: Stream


class Mover(abc.ABC):
    """Moves bytes for the transfer layer. A load's future gives what compute has to wait for, or None."""

    @abc.abstractmethod
    def store(self, buffer: torch.Tensor, slot: Slot, drop: Callable[[], None]) -> "Future[None]":
        """Start writing. ``drop`` is called in a training thread as soon as the engine may let go of ``buffer``, unless
        the future already says so (see :attr:`drops_early`).
        """

    @abc.abstractmethod
    def load(self, slot: Slot, target: torch.Tensor, urgent: bool) -> "Future[Arrival] | Future[None]":
        """Start reading into ``target``."""

    @abc.abstractmethod
    def arrive(self, arrival: Arrival | None, storage: torch.UntypedStorage) -> None:
        """Order the calling thread's compute behind a load into ``storage``."""

    def advance(self, everything: bool = False) -> None:  # noqa: B027  nothing to do where nothing is copied
        """Let go of device buffers whose copies are behind us in stream order. Called in training threads."""

    def forget(self, slot: Slot) -> None:  # noqa: B027  nothing to forget where nothing is rescued
        """The slot is about to be freed."""

    drops_early: bool
    """Whether buffers go through ``drop``. If not, the buffer is free when the store's future is done."""

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for what runs. The tier is closed by its owner."""


class HostMover(Mover):
    """The tier reads and writes the tensors' own memory: no copy at all."""

    drops_early = False

    def __init__(self, tier: Tier):
        self._tier = tier

    def store(self, buffer: torch.Tensor, slot: Slot, drop: Callable[[], None]) -> "Future[None]":
        return self._tier.write(slot, buffer)

    def load(self, slot: Slot, target: torch.Tensor, urgent: bool) -> "Future[Arrival] | Future[None]":
        return self._tier.read(slot, target, urgent)

    def arrive(self, arrival: Arrival | None, storage: torch.UntypedStorage) -> None:
        pass

    def close(self) -> None:
        pass


class StagedMover(Mover):
    """Device memory, pinned memory, tier: copies on side streams, disk I/O behind them on worker threads.

    Tiers of pinned memory (``tier.host_view``) are copied to and from directly. Others go through a ring of pinned
    buffers; demand loads may always take one more than prefetches may.
    """

    drops_early = True
    _LAG = 2  # stores between a copy and compute's wait for it: long enough that compute rarely waits

    def __init__(
        self,
        device: Device,
        tier: Tier,
        ring_bytes: int,
        report: Callable[[BaseException, int], None],
        pinned: bool = True,
    ):
        self._device = device
        self._tier = tier
        self._store_stream = device.new_stream()
        self._load_stream = device.new_stream()
        self._ring = PinnedRing(ring_bytes, pinned)
        self._ring.behind = tier
        self._report = report
        self._rescued: dict[Slot, torch.Tensor] = {}
        self._in_use: set[Slot] = set()
        self._last_copy: dict[Slot, Event] = {}  # into or out of a slot's own memory
        # Event waits and ring waits of the two directions never share a thread: neither can hold the other up.
        self._store_workers = WorkerPool("hf_offload-store", 1)
        self._load_workers = WorkerPool("hf_offload-load", 1)
        self._urgent_workers = WorkerPool("hf_offload-urgent", 1)  # never behind a prefetch that waits for room
        self._arrival_workers = WorkerPool("hf_offload-arrive", 1)
        self._leaving: collections.deque[tuple[Event, Stream, torch.Tensor, Callable[[], None]]] = collections.deque()
        self._leaving_lock = threading.Lock()

    def store(self, buffer: torch.Tensor, slot: Slot, drop: Callable[[], None]) -> "Future[None]":
        device = self._device
        done: Future[None] = Future()
        self._in_use.add(slot)
        view = self._tier.host_view(slot)
        staging = view if view is not None else self._ring.acquire(buffer.numel())
        compute = device.current_stream()
        device.wait(self._store_stream, device.record(compute))
        device.copy(staging, buffer, self._store_stream)
        copied = device.record(self._store_stream)
        self._leaving.append((copied, compute, buffer, drop))
        self.advance()
        if view is not None:
            # In stream order the bytes are there already; nobody on the host has to wait for them.
            self._last_copy[slot] = copied
            self._tier.stats.count("write", buffer.numel())
            done.set_result(None)
        else:
            self._store_workers.submit(partial(self._write, slot, staging, copied, done))
        return done

    def _write(self, slot: Slot, staging: torch.Tensor, copied: Event, done: "Future[None]") -> None:
        self._device.synchronize(copied)
        if not done.set_running_or_notify_cancel():
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
                done.set_result(None)

        _then(lambda: self._tier.write(slot, staging), written)

    def advance(self, everything: bool = False) -> None:
        keep = 0 if everything else self._LAG
        while len(self._leaving) > keep:
            with self._leaving_lock:
                if len(self._leaving) <= keep:
                    return
                copied, compute, buffer, drop = self._leaving.popleft()
                # The stream on which the block was in use, so that whoever gets it next is behind the copy.
                self._device.wait(compute, copied)
            drop()
            del buffer

    def load(self, slot: Slot, target: torch.Tensor, urgent: bool) -> "Future[Arrival] | Future[None]":
        device = self._device
        arrived: Future[Arrival] = Future()
        compute = device.current_stream()
        free = Arrival(device.record(compute), compute)
        view = self._rescued.get(slot)
        if view is None:
            view = self._tier.host_view(slot)
        if view is None:
            workers = self._urgent_workers if urgent else self._load_workers
            workers.submit(partial(self._read, slot, target, urgent, free, arrived))
            return arrived
        last = self._last_copy.get(slot)
        if last is not None:
            device.wait(self._load_stream, last)
        arrival = self._copy_in(view, target, free)
        self._last_copy[slot] = arrival.event
        # Both ends must outlive the copy even if backward drops them at once: a thread holds them until then.
        self._arrival_workers.submit(partial(_hold, device, arrival.event, target, view))
        self._tier.stats.count("read", target.numel())
        arrived.set_result(arrival)
        return arrived

    def _read(self, slot: Slot, target: torch.Tensor, urgent: bool, free: Arrival, arrived: "Future[Arrival]") -> None:
        if not arrived.set_running_or_notify_cancel():
            return
        try:
            staging = self._ring.acquire(target.numel(), urgent)
        except BaseException as error:  # whoever waits for the load has to hear of it
            arrived.set_exception(error)
            return

        def read(error: BaseException | None) -> None:
            self._arrival_workers.submit(partial(self._arrive, error, staging, target, free, arrived))

        _then(lambda: self._tier.read(slot, staging, urgent), read)

    def _arrive(
        self,
        error: BaseException | None,
        staging: torch.Tensor,
        target: torch.Tensor,
        free: Arrival,
        arrived: "Future[Arrival]",
    ) -> None:
        try:
            if error is not None:
                raise error
            arrival = self._copy_in(staging, target, free)
            arrived.set_result(arrival)
            self._device.synchronize(arrival.event)
        except BaseException as failure:  # of the read or of the device: whoever waits has to hear of it
            if not arrived.done():
                arrived.set_exception(failure)
        finally:
            self._ring.release(staging)

    def _copy_in(self, source: torch.Tensor, target: torch.Tensor, free: Arrival) -> Arrival:
        self._device.wait(self._load_stream, free.event)
        self._device.copy(target, source, self._load_stream)
        return Arrival(self._device.record(self._load_stream), free.stream)

    def forget(self, slot: Slot) -> None:
        self._in_use.discard(slot)
        self._rescued.pop(slot, None)
        last = self._last_copy.pop(slot, None)
        if last is not None:
            self._device.wait(self._store_stream, last)

    def arrive(self, arrival: Arrival | None, storage: torch.UntypedStorage) -> None:
        if arrival is None:
            return
        compute = self._device.current_stream()
        self._device.wait(compute, arrival.event)
        if compute != arrival.stream:
            target = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._device.use(target, compute)

    def close(self) -> None:
        self._device.synchronize(self._device.record(self._load_stream))
        for pool in (self._store_workers, self._load_workers, self._urgent_workers, self._arrival_workers):
            pool.close()
        while self._leaving:
            copied, _, _, drop = self._leaving.popleft()
            self._device.synchronize(copied)
            drop()
        self._ring.close()


class PinnedRing:
    """Pinned staging buffers of any size, bounded in bytes; acquiring one waits until there is room.

    A buffer larger than the ring is served when nothing else is out. Demand loads (``urgent``) may use the last part,
    which stores and prefetches leave alone: a prefetch that waits for room never starves the load that backward needs.
    """

    _RESERVED = 0.25
    behind: Tier | None = None
    """The tier whose transfers make room: whoever waits for room stops waiting when it comes to a standstill."""

    def __init__(self, capacity_bytes: int, pinned: bool = True):
        self._capacity = capacity_bytes
        self._memory = RamTier(pinned=pinned)
        self._slots: dict[int, Slot] = {}
        self._used = 0
        self._room = threading.Condition()

    def acquire(self, nbytes: int, urgent: bool = False) -> torch.Tensor:
        limit = self._capacity if urgent else self._capacity * (1 - self._RESERVED)
        with self._room:
            (self.behind or self._memory).wait_for(
                lambda seconds: self._room.wait_for(lambda: self._used == 0 or self._used + nbytes <= limit, seconds)
            )
            slot = self._memory.reserve(nbytes)
            view = self._memory.host_view(slot)
            if view is None:
                raise TierFullError("The pinned ring has no memory of its own to copy to.")
            self._slots[view.data_ptr()] = slot
            self._used += nbytes
            return view

    def release(self, buffer: torch.Tensor) -> None:
        with self._room:
            self._memory.free(self._slots.pop(buffer.data_ptr()))
            self._used -= buffer.numel()
            self._room.notify_all()

    def close(self) -> None:
        self._memory.close()


def _hold(device: Device, event: Event, target: torch.Tensor, source: torch.Tensor) -> None:
    device.synchronize(event)


def _then(start: "Callable[[], Future[None]]", finish: Callable[[BaseException | None], None]) -> None:
    """Call ``finish`` with the error, or None, once what ``start`` begins has ended, or at once if it cannot begin."""

    def ended(future: "Future[None]") -> None:
        finish(CancelledError() if future.cancelled() else future.exception())

    try:
        future = start()
    except BaseException as error:  # a buffer is to be given back, and somebody may wait for what it brings
        finish(error)
    else:
        future.add_done_callback(ended)
