"""Memory that goes to a tier behind the computation and comes back ahead of it, a window of bytes at a time."""

import collections
import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch

from hf_offload.errors import StorageError, TierFullError
from hf_offload.interrupts import signals_deferred
from hf_offload.storage.buffers import PAGE
from hf_offload.storage.handling import WAITS
from hf_offload.storage.service import RunStorage
from hf_offload.storage.tier import Slot, Tier

logger = logging.getLogger(__name__)

_SPARE_PARTS = 4
"""Of the window, one is what spare slabs may take: plans count on it."""


def whole_pages(nbytes: int) -> int:
    """``nbytes``, rounded up to pages."""
    return -(-nbytes // PAGE) * PAGE


class Slab:
    """Whole pages of host memory, which direct I/O reads and writes without a copy.

    Attributes:
        content: All of it, as bytes.
    """

    __slots__ = ("content", "memory")

    def __init__(self, nbytes: int):
        # Of PyTorch's allocator, whose memory is warm: the system would give, and zero, each page when it is touched.
        raw = torch.empty(whole_pages(nbytes) + PAGE, dtype=torch.uint8, device="cpu")
        start = -raw.data_ptr() % PAGE
        self.memory = raw.numpy().data[start : start + whole_pages(nbytes)]
        self.content = torch.frombuffer(self.memory, dtype=torch.uint8)
        storage = self.content.untyped_storage()
        _slabs[id(storage)] = storage

    @property
    def nbytes(self) -> int:
        """Bytes of the slab."""
        return len(self.memory)

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of the first ``nbytes`` bytes."""
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=nbytes).untyped_storage()


_slabs: "weakref.WeakValueDictionary[int, torch.UntypedStorage]" = weakref.WeakValueDictionary()


def is_slab(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is that of a slab's content, which stores count by themselves."""
    return _slabs.get(id(storage)) is storage


class Store:
    """What goes to one account of a run's storage, and at most ``window_bytes`` of it on the way at any time.

    Calls come from one thread at a time.

    Args:
        storage: The run's.
        tier: Where it goes.
        what: The account.
        window_bytes: Of it on the way.
        counts_reads: Half of the window is for what is read ahead. Otherwise, what asks for that knows how much it may be.

    Attributes:
        refusal: Why something stayed in memory, if anything did.
        dropped: Slots whose tensors have gone. They are appended in whatever thread, also where no lock may be taken.
    """

    def __init__(self, storage: RunStorage, tier: Tier, what: str, window_bytes: int, counts_reads: bool = True):
        self.tier = tier
        self.window_bytes = window_bytes
        self._counts_reads = counts_reads
        self.storage = storage
        self.what = what
        self.refusal: BaseException | None = None
        self.dropped: collections.deque[HeldSlot] = collections.deque()
        self._held: set[HeldSlot] = set()
        self._writing: collections.deque[tuple[Future[None], int, Callable[[Future[None]], None]]] = collections.deque()
        self._reading: dict[Future[None], int] = {}
        self._spare: dict[int, list[Slab]] = {}
        self._spare_bytes = 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory that this takes now: of what is written and read ahead, and spare."""
        writing = sum(nbytes for future, nbytes, _ in self._writing if not future.done())
        return writing + sum(self._reading.values()) + self._spare_bytes

    # -- memory -----------------------------------------------------------------------------------------------------------

    def new_slab(self, nbytes: int) -> Slab:
        """A slab of at least ``nbytes`` bytes, a spare one if possible: the system zeroes what is new."""
        spare = self._spare.get(whole_pages(nbytes))
        if spare:
            self._spare_bytes -= whole_pages(nbytes)
            return spare.pop()
        return Slab(nbytes)

    def recycle(self, slab: Slab) -> None:
        """Keep a slab that nothing refers to any more for the next of its size, if there is room for it."""
        if self._spare_bytes + slab.nbytes <= self.window_bytes // _SPARE_PARTS:
            self._spare.setdefault(slab.nbytes, []).append(slab)
            self._spare_bytes += slab.nbytes

    # -- slots ------------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, place: str | None = None) -> Slot:
        """Room on the tier, in this ``place`` of one that has several. Raises :class:`~hf_offload.errors.TierFullError`."""
        try:
            return self.tier.reserve(nbytes, place)
        except TierFullError:
            self.storage.free_unneeded()
            return self.tier.reserve(nbytes, place)

    def free_with(self, slot: Slot, owner: torch.UntypedStorage) -> "HeldSlot":
        """Free ``slot`` once ``owner`` has gone."""
        held = HeldSlot(owner, self.dropped.append)
        held.slot = slot
        self._held.add(held)
        return held

    def free(self, held: "HeldSlot") -> None:
        """Free a slot now."""
        self._held.discard(held)
        self.tier.free(held.slot)

    # -- transfers --------------------------------------------------------------------------------------------------------

    def write(self, slot: Slot, slab: Slab, begin: int, ended: "Callable[[Future[None]], None]") -> "Future[None]":
        """Begin to write; :meth:`collect` calls ``ended`` with this write, in the thread of the calls. What the tier
        refuses is a write that has failed.
        """
        try:
            future = self.tier.write(slot, slab.content, begin)
        except TierFullError as error:  # a write limit that is met
            future = Future()
            future.set_exception(error.with_traceback(None))
        self._writing.append((future, slab.nbytes, ended))
        return future

    def read(self, slot: Slot, slab: Slab, begin: int, urgent: bool) -> "Future[None]":
        """Begin to read."""
        future = self.tier.read(slot, slab.content, urgent, begin)
        self._reading[future] = slab.nbytes
        return future

    def wait(self, future: "Future[None]") -> None:
        """Wait for a transfer, whatever becomes of it, and count how long that took."""
        try:
            if not future.done():
                with self.storage.handling.of(WAITS):
                    self.tier.wait_until_done(future)
        finally:  # also where Ctrl-C, or a drive that hangs, ends the wait: it is not asked for again
            self._reading.pop(future, None)

    def has_room_to_read(self, nbytes: int) -> bool:
        """Whether so many bytes may be read ahead now."""
        ahead = sum(self._reading.values())
        return ahead == 0 or ahead + nbytes <= self.window_bytes // 2

    @signals_deferred
    def collect(self) -> None:
        """Free the room of what has gone, and see to writes that have ended."""
        while self.dropped:
            self.free(self.dropped.popleft())
        for _ in range(len(self._writing)):
            future, nbytes, ended = self._writing.popleft()
            if future.done():
                ended(future)
            else:
                self._writing.append((future, nbytes, ended))

    def throttle(self) -> None:
        """Wait for the drive where too much is on its way to it."""
        self.collect()
        most = self.window_bytes // 2 if self._counts_reads else self.window_bytes
        while sum(nbytes for _, nbytes, _ in self._writing) > most:
            self.wait(self._writing[0][0])
            self.collect()

    def settle(self) -> None:
        """Wait until everything has been written."""
        self.collect()
        while self._writing:
            self.wait(self._writing[0][0])
            self.collect()

    def try_reserve(self, nbytes: int) -> Slot | None:
        """Room on the tier, or None: then it was said why what needs it stays in memory."""
        try:
            return self.reserve(nbytes)
        except (TierFullError, StorageError) as error:  # a write limit that is met, too
            self.say(error)
            return None

    def say(self, error: BaseException) -> None:
        """Say, once, that something stays in memory."""
        if self.refusal is None:
            self.refusal = error.with_traceback(None)  # whose frames hold what was to be written
            logger.warning("A part of the %s stays in memory, and the run goes on: %s", self.what, error)


class HeldSlot(weakref.ref[torch.UntypedStorage]):
    """The slot of a storage that may go at any moment. What is called then is a function of C: it takes no lock, and runs no
    signal handler, whose error Python would discard there.
    """

    __slots__ = ("slot",)
    slot: Slot
