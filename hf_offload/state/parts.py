"""Parts of a storage that is away: updates are computed without the memory for all of it."""

import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from hf_offload.state import guard
from hf_offload.state.storages import bytes_of
from hf_offload.storage.store import HeldSlot, Slab, whole_pages
from hf_offload.storage.tier import Slot

if TYPE_CHECKING:
    from hf_offload.state.parked import Parked


class Parts(guard.Debt):
    """The bytes of an away storage a part at a time, without the memory for all of them.

    From the first :meth:`write` to the end of the last write, tensors over the storage are guarded: the mapping may have
    former bytes. Where a write fails, its bytes stay in memory, and all of the storage comes with them when it is read.
    """

    is_memory = True

    def __init__(self, parked: "Parked"):
        self._owner = weakref.ref(parked)  # which holds this
        self._writes: dict[int, tuple[Slab, Future[None]]] = {}
        self.rescued: dict[int, Slab] = {}
        self._target: HeldSlot | None = None  # of what is written, if not the same slot
        self._slot_changed = False  # the mapped one is not the one that was written
        self._is_open = False  # from the first store to the end

    @property
    def _parked(self) -> "Parked":
        parked = self._owner()
        assert parked is not None
        return parked

    @property
    def are_written(self) -> bool:
        """Whether parts are on their way to the tier."""
        return bool(self._writes or self.rescued or self._is_open)

    def are_written_in(self, begin: int, nbytes: int) -> bool:
        """Whether the part, or any part of the whole, is on its way to the tier."""
        return begin in self._writes or (nbytes == self._parked.nbytes and self.are_written)

    def load(self, begin: int, nbytes: int) -> Slab:
        """A part, in memory that is the caller's.

        Raises :class:`~hf_offload.errors.StorageError` if it cannot be read; it can be asked for again.
        """
        parked = self._parked
        storage = parked.storage
        assert storage is not None
        if begin in self._writes:
            self.wait()
        if begin in self.rescued or not parked.slot_is_current:
            slab = parked.store.new_slab(nbytes)
            found = self.rescued.get(begin)
            source = bytes_of(storage)[begin : begin + nbytes] if found is None else found.content[:nbytes]
            slab.content[:nbytes].copy_(source)
            return slab
        return parked.reads.take(begin, nbytes)

    def begin(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        """What is written goes to ``slot``, which is the storage's when all parts were stored."""
        self._target = self._parked.store.free_with(slot, storage)

    def write(self, begin: int, slab: Slab) -> None:
        """Begin to write a part. All parts are stored, one after the other, until :meth:`end`."""
        parked = self._parked
        storage = parked.storage
        if storage is None:
            return
        parked.reads.drop_one(0, parked.nbytes)
        if self._target is None and parked.takes_another_slot:
            slot = parked.store.try_reserve(whole_pages(parked.nbytes))
            if slot is None:  # all of it stays in memory
                parked.bring_for_good()
                end = min(begin + slab.nbytes, parked.nbytes)
                bytes_of(storage)[begin:end].copy_(slab.content[: end - begin])
                parked.store.recycle(slab)
                return
            self.begin(slot, storage)
        target = self._target or parked.slot
        assert target is not None
        self._is_open = True
        parked.part_changes()
        self.rescued.pop(begin, None)  # what could not be written before
        future = parked.store.write(target.slot, slab, begin, lambda write: parked.parts._written(begin, write))
        self._writes[begin] = slab, future

    def end(self) -> None:
        """All parts were stored."""
        self._parked.all_parts_stored(self._target)
        self._slot_changed = self._slot_changed or self._target is not None
        self._target, self._is_open = None, False
        self._ended()

    def _written(self, begin: int, write: "Future[None]") -> None:
        slab, future = self._writes.get(begin, (None, None))
        if slab is None or future is not write:
            return  # it was waited for, and another may have begun
        del self._writes[begin]
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._parked.store.say(error)
            self.rescued[begin] = slab
        else:
            self._parked.store.recycle(slab)
        self._ended()

    def _ended(self) -> None:
        """Where nothing is under way any more, the slot is what tensors over the storage read."""
        parked = self._parked
        storage = parked.storage
        if self.are_written or storage is None:
            return
        if self._slot_changed:
            self._slot_changed = False
            if parked.on_host:
                parked.depart(storage)
            else:
                parked.free_former()
        for tensor in parked.tensors:
            guard.lift(tensor, self)

    def wait(self) -> None:
        """Wait until all parts were written."""
        for begin, (_, future) in list(self._writes.items()):
            self._parked.store.wait(future)
            self._written(begin, future)

    def overlay(self, slab: Slab) -> bool:
        """Put the parts that could not be written over what was read of the slot; false if there are none."""
        for begin, rescued in self.rescued.items():
            slab.content[begin : begin + rescued.nbytes].copy_(rescued.content)
        return bool(self.rescued)

    def settle(self, unseen: bool) -> None:
        """See :class:`~hf_offload.state.guard.Debt`."""
        parked = self._owner()
        if parked is None:
            return
        self.wait()
        if self.rescued:
            parked.come()
        self._ended()
        for tensor in parked.tensors:
            guard.lift(tensor, self)
