"""A storage whose bytes are in memory, or in a slot of a tier: its pointer is swapped, and all tensors over it follow.

Note: why no code reads wrong bytes
    Tensors, views and aliases share one storage, and the storage has one pointer. Here, it points to a slab; away, on a CPU,
    to the slot itself, mapped: reads and writes go to the drive. The pointer turns to the slot
    only when the write of the slab has ended, in the thread that trains. Where others have it (aliases, or the address
    itself: NumPy arrays, DLPack), the pointer stays as it is: the storage's use count tells.

    On an accelerator, an away storage has no memory, and its tensors are guarded (:mod:`~hf_offload.state.guard`). A guard
    sees later operations, but no writes without a new version: sums of the memory, computed there, tell whether it is what
    the slot has. What others hold stays: an alias, the storage itself, a weight that a graph has saved without our
    hooks, or that a transform of ``torch.func`` has wrapped. Memory that streams other than its own have used is free when
    these have, too.
"""

import collections
import enum
import weakref
from concurrent.futures import Future
from typing import Any

import torch
import xxhash
from torch import Tensor

from hf_offload.errors import OffloadError
from hf_offload.interrupts import signals_deferred
from hf_offload.state import guard, registry
from hf_offload.state.contexts import hidden_from_modes
from hf_offload.state.parts import Parts
from hf_offload.state.reads import Reads
from hf_offload.state.storages import Uses, bytes_of, digest_of, storage_of, swap_pointer
from hf_offload.storage.store import HeldSlot, Slab, Store, whole_pages
from hf_offload.storage.tier import KeptSlot

_RETRIES = 3
"""How many of those that came to be read are tried to leave after a read."""


class Where(enum.Enum):
    """Where the bytes are."""

    HERE = "in memory"
    LEAVING = "in memory, and being written"
    AWAY = "in the slot"


class Parked(guard.Debt):
    """The storage of one tensor, or of several that share it.

    Attributes:
        name: For messages.
        store: Where it goes.
        where: Where it is.
        nbytes: Its bytes.
        on_host: Its device is the CPU.
        stays: It does not leave any more: there was no room, or a write has failed.
        is_weight: It is compared with what the slot has, rather than written once more, where it may have been written to
            without a new version.
        write_was_cancelled: It was about to leave, and is in memory until it can.
        is_being_made: It has no bytes yet: they are stored in parts.
        uses: Who has its memory.
        slot: What has its bytes while it is away.
        parts: Its bytes in parts, while it is away.
        reads: What is being read of the slot.
        version: Those of its tensors, when it had the bytes of the slot.
        written: Another object with each change of the bytes in the slot.
        state_dict_copies: Copies that state dicts have of it, :class:`hf_offload.state.state_dict_copies.StateDictCopy`.
    """

    is_weight = False
    is_memory = True

    def __init__(self, tensor: Tensor, name: str, store: Store):
        storage = storage_of(tensor)
        self.name = name
        self.store = store
        self.where = Where.HERE
        self.nbytes = storage.nbytes()
        self.on_host = storage.device.type == "cpu"
        self.stays = False
        self.write_was_cancelled = False
        self.is_being_made = False
        self.slot: HeldSlot | None = None
        self.parts = Parts(self)
        self.reads = Reads(self)
        self.version: tuple[int, ...] = ()
        self.written = object()
        self.state_dict_copies: list[Any] = []
        self._device = storage.device
        self._address = storage.data_ptr()
        self._storage = registry.register(self, storage)
        self.uses = Uses(self._storage, self.on_host, self.is_weight)
        self._tensors: list[weakref.ref[Tensor]] = []
        self._has_uncounted_writes = False  # it may have been written to without a new version
        self._is_clean = False  # the slot has the bytes of this version
        self._may_be_torn = False  # what is being written may change meanwhile
        self._digest = b""  # of memory with the bytes of the slot, if it is known
        self._slab: Slab | None = None  # that the storage points to, or whose bytes are being written
        self._write: Future[None] | None = None
        self._former: list[HeldSlot] = []  # which the storage points to until the present one has all bytes
        self._kept: list[KeptSlot] = []  # who holds the slot: what is written next goes to another one
        self._stream: Any = None if self.on_host else torch.accelerator.current_stream(self._device)  # its memory's
        self.add(tensor)
        registry.tell(storage)

    # -- who has it -------------------------------------------------------------------------------------------------------

    def add(self, tensor: Tensor) -> None:
        """Another tensor over the storage: not a view that comes and goes."""
        if not any(known() is tensor for known in self._tensors):
            self._tensors.append(weakref.ref(tensor))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are still over the storage."""
        found = [tensor for reference in self._tensors if (tensor := reference()) is not None]
        return [tensor for tensor in found if self.is_of(storage_of(tensor))]

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The storage, while it is there."""
        return self._storage()

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is of this storage."""
        return self._storage() is storage

    @property
    def is_alive(self) -> bool:
        """Whether the storage is still there."""
        return self._storage() is not None

    @property
    def is_here(self) -> bool:
        """Whether it is in memory, and not about to leave it."""
        return self.where is Where.HERE

    @property
    def is_guarded(self) -> bool:
        """Whether all its tensors are."""
        return all(guard.is_guarded(tensor) for tensor in self.tensors)

    @property
    def is_coming(self) -> bool:
        """Whether it is being read, or was read ahead."""
        return self.reads.has(0, self.nbytes)

    @property
    def is_away(self) -> bool:
        """Whether the slot alone has the bytes."""
        storage = self._storage()
        return self.where is Where.AWAY and (storage is None or not self._was_given_memory(storage))

    @property
    def is_held(self) -> bool:
        """Whether others have its memory: aliases that are kept, NumPy arrays, other processes."""
        if self.on_host and self.where is Where.HERE and self._slab is None and self._is_shared():
            return True
        return self.uses.have_others(self.tensors)

    def _is_shared(self) -> bool:
        storage = self._storage()
        return storage is not None and storage.is_shared()

    def note_stream(self) -> None:
        """The current stream is about to use the memory: after the one that has used it before, which may have updated it.
        The memory is free when all have.
        """
        if self.where is Where.HERE and not self.on_host:
            stream = torch.accelerator.current_stream(self._device)
            if stream != self._stream and (tensors := self.tensors):
                stream.wait_stream(self._stream)
                self._stream = stream
                with torch._C.DisableTorchFunctionSubclass():
                    tensors[0].record_stream(stream)

    # -- leaving ----------------------------------------------------------------------------------------------------------

    @signals_deferred
    def leave(self) -> bool:
        """Begin to leave memory, and write what has changed. False if it stays.

        On a CPU, the bytes are in memory until :meth:`Store.collect` finds that they were written.
        """
        if self.where is not Where.HERE or self.stays or self.is_held:
            return False
        storage = self._storage()
        if storage is None or self._was_given_memory(storage):
            return False
        self.wait_until_written()  # which may find that it has to stay
        self.note_stream()
        may_be_same = self._is_clean and self.present_version() == self.version
        if may_be_same and self.on_host and not self._has_uncounted_writes:
            self.depart(storage)
            return True
        digest = digest_of(storage) if self.is_weight or not self.on_host else b""
        if may_be_same and digest and digest == self._digest:
            self.depart(storage)
            return True
        if not self._reserve(storage):
            return False
        slab = self._in_slab(storage)
        self._digest, self.version = digest, self.present_version()
        self._is_clean, self._may_be_torn, self.written = False, False, object()
        self._has_uncounted_writes = self.on_host
        self._slab, self.where = slab, Where.LEAVING
        registry.note_on_the_way(self)
        registry.tell(storage)
        if not self.on_host:
            self._empty(storage)
        assert self.slot is not None
        self._write = self.store.write(self.slot.slot, slab, 0, self._written)
        return True

    def leave_or_drop_reads(self) -> bool:
        """Leave, or forget what was read ahead. False if it takes the memory that it took."""
        if self.is_coming:
            self.reads.drop()
            return True
        return self.leave()

    def _reserve(self, storage: torch.UntypedStorage) -> bool:
        """Have a slot to write to; otherwise, it stays."""
        if self.stays:
            return False
        if self.takes_another_slot:
            nbytes = whole_pages(self.nbytes)
            slot = self.store.try_reserve(nbytes)
            if slot is None:
                self.stays = True
                return False
            self._free_slot()
            self.slot = self.store.free_with(slot, storage)
        return True

    def cancel_leaving(self) -> None:
        """It may be written to before the write has ended: on a CPU, it stays in memory, and the slot may have any bytes."""
        if self.on_host and self._write is not None:
            self._may_be_torn = True
            if self.where is Where.LEAVING:
                self.where, self.write_was_cancelled = Where.HERE, True

    def note_change(self) -> None:
        """It was written to, and versions may not tell: an update of several parts counts as one change."""
        self._is_clean, self.written = False, object()

    def note_uncounted_writes(self) -> None:
        """It may be written to without a new version."""
        self._has_uncounted_writes = True

    def _in_slab(self, storage: torch.UntypedStorage) -> Slab:
        """The bytes in whole pages of host memory: on a CPU, the storage points to them from now on."""
        if self._slab is not None and self.on_host:
            return self._slab
        slab = self.store.new_slab(self.nbytes)
        with hidden_from_modes():
            slab.content[: self.nbytes].copy_(bytes_of(storage))
        if self.on_host:
            self._point(storage, slab.storage(self.nbytes))
            self._slab = slab
        return slab

    def depart(self, storage: torch.UntypedStorage) -> None:
        """The slot has the bytes: let go of the memory."""
        assert self.slot is not None
        if self.on_host:
            self._point(storage, self.mapped(private=False))
        else:
            self._empty(storage)
        slab, self._slab = self._slab, None
        if slab is not None:
            self.store.recycle(slab)
        self.free_former()
        self.where = Where.AWAY

    def _point(self, storage: torch.UntypedStorage, memory: torch.UntypedStorage) -> None:
        swap_pointer(storage, memory)
        self._address = storage.data_ptr()

    def _was_given_memory(self, storage: torch.UntypedStorage) -> bool:
        """Whether PyTorch has given the storage other memory (``share_memory_()``, ``resize_()``). It stays there then, and
        the slot is freed.
        """
        if storage.data_ptr() == self._address:
            return False
        self.wait_until_written()
        self.reads.drop()
        self._free_slot()
        self.where, self.stays, self._slab = Where.HERE, True, None
        self._address = storage.data_ptr()
        for tensor in self.tensors:
            guard.lift(tensor, self)
        return True

    def mapped(self, private: bool) -> torch.UntypedStorage:
        """The slot's bytes as memory of the CPU."""
        assert self.slot is not None
        mapped = self.store.tier.map(self.slot.slot, private)
        if mapped is None:
            raise OffloadError(f"{self.name} is on a tier that cannot be mapped ({self.store.tier.name}).")
        with hidden_from_modes():
            return torch.from_numpy(mapped.numpy()[: self.nbytes]).untyped_storage()

    def _empty(self, storage: torch.UntypedStorage) -> None:
        self._point(storage, torch.UntypedStorage(0, device=self._device))
        for tensor in self.tensors:
            guard.put(tensor, self)

    def _written(self, write: "Future[None]") -> None:
        if write is not self._write:
            return  # it was waited for, and another may have begun
        self._write = None
        storage = self._storage()
        error = None if write.cancelled() else write.exception()
        self._is_clean = error is None and not write.cancelled() and not self._may_be_torn
        if error is not None:
            self.store.say(error)
            self._free_slot()
            self.stays = True
            if self.on_host and self.where is Where.LEAVING:
                self.where = Where.HERE
            elif not self.on_host and self.where is Where.HERE:  # it has come back
                self._slab = None
        elif self.where is not Where.LEAVING or storage is None:
            if self._slab is not None and not self.on_host:  # it has come back
                self.store.recycle(self._slab)
                self._slab = None
        elif self.on_host and (self.present_version() != self.version or self.is_held):
            self.where, self._is_clean = Where.HERE, False
        else:
            self.depart(storage)

    def free_former(self) -> None:
        """Nothing points to slots that it had before the present one."""
        while self._former:
            self.store.free(self._former.pop())

    def _free_slot(self) -> None:
        slot, self.slot = self.slot, None
        self._is_clean = False
        self._kept.clear()
        if slot is not None:
            self.store.free(slot)

    def wait_until_written(self) -> None:
        """Wait until what leaves has left."""
        if self._write is not None:
            self.store.wait(self._write)
            self._written(self._write)

    def present_version(self) -> tuple[int, ...]:
        """Those of all tensors: one grows with each change that PyTorch counts."""
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(tensor._version for tensor in self.tensors)

    def all_parts_stored(self, slot: HeldSlot | None) -> None:
        """All bytes were stored in parts: in the slot, or in another ``slot`` that it has from now on."""
        if slot is not None:
            self._former += [] if self.slot is None else [self.slot]
            self._kept.clear()
            self.slot = slot
        self._digest, self.version = b"", self.present_version()
        self._is_clean, self.is_being_made = True, False

    def part_changes(self) -> None:
        """A part of its bytes in the slot is going to change."""
        self._digest, self.written = b"", object()
        for tensor in self.tensors:
            guard.put(tensor, self.parts)

    @property
    def slot_is_current(self) -> bool:
        """Whether the slot has the present bytes."""
        return self.is_alive and self.is_away and not self.is_being_made

    @property
    def takes_another_slot(self) -> bool:
        """Whether what is written next goes to another slot than the present one."""
        return self.slot is None or bool(self._kept)

    # -- coming -----------------------------------------------------------------------------------------------------------

    def read_ahead(self, begin: int = 0, nbytes: int | None = None) -> bool:
        """Begin to read all of it, or a part, if there is room for that in the window; false if there is none."""
        nbytes = self.nbytes if nbytes is None else nbytes
        if not self.slot_is_current or self.reads.has(begin, nbytes) or self.parts.are_written_in(begin, nbytes):
            return True  # it is there, or comes from elsewhere
        if not self.store.has_room_to_read(nbytes):
            return False
        self.reads.begin(begin, nbytes, urgent=False)
        return True

    def begin_to_read(self, urgent: bool = True) -> None:
        """Begin to read all of it, whether the window has room or not, before all other reads if it is ``urgent``."""
        if self.slot_is_current and not (self.is_coming or self.parts.are_written or self.is_held):
            self.reads.begin(0, self.nbytes, urgent)

    @signals_deferred
    def come(self) -> None:
        """Be in memory. On a CPU, it stays where it is while others have its memory.

        Raises :class:`~hf_offload.errors.StorageError` if it cannot be read; it can be asked for again.
        """
        storage = self._storage()
        self.write_was_cancelled = False
        if storage is None or self._was_given_memory(storage) or self.where is Where.HERE:
            return
        for copy in self.state_dict_copies:
            copy.check()
        self.parts.wait()
        if self.on_host and self.where is Where.LEAVING:
            self.where = Where.HERE
            return
        if self.on_host and self.is_held and not self.parts.rescued:
            return
        slab = self._slab if self.where is Where.LEAVING else self._loaded()
        assert slab is not None
        if self.on_host:
            self._point(storage, slab.storage(self.nbytes))
            self._slab = slab
        else:
            content = slab.content[: self.nbytes].to(self._device)
            self._stream = torch.accelerator.current_stream(self._device)
            self._point(storage, content.untyped_storage())
            if self._write is None:
                self.store.recycle(slab)
                self._slab = None
        self.free_former()
        self.parts.rescued.clear()
        self.where = Where.HERE
        self.version = self.present_version()
        for tensor in self.tensors:
            guard.lift(tensor, self)

    def settle(self, unseen: bool) -> None:
        """See :class:`~hf_offload.state.guard.Debt`."""
        self.come()
        self._has_uncounted_writes = self._has_uncounted_writes or unseen
        for tensor in self.tensors:
            guard.lift(tensor, self)

    def done(self) -> None:
        """See :class:`~hf_offload.state.guard.Debt`."""
        _visited.append(weakref.ref(self))
        for _ in range(min(_RETRIES, len(_visited))):
            reference = _visited.pop()
            visited = reference()
            if visited is None:
                continue
            if not visited.leave() and visited.is_alive and visited.is_here and not visited.stays:
                _visited.appendleft(reference)  # there is an alias: the others come first
            if visited.on_host:
                visited.wait_until_written()  # code of the user runs, which may write to it next
            visited.store.throttle()

    def unmanage(self) -> None:
        """It is in memory, and a plain one from now on. Where others have the address of the slot, it stays there."""
        guard.settle(self.tensors)
        self.stays = True
        if not self.is_here:
            return
        self._free_slot()
        storage = self._storage()
        if storage is not None:
            registry.forget(storage)

    def bring_for_good(self) -> None:
        """Be in memory, and stay there."""
        self.come()
        self.wait_until_written()
        self.stays = True

    def _loaded(self) -> Slab:
        slab = self.reads.take(0, self.nbytes)
        self.reads.drop()
        if self.parts.overlay(slab):
            self.stays, self._is_clean = True, False
        if self.on_host and self.is_weight:  # others may have written to the mapping
            self._digest = xxhash.xxh3_128_digest(slab.memory[: self.nbytes])
        return slab

    # -- copies of state dicts ----------------------------------------------------------------------------------------------

    def be_away(self) -> bool:
        """Leave as :meth:`leave` does. Whether the slot has the bytes now."""
        self.wait_until_written()
        self.parts.wait()
        if self.where is Where.HERE and not self.stays:
            self.leave()
            self.wait_until_written()
        return self.where is Where.AWAY and self.slot is not None and not self.parts.are_written

    def hold(self) -> KeptSlot | None:
        """Hold the slot, if it is on a drive: what is written next goes to another one."""
        assert self.slot is not None
        kept = self.store.tier.keep(self.slot.slot)
        if kept is not None:
            self._kept.append(kept)
        return kept

    def has(self, written: object) -> bool:
        """Whether the bytes are still those of when :attr:`written` was this."""
        is_same = self._is_clean and not self._has_uncounted_writes and self.present_version() == self.version
        return self.is_alive and self.written is written and (self.where is Where.AWAY or is_same)


_visited: collections.deque[weakref.ref[Parked]] = collections.deque()
"""What came because it was read."""
