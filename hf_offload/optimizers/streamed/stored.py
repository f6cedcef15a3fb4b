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
from hf_offload.storage.service import RunStorage
from hf_offload.storage.tier import Slot, Tier

logger = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 16
"""Of the smallest buffers that are kept for the next of their size."""


class Store:
    """What goes to one account of a run's storage, and at most ``window_bytes`` of it on the way at any time.

    What does not fit the tier, or cannot be written, stays in memory: that is said once. Calls come from one thread at a
    time.

    Attributes:
        kept_bytes: Bytes that stay in memory for want of room.
    """

    def __init__(self, storage: RunStorage, tier: Tier, what: str, window_bytes: int):
        self.tier = tier
        self.window_bytes = window_bytes
        self.kept_bytes = 0
        self._storage = storage
        self._what = what
        self._writing: collections.deque[weakref.ref[Stored]] = collections.deque()
        self._dropped: collections.deque[Slot] = (
            collections.deque()
        )  # slots of objects that have gone, in whatever thread
        self._reading: weakref.WeakSet[Stored] = weakref.WeakSet()
        self._said = False
        self._spare: dict[tuple[int, int], list[Tensor]] = {}  # by size and phase
        self._spare_bytes = 0
        self.lock = threading.Lock()  # of what a thread that writes may do, too

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
        fits = nbytes >= _SPARE_BYTES and self._spare_bytes + nbytes <= self.window_bytes // 4
        if fits and buffer.untyped_storage().nbytes() == nbytes:
            self._spare.setdefault((nbytes, buffer.data_ptr() % PAGE), []).append(buffer)
            self._spare_bytes += nbytes

    def put(self, buffer: Tensor) -> "Stored":
        """Write ``buffer``, one-dimensional ``uint8`` host memory, which belongs to the result from now on."""
        self.collect()
        self._wait_for_room(buffer.numel())
        return Stored(self, buffer)

    def has_room_to_read(self, nbytes: int) -> bool:
        """Whether so many bytes may be read ahead now."""
        ahead = sum(each.nbytes for each in self._reading)
        return ahead == 0 or ahead + nbytes <= self.window_bytes // 2

    def settle(self) -> None:
        """Wait until everything has been written."""
        while self._writing:
            self._wait_for_oldest()

    def collect(self) -> None:
        """Free the room of what has gone."""
        while self._dropped:
            self.tier.free(self._dropped.popleft())

    def _wait_for_room(self, nbytes: int) -> None:
        while self._writing:
            alive = [each for reference in self._writing if (each := reference()) is not None and each.is_being_written]
            if sum(each.nbytes for each in alive) + nbytes <= self.window_bytes // 2:
                return
            del alive
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        oldest = self._writing.popleft()()
        if oldest is not None:
            oldest.wait_until_written()

    def _reserve(self, nbytes: int) -> Slot | None:
        try:
            try:
                return self.tier.reserve(nbytes)
            except TierFullError:
                self._storage.free_unneeded()
                return self.tier.reserve(nbytes)
        except (TierFullError, StorageError) as error:  # a write limit that is met, too
            self.say(error)
            return None

    def say(self, error: BaseException) -> None:
        """Say, once, that something stays in memory."""
        if not self._said:
            self._said = True
            logger.warning("Some %s stays in memory, and the run goes on: %s", self._what, error)


class Stored:
    """One buffer of a :class:`Store`: in memory while it is written, on the tier, or in memory again. Dropping it frees all.

    Attributes:
        nbytes: Bytes of the buffer.
    """

    __slots__ = ("__weakref__", "_buffer", "_read", "_slot", "_store", "_taken", "_write", "nbytes")

    def __init__(self, store: Store, buffer: Tensor):
        self.nbytes = buffer.numel()
        self._store = store
        self._buffer: Tensor | None = buffer  # until it has been written
        self._taken = False  # by a caller, who has the buffer
        self._write: Future[None] | None = None
        self._read: tuple[Tensor, Future[None]] | None = None
        with signals_deferred:
            self._slot = store._reserve(self.nbytes)
            if self._slot is None:
                store.kept_bytes += self.nbytes
                return
            self._write = store.tier.write(self._slot, buffer)
            store._writing.append(weakref.ref(self))
        self._write.add_done_callback(_Written(self))

    @property
    def is_being_written(self) -> bool:
        """Whether its bytes are in memory only because the drive is slower."""
        return self._write is not None and self._buffer is not None and not self._write.done()

    def wait_until_written(self) -> None:
        """Wait for the tier. A write that fails leaves the bytes in memory."""
        if self._write is not None:
            self._store.tier.wait_until_done(self._write)
            self._note_failure()

    def read_ahead(self) -> None:
        """Begin to read what is on the tier, if there is room in the window."""
        if self._buffer is None and self._read is None and self._store.has_room_to_read(self.nbytes):
            self._begin_read(urgent=False)

    def take(self, last: bool) -> Tensor:
        """The bytes, in memory that is the caller's. They stay here as well, unless this is the ``last`` time.

        Raises :class:`~hf_offload.errors.StorageError` if they cannot be read; they can be asked for again.
        """
        with signals_deferred, self._store.lock:
            buffer = self._buffer
            self._taken = last or self._taken
        if buffer is not None:
            if not last:
                return buffer.clone()
            if self._write is not None and not self._write.cancel():
                self._store.tier.wait_until_done(self._write)  # the drive still reads it, and the caller may change it
            self._drop()
            return buffer
        if self._read is None:
            self._begin_read(urgent=True)
        assert self._read is not None
        buffer, future = self._read
        self._store.tier.wait_until_done(future)
        self._read = None
        self._store._reading.discard(self)
        future.result()
        if last:
            self._drop()
        return buffer

    def _begin_read(self, urgent: bool) -> None:
        assert self._slot is not None
        tier = self._store.tier
        buffer = self._store.new_buffer(self.nbytes, tier.phase(self._slot))
        self._read = buffer, tier.read(self._slot, buffer, urgent)
        self._store._reading.add(self)

    def _note_failure(self) -> None:
        write, buffer = self._write, self._buffer
        if write is None or buffer is None or not write.done():
            return
        error = None if write.cancelled() else write.exception()
        if error is not None:
            self._store.say(error)
            self._store.kept_bytes += self.nbytes
            self._write = None
            self._free_slot()

    def _drop(self) -> None:
        self._buffer = None
        if self._slot is None:
            self._store.kept_bytes -= self.nbytes
        self._write = None
        self._free_slot()

    def _free_slot(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._store.tier.free(slot)

    def __del__(self) -> None:
        # Perhaps from the garbage collector, in the midst of anything: no lock is taken here.
        slot = getattr(self, "_slot", None)
        if slot is not None:
            self._store._dropped.append(slot)


class _Written:
    """Lets the memory go when the write has ended well. It does not keep the stored bytes alive."""

    def __init__(self, stored: Stored):
        self._stored = weakref.ref(stored)

    def __call__(self, future: "Future[None]") -> None:
        stored = self._stored()
        if stored is None or future.cancelled() or future.exception() is not None:
            return
        store = stored._store
        with signals_deferred, store.lock:
            buffer = stored._buffer
            if buffer is not None and not stored._taken:
                stored._buffer = None
                store._recycle(buffer)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous ``tensor`` in host memory, which shares them if it is there already."""
    host = tensor.detach()
    if host.device.type != "cpu":
        host = host.to("cpu")
    return host.reshape(-1).view(torch.uint8)
