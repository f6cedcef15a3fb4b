"""Buffers that go to a tier behind the computation and come back ahead of it, a window of bytes at a time."""

import collections
import logging
import threading
import weakref
from concurrent.futures import Future

import torch
from torch import Tensor

from hf_offload.errors import StorageError, TierFullError
from hf_offload.interrupts import signals_deferred
from hf_offload.storage.buffers import PAGE, empty_at_phase
from hf_offload.storage.handling import WAITS
from hf_offload.storage.kept import KeptSlot
from hf_offload.storage.service import RunStorage
from hf_offload.storage.tier import Slot, Tier

logger = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 16
"""Of the smallest buffers that are kept for the next of their size."""
_SPARE_PARTS = 4
"""Of the window, one is what all of them may take: plans count on it."""


class Store:
    """What goes to one account of a run's storage, and at most ``window_bytes`` of it on the way at any time.

    What does not fit the tier, or cannot be written, stays in memory: that is said once. Calls come from one thread at a
    time.

    Attributes:
        kept_bytes: Bytes that stay in memory for want of room.
        refusal: Why something stayed in memory, if anything did.
    """

    def __init__(self, storage: RunStorage, tier: Tier, what: str, window_bytes: int):
        self.tier = tier
        self.window_bytes = window_bytes
        self.kept_bytes = 0
        self.storage = storage
        self._what = what
        self._writing: collections.deque[weakref.ref[Stored]] = collections.deque()
        self._held: set[_HeldSlot] = set()
        self._dropped: collections.deque[_HeldSlot] = collections.deque()  # their objects have gone, in whatever thread
        self._failed: collections.deque[Stored] = collections.deque()  # to be noted in the thread of the calls
        self._reading: weakref.WeakSet[Stored] = weakref.WeakSet()
        self.refusal: BaseException | None = None
        self._spare: dict[tuple[int, int], list[Tensor]] = {}  # by size and phase
        self._spare_bytes = 0
        self.lock = threading.Lock()  # of what a thread that writes may do, too

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory that this takes now: of what is written and read ahead, and spare."""
        writing = [each for reference in list(self._writing) if (each := reference()) is not None]
        reading = sum(each.nbytes for each in self._reading)
        return sum(each.nbytes for each in writing if each.is_being_written) + reading + self._spare_bytes

    def new_buffer(self, nbytes: int, phase: int = 0) -> Tensor:
        """Host memory at an address of this phase, of one that is spare if possible: the system zeroes what is new."""
        with signals_deferred, self.lock:
            spare = self._spare.get((nbytes, phase))
            if spare:
                self._spare_bytes -= nbytes
                return spare.pop()
        return empty_at_phase(nbytes, phase)

    def recycle(self, buffer: Tensor) -> None:
        """Keep a buffer that nothing refers to any more, if there is room for it and it has a storage of its own."""
        with signals_deferred, self.lock:
            self._recycle(buffer)

    def _recycle(self, buffer: Tensor) -> None:
        nbytes = buffer.numel()
        fits = nbytes >= _SPARE_BYTES and self._spare_bytes + nbytes <= self.window_bytes // _SPARE_PARTS
        if fits and buffer.untyped_storage().nbytes() == nbytes:
            self._spare.setdefault((nbytes, buffer.data_ptr() % PAGE), []).append(buffer)
            self._spare_bytes += nbytes

    def throttle(self) -> None:
        """Wait for the drive where too much is on its way to it."""
        self.collect()
        self._wait_for_room()

    def has_room_to_read(self, nbytes: int) -> bool:
        """Whether so many bytes may be read ahead now."""
        ahead = sum(each.nbytes for each in self._reading)
        return ahead == 0 or ahead + nbytes <= self.window_bytes // 2

    def settle(self) -> None:
        """Wait until everything has been written."""
        while self._writing:
            self._wait_for_oldest()

    def wait_until_done(self, future: "Future[None]") -> None:
        """Wait for a transfer, and count how long that took."""
        with self.storage.handling.of(WAITS):
            self.tier.wait_until_done(future)

    def collect(self) -> None:
        """Free the room of what has gone, and of what could not be written."""
        with signals_deferred:
            while self._dropped:
                held = self._dropped.popleft()
                self._held.discard(held)
                self.tier.free(held.slot)
            while self._failed:
                self._failed.popleft()._note_failure()

    def _wait_for_room(self) -> None:
        while self._writing:
            alive = [each for reference in self._writing if (each := reference()) is not None and not each.has_ended()]
            if sum(each.nbytes for each in alive) <= self.window_bytes // 2:
                return
            del alive
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        oldest = self._writing[0]()
        if oldest is not None:
            oldest.wait_until_written()
        self._writing.popleft()

    def reserve(self, nbytes: int, place: str | None = None) -> Slot:
        """Room on the tier, in this ``place`` of one that has several. Raises :class:`~hf_offload.errors.TierFullError`."""
        try:
            return self.tier.reserve(nbytes, place)
        except TierFullError:
            self.storage.free_unneeded()
            return self.tier.reserve(nbytes, place)

    def _reserve(self, nbytes: int) -> Slot | None:
        try:
            return self.reserve(nbytes)
        except (TierFullError, StorageError) as error:  # a write limit that is met, too
            self.say(error)
            return None

    def say(self, error: BaseException) -> None:
        """Say, once, that something stays in memory."""
        if self.refusal is None:
            self.refusal = error.with_traceback(None)  # whose frames hold what was to be written
            logger.warning("A part of the %s stays in memory, and the run goes on: %s", self._what, error)


class Stored:
    """One buffer of a :class:`Store`: in memory until it was sent and written, on the tier, or in memory again. Dropping it
    frees all.

    Args:
        store: Where it is to go.
        buffer: One-dimensional ``uint8`` host memory, which belongs to this object from now on.

    Attributes:
        nbytes: Bytes of the buffer.
    """

    __slots__ = ("__weakref__", "_buffer", "_held", "_kept", "_loaded", "_read", "_store", "_taken", "_write", "nbytes")

    def __init__(self, store: Store, buffer: Tensor):
        self.nbytes = buffer.numel()
        self._store = store
        self._buffer: Tensor | None = buffer  # until it has been written
        self._loaded: Tensor | None = None  # for the next call of take()
        self._taken = False  # by a caller, who has the buffer or is about to take it
        self._kept = False
        self._held: _HeldSlot | None = None
        self._write: Future[None] | None = None
        self._read: tuple[Tensor, Future[None]] | None = None

    def send(self) -> None:
        """Begin to write. Should that be interrupted or fail, the bytes stay in memory.

        It comes after all bookkeeping, for it may wait for the drive: what Ctrl-C raises then has nothing to undo.
        """
        store, buffer = self._store, self._buffer
        assert buffer is not None
        store.collect()
        with signals_deferred:
            slot = store._reserve(self.nbytes)
            if slot is None:
                self._keep()
                return
            self._begin_write(slot, buffer)

    def write(self) -> KeptSlot | None:
        """Write to a drive now, and hold the bytes there. None if the drive has failed: then they are in memory.

        Raises :class:`~hf_offload.errors.TierFullError` where there is no room, and
        :class:`~hf_offload.errors.WriteLimitError` where no more may be written.
        """
        store, buffer = self._store, self._buffer
        assert buffer is not None
        store.collect()
        with signals_deferred:
            self._begin_write(store.reserve(self.nbytes, "ssd"), buffer)
        return self.keep()

    def _begin_write(self, slot: Slot, buffer: Tensor) -> None:
        store = self._store
        self._held = _HeldSlot(self, store._dropped.append)
        self._held.slot = slot
        store._held.add(self._held)
        self._write = store.tier.write(slot, buffer)
        store._writing.append(weakref.ref(self))
        self._write.add_done_callback(_Written(self))

    @property
    def is_being_written(self) -> bool:
        """Whether its bytes are in memory only because the drive is slower."""
        return self._write is not None and self._buffer is not None and not self._write.done()

    @property
    def is_away(self) -> bool:
        """Whether its bytes are on the tier only, and nothing reads them yet."""
        return self._held is not None and self._buffer is None and self._loaded is None and self._read is None

    def has_ended(self) -> bool:
        """Whether no write goes on. One that has ended well has left memory then: those that wait for it are woken before its
        callback runs, and on a busy machine that takes as long as several operations of the next module.
        """
        write = self._write
        if write is None or not write.done():
            return write is None
        self._leave()
        return True

    def wait_until_written(self) -> None:
        """Wait for the tier. A write that fails leaves the bytes in memory."""
        if self._write is not None:
            self._store.wait_until_done(self._write)
            self._leave()
            self._note_failure()

    def _leave(self) -> None:
        """Let the memory go if the write has ended well, and no caller has taken it."""
        with signals_deferred, self._store.lock:
            buffer = self._buffer
            if buffer is not None and not self._taken and self._is_written():
                self._buffer = None
                self._store._recycle(buffer)
            del buffer  # under the lock: a thread that finds that it has left goes on to use its memory

    def read_ahead(self) -> bool:
        """Begin to read what is on the tier, if there is room in the window; false if there is none."""
        if not self.is_away:
            return True
        if not self._store.has_room_to_read(self.nbytes):
            return False
        self._begin_read(urgent=False)
        return True

    def load(self) -> None:
        """Wait until the bytes are in memory that nothing else uses: :meth:`take` then waits for nothing, and cannot fail.

        Raises :class:`~hf_offload.errors.StorageError` if they cannot be read; they can be asked for again.
        """
        with signals_deferred, self._store.lock:
            buffer = self._buffer
            self._taken = True
        if self._loaded is not None:
            return
        if buffer is not None:
            if self._write is not None and not self._cancel():
                self._store.wait_until_done(self._write)  # the drive still reads it, and the caller may change it
            self._loaded = buffer
            return
        read = None if self._read is None else self._wait_for_read()
        if read is None or read[1].exception() is not None:  # of what was read ahead, before anyone has asked for it
            self._begin_read(urgent=True)
            read = self._wait_for_read()
        read[1].result()
        self._loaded = read[0]

    def take(self, last: bool) -> Tensor:
        """The bytes, in memory that is the caller's. They stay here as well, unless this is the ``last`` time.

        Raises :class:`~hf_offload.errors.StorageError` if they cannot be read; they can be asked for again.
        """
        with signals_deferred, self._store.lock:
            buffer = self._buffer
            if buffer is not None and not last:
                return buffer.clone()
        self.load()
        with signals_deferred:
            buffer, self._loaded = self._loaded, None
            assert buffer is not None
            if last:
                self._drop()
            elif buffer is self._buffer:
                return buffer.clone()
            return buffer

    def keep(self) -> KeptSlot | None:
        """Hold the bytes where they are on a drive, once they are; None if they are anywhere else."""
        self.wait_until_written()
        held = self._held
        return None if held is None else self._store.tier.keep(held.slot)

    def lend(self) -> Tensor:
        """The bytes, without a copy, while they stay here as well: until :meth:`give_back`, or for good if they are changed,
        and this object is dropped.

        Raises :class:`~hf_offload.errors.StorageError` if they cannot be read; they can be asked for again.
        """
        with signals_deferred, self._store.lock:
            buffer = self._buffer
            self._taken = True  # the end of a write does not let it go
        if buffer is None:
            self.load()
        with signals_deferred:
            if buffer is None:
                buffer, self._loaded = self._loaded, None
            assert buffer is not None
            return buffer

    def is_safe_without(self, buffer: Tensor) -> bool:
        """Wait until what was lent may be changed while the tier has it as it was. False if the tier has not: then
        ``buffer`` is the only place where it is.
        """
        if buffer is not self._buffer:
            return True
        self.wait_until_written()
        with signals_deferred, self._store.lock:
            if buffer is self._buffer and self._is_written():
                self._buffer = None
            return buffer is not self._buffer

    def give_back(self, buffer: Tensor) -> None:
        """What was lent is not used any more, and is as it was."""
        with signals_deferred, self._store.lock:
            self._taken = False
            if self._buffer is None:
                self._store._recycle(buffer)
            elif self._is_written():
                self._buffer = None
                self._store._recycle(buffer)

    def _is_written(self) -> bool:
        write = self._write
        return write is not None and write.done() and not write.cancelled() and write.exception() is None

    def _cancel(self) -> bool:
        with signals_deferred:  # which Future.cancel() is not for itself
            return self._write is not None and self._write.cancel()

    def _begin_read(self, urgent: bool) -> None:
        assert self._held is not None
        tier, slot = self._store.tier, self._held.slot
        with signals_deferred:
            buffer = self._store.new_buffer(self.nbytes, tier.phase(slot))
            self._read = buffer, tier.read(slot, buffer, urgent)
            self._store._reading.add(self)

    def _wait_for_read(self) -> tuple[Tensor, Future[None]]:
        assert self._read is not None
        read = self._read
        self._store.wait_until_done(read[1])
        self._read = None
        self._store._reading.discard(self)
        return read

    def _note_failure(self) -> None:
        write, buffer = self._write, self._buffer
        if write is None or buffer is None or not write.done():
            return
        error = None if write.cancelled() else write.exception()
        if error is not None:
            self._store.say(error)
            self._keep()
            self._write = None
            self._free_slot()

    def _keep(self) -> None:
        self._kept = True
        self._store.kept_bytes += self.nbytes

    def _drop(self) -> None:
        self._buffer = self._loaded = None
        if self._kept:
            self._kept = False
            self._store.kept_bytes -= self.nbytes
        self._write = None
        self._free_slot()

    def _free_slot(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._store._held.discard(held)
            self._store.tier.free(held.slot)


class _HeldSlot(weakref.ref[Stored]):
    """The slot of an object that may go at any moment. What is called then is a function of C: it takes no lock, and runs no
    signal handler, whose error Python would discard there.
    """

    __slots__ = ("slot",)
    slot: Slot


class _Written:
    """Lets the memory go when the write has ended well. It does not keep the stored bytes alive."""

    def __init__(self, stored: Stored):
        self._stored = weakref.ref(stored)

    def __call__(self, future: "Future[None]") -> None:
        stored = self._stored()
        if stored is None or future.cancelled():
            return
        if future.exception() is not None:
            stored._store._failed.append(stored)
            return
        stored._leave()


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous ``tensor`` in host memory, which shares them if it is there already."""
    host = tensor.detach()
    if host.device.type != "cpu":
        host = host.to("cpu")
    return host.reshape(-1).view(torch.uint8)
