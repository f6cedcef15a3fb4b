"""A storage whose bytes are in memory, or in a slot of a tier: its pointer is swapped, and all tensors over it follow.

Note: why nobody reads wrong bytes
    Tensors, views and aliases share one storage, and the storage has one pointer. Here, it points to a slab; away, on a CPU,
    to the slot itself, mapped: who reads it reads the drive, and who writes it writes there. The pointer turns to the slot
    only when the write of the slab has ended, in the thread that trains. Where others have the address itself (NumPy arrays,
    DLPack), the pointer stays as it is: the storage's use count tells.

    On an accelerator, an away storage has no memory, and its tensors are guarded (:mod:`~hf_offload.state.guard`). A guard
    sees who comes later, and nobody who writes without a new version: sums of the memory, computed there, tell whether it is
    what the slot has. What others hold stays: an alias, the storage itself, a weight that a graph has saved without our
    hooks, or that a transform of ``torch.func`` has wrapped. Memory that streams other than its own have used is free when
    these have, too.
"""

import collections
import enum
import functools
import math
import sys
import weakref
from concurrent.futures import Future
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from hf_offload.errors import OffloadError
from hf_offload.interrupts import signals_deferred
from hf_offload.state import guard
from hf_offload.state.contexts import outside, unseen
from hf_offload.storage.kept import KeptRange, KeptSlot
from hf_offload.storage.store import HeldSlot, Slab, Store, whole_pages

_ALONE = 2
"""Uses of a storage that one tensor has: its own, and that of Python's object for the storage."""
_REFERENCES = 3
"""To that object, where one name refers to it: by the storage, the name, and the call that counts them."""


_RETRIES = 3
"""How many of those that came to be read are tried to leave after a read."""


class Where(enum.Enum):
    """Where the bytes are."""

    HERE = "in memory"
    LEAVING = "in memory, and being written"
    AWAY = "in the slot"


class Derivation(Protocol):
    """Makes the value to use from the one that the slot has, so that not each value has to be written."""

    @property
    def needs_slot(self) -> bool:
        """Whether the value in the slot is needed again: the one in memory is dropped."""

    @property
    def may_go(self) -> bool:
        """Whether the value in memory need not be written: it is made again from the one in the slot."""

    def arrived(self) -> None:
        """What reads the storage finds the value of the slot from now on."""

    def kept(self) -> None:
        """The value in memory is now that of the slot."""

    def rescue(self, content: Tensor) -> None:
        """The value that was to be in the slot could not be written: its bytes, to be copied."""

    def finish(self) -> None:
        """Make the value to use."""


class Holder:
    """By which all graphs hold a storage: that is one reference to it, however many they are."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: torch.UntypedStorage):
        self.storage = storage


class Parked:
    """The storage of one tensor, or of several that share it.

    Attributes:
        name: For messages.
        store: Where it goes.
        where: Where it is.
        nbytes: Its bytes.
        stays: It does not leave any more: there was no room, or a write has failed.
        takes_digests: Whether it is compared with what the slot has, rather than written once more, where it may have been
            written to without a new version. True for weights, which their units let leave.
        is_new: It has no bytes yet: they are stored in parts.
        derivation: What makes the value to use from the one in the slot.
        written: Another object with each change of the bytes in the slot.
        lent: Copies that state dicts have of it, :class:`hf_offload.state.lent.Lent`.
    """

    def __init__(self, tensor: Tensor, name: str, store: Store, takes_digests: bool = False):
        storage = _storage_of(tensor)
        self.name = name
        self.store = store
        self.where = Where.HERE
        self.nbytes = storage.nbytes()
        self.stays = False
        self.takes_digests = takes_digests
        self.is_new = False
        self.is_exposed = True  # others may have its address
        self._uses: int | None = None  # when code of the user began to run; None while it does not
        self._may_differ = False  # it may have been written to without a new version
        self._device = storage.device
        self.on_host = storage.device.type == "cpu"
        # pop(key, reference) runs no Python, in which Ctrl-C would be lost.
        gone: Any = functools.partial(_parked.pop, id(storage))
        self._storage: weakref.ref[torch.UntypedStorage] = weakref.ref(storage, gone)
        self._tensors: list[weakref.ref[Tensor]] = []
        self._slab: Slab | None = None  # that the storage points to, or whose bytes are being written
        self._slot: HeldSlot | None = None
        self._kept: list[KeptSlot] = []  # who holds the slot: what is written next goes to another one
        self._is_private = False  # the mapping, which may have been written to
        self._is_clean = False  # the slot has the bytes of this version
        self._version = -1
        self._digests: dict[tuple[int, int], bytes] = {}  # of ranges of the slot, where they are known
        self._sums = b""  # of memory on an accelerator with what the slot has
        self._derived: bytes | None = None  # the digest, or the sums, of what was derived in memory
        self.derivation: Derivation | None = None
        self.written = object()
        self.lent: list[Any] = []
        self._copy: Slab | None = None  # that is being written, while the storage may change
        self._write: Future[None] | None = None
        self._read: tuple[Slab, Future[None]] | None = None
        self._parts = Parts(self)
        self._holder: weakref.ref[Holder] | None = None
        self._stream: Any = None if self.on_host else torch.accelerator.current_stream(self._device)  # its memory's
        self.add(tensor)
        _parked[id(storage)] = self
        self._tell(storage)

    def add(self, tensor: Tensor) -> None:
        """Another tensor over the storage: not a view that comes and goes."""
        if not any(known() is tensor for known in self._tensors):
            self._tensors.append(weakref.ref(tensor))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are still over the storage."""
        found = [tensor for reference in self._tensors if (tensor := reference()) is not None]
        return [tensor for tensor in found if self.is_of(_storage_of(tensor))]

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
    def is_held(self) -> bool:
        """Whether others have its memory: aliases that are kept, NumPy arrays, other processes."""
        storage = self._storage()
        if storage is None:
            return False
        if self.on_host and storage.is_shared() and self.where is Where.HERE and self._slab is None:
            return True
        if self._count_uses() > _ALONE - 1 + max(1, len(self.tensors)):
            return True
        if self.on_host:
            return False
        of_graphs = self._holder is not None and self._holder() is not None
        if sys.getrefcount(storage) > _REFERENCES + of_graphs:
            return True
        return self.takes_digests and any(map(_is_held_unseen, self.tensors))

    @property
    def _is_pinned(self) -> bool:
        """Whether the pointer must stay as it is."""
        return self.is_held and (not self.on_host or self._has_exposed_uses)

    @property
    def _has_exposed_uses(self) -> bool:
        return self.is_exposed or (self._uses is not None and self._count_uses() > self._uses)

    def note_uses(self) -> None:
        """Code of the user runs from now on: what it keeps of the memory may be an address."""
        self._uses = self._count_uses()

    def find_exposed(self) -> None:
        """It has run. Aliases that forwards and backwards keep for themselves follow the storage."""
        self.is_exposed = self.is_held and self._has_exposed_uses
        self._uses = None

    def _count_uses(self) -> int:
        storage = self._storage()
        return 0 if storage is None else int(torch._C._storage_Use_Count(storage._cdata))

    def holder(self) -> Holder:
        """What a graph is to hold, rather than the storage."""
        found = None if self._holder is None else self._holder()
        if found is None:
            storage = self._storage()
            assert storage is not None
            found = Holder(storage)
            self._holder = weakref.ref(found)
        return found

    def note_stream(self) -> None:
        """The current stream is about to use the memory, which is free when it has."""
        if self.where is Where.HERE and not self.on_host:
            stream = torch.accelerator.current_stream(self._device)
            if stream != self._stream and (tensors := self.tensors):
                with torch._C.DisableTorchFunctionSubclass():
                    tensors[0].record_stream(stream)

    # -- leaving ----------------------------------------------------------------------------------------------------------

    def leave(self, writes: bool = False, must: bool = False) -> bool:
        """Begin to leave memory, and write what has changed, or all. False if it stays; if it ``must`` not for want of room,
        :class:`~hf_offload.errors.TierFullError` is raised.

        On a CPU, the bytes are in memory until :meth:`Store.collect` finds that they were written.
        """
        if self.where is not Where.HERE or self.stays or self._is_pinned:
            return False
        storage = self._storage()
        if storage is None:
            return False
        self._wait_for_writes()
        if self.stays:
            return False
        with signals_deferred:
            host: Slab | None = None
            derivation = self.derivation
            if derivation is not None and derivation.needs_slot and self._slot is not None:
                self._depart(storage)
                return True
            sums = b"" if self.on_host else _sums_of(storage)
            may_go = derivation is None or (derivation.may_go and not writes)
            if may_go and self._is_clean and self._present_version() == self._version:
                if self.on_host and not self._may_differ:
                    self._depart(storage)
                    return True
                expected = self._expected
                if expected and not self.on_host and sums == expected:
                    self._depart(storage)
                    return True
                if expected and self.on_host:
                    host = self._in_slab(storage)
                    if self._digest_of(host) == expected:
                        self._depart(storage, host)
                        return True
            if not self._reserve(storage, must):
                return False
            host = self._in_slab(storage) if host is None else host
            takes_digests = self.takes_digests or self.store.storage.takes_digests
            self._digests = {self._whole: self._digest_of(host)} if takes_digests else {}
            self._sums = sums
            self._version, self._is_clean, self._may_differ = self._present_version(), False, self.on_host
            self._slab, self.where, self.written = host, Where.LEAVING, object()
            _leaving[id(self)] = self
            self._tell(storage)
            if not self.on_host:
                self._empty(storage)
            self._derived = None
            if derivation is not None:
                derivation.kept()
            assert self._slot is not None
            self._write = self.store.write(self._slot.slot, host, 0, self._written)
        return True

    def _reserve(self, storage: torch.UntypedStorage, must: bool = False) -> bool:
        """Have a slot to write to; otherwise, it stays."""
        if self._slot is None or self._is_kept:
            nbytes = whole_pages(self.nbytes)
            slot = self.store.reserve(nbytes) if must else self.store.try_reserve(nbytes)
            if slot is None:
                self._stay()
                return False
            self._let_slot_go()
            self._slot = self.store.free_with(slot, storage)
        return True

    # -- values that are derived --------------------------------------------------------------------------------------------

    def write_copy(self) -> bool:
        """Write what is in memory, which may change meanwhile: the slot has this value. False if there is no room."""
        storage = self._storage()
        if self.where is not Where.HERE or storage is None:
            return False
        self._wait_for_writes()
        if self.stays:
            return False
        with signals_deferred:
            if not self._reserve(storage):
                return False
            assert self._slot is not None
            self._copy = self.store.new_slab(self.nbytes)
            self._copy.content[: self.nbytes].copy_(_bytes_of(storage))
            self._digests = {self._whole: self._digest_of(self._copy)} if self.takes_digests else {}
            self._sums = b"" if self.on_host else _sums_of(storage)
            self._version, self._is_clean, self._derived = self._present_version(), False, None
            self.written = object()
            self._write = self.store.write(self._slot.slot, self._copy, 0, self._written)
        self.store.throttle()
        return True

    def restore(self) -> bool:
        """Let memory have the value of the slot again. False if there is none."""
        storage = self._storage()
        self._wait_for_writes()
        if storage is None or self._slot is None or self.where is not Where.HERE:
            return False
        with signals_deferred:
            slab = self.store.new_slab(self.nbytes)
            read = self.store.read(self._slot.slot, slab, 0, urgent=True)
            self.store.wait(read)
            read.result()
            _bytes_of(storage).copy_(slab.content[: self.nbytes])
            self.store.recycle(slab)
            self._version, self._derived, self._is_clean = self._present_version(), None, True
        return True

    def is_derivable(self) -> bool:
        """Whether memory has the value that was read from the slot, or derived from it: nobody else has changed it."""
        storage = self._storage()
        if self._copy is None:
            self._wait_for_writes()  # before it changes
        is_clean = self._is_clean or self._copy is not None
        if storage is None or not is_clean or self._present_version() != self._version:
            return False
        if self.on_host and not self._may_differ:
            return True
        expected = self._expected
        return bool(expected) and self._digest_in_memory(storage) == expected

    def note_derived(self, is_derived: bool) -> None:
        """Memory has changed: the value ``is_derived`` from that of the slot."""
        storage = self._storage()
        if storage is None:
            return
        if self.where is not Where.HERE:  # the slot itself has changed, for others have its address
            self.drop_reads()
            self._digests, self._sums, self._derived, self.written = {}, b"", None, object()
            return
        if is_derived:
            self._version = self._present_version()
            self._derived = self._digest_in_memory(storage) if self.takes_digests else b""
        else:
            self._is_clean = False

    def count_change(self, tensor: Tensor) -> None:
        """A change of ``tensor``, which is one of its, is counted now and made later."""
        is_known = self._present_version() == self._version
        torch.autograd.graph.increment_version(tensor)
        if is_known:
            self._version = self._present_version()

    def _digest_in_memory(self, storage: torch.UntypedStorage) -> bytes:
        return xxhash.xxh3_128_digest(_bytes_of(storage).numpy().data) if self.on_host else _sums_of(storage)

    # -- leaving ------------------------------------------------------------------------------------------------------------

    def _tell(self, storage: torch.UntypedStorage) -> None:
        for observer in list(observers):
            observer.forget(storage)

    def doubt(self) -> None:
        """It may be written to without a new version."""
        self._may_differ = True

    @property
    def _whole(self) -> tuple[int, int]:
        return 0, self.nbytes

    def _digest_of(self, slab: Slab) -> bytes:
        return xxhash.xxh3_128_digest(memoryview(slab.memory)[: self.nbytes])

    @property
    def _expected(self) -> bytes:
        """The digest of what memory has if nobody has written to it, or its sums; nothing where they are not known."""
        if self._derived is not None:
            return self._derived
        return self._digests.get(self._whole, b"") if self.on_host else self._sums

    def _has_digest_of(self, slab: Slab) -> bool:
        return self._digests.get(self._whole) == self._digest_of(slab)

    def _in_slab(self, storage: torch.UntypedStorage) -> Slab:
        """The bytes in whole pages of host memory: on a CPU, the storage points to them from now on."""
        if self._slab is not None and self.on_host:
            return self._slab
        slab = self.store.new_slab(self.nbytes)
        with unseen():
            slab.content[: self.nbytes].copy_(_bytes_of(storage))
        if self.on_host:
            storage._swap_data_ptr_(slab.storage(self.nbytes))
            self._slab = slab
        return slab

    def _depart(self, storage: torch.UntypedStorage, host: Slab | None = None) -> None:
        """The slot has the bytes: let go of the memory."""
        assert self._slot is not None
        is_private = self.on_host and self._is_kept
        if self.on_host:
            with unseen():
                storage._swap_data_ptr_(self.mapped(is_private))
        else:
            self._empty(storage)
        slab, self._slab = self._slab or host, None
        if slab is not None:
            self.store.recycle(slab)
        self.where, self._is_private, self._derived = Where.AWAY, is_private, None
        if self.derivation is not None:
            self.derivation.arrived()

    def mapped(self, private: bool) -> torch.UntypedStorage:
        """The slot's bytes as memory of the CPU."""
        assert self._slot is not None
        mapped = self.store.tier.map(self._slot.slot, private)
        if mapped is None:
            raise OffloadError(f"{self.name} is on a tier that cannot be mapped ({self.store.tier.name}).")
        with unseen():
            return torch.from_numpy(mapped.numpy()[: self.nbytes]).untyped_storage()

    def _empty(self, storage: torch.UntypedStorage) -> None:
        storage._swap_data_ptr_(torch.UntypedStorage(0, device=self._device))
        for tensor in self.tensors:
            guard.put(tensor, self)

    def _written(self) -> None:
        write, self._write = self._write, None
        if write is None:
            return
        _leaving.pop(id(self), None)
        storage = self._storage()
        copy, self._copy = self._copy, None
        error = None if write.cancelled() else write.exception()
        if error is not None:
            self.store.say(error)
            written = copy or self._slab
            if self.derivation is not None and written is not None:
                self.derivation.rescue(written.content[: self.nbytes])
            self._let_slot_go()
            self._stay()
            if self.on_host and self.where is Where.LEAVING:
                self.where = Where.HERE
            return
        self._is_clean = not write.cancelled()
        if copy is not None:
            self.store.recycle(copy)
        if self.where is not Where.LEAVING or storage is None:
            if self._slab is not None and not self.on_host:  # it has come back
                self.store.recycle(self._slab)
                self._slab = None
            return
        if self.on_host and self._present_version() != self._version:
            self.where, self._is_clean = Where.HERE, False
        else:
            self._depart(storage)

    def _stay(self) -> None:
        self.stays = True
        self.store.kept_bytes += self.nbytes

    def _let_slot_go(self) -> None:
        slot, self._slot = self._slot, None
        self._is_clean = False
        self._kept.clear()
        if slot is not None:
            self.store.free(slot)

    def wait_until_written(self) -> None:
        """Wait until what leaves has left."""
        self._wait_for_writes()

    def _wait_for_writes(self) -> None:
        if self._write is not None:
            self.store.wait(self._write)
            self._written()

    def _present_version(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return sum(tensor._version for tensor in self.tensors)

    # -- coming -----------------------------------------------------------------------------------------------------------

    def read_ahead(self) -> bool:
        """Begin to read, if there is room for that in the window; false if there is none."""
        if not self.is_alive:
            return True
        if self.where is not Where.AWAY or self._read is not None or self._is_private or self._parts.are_written:
            return True  # it is there, or comes from elsewhere
        if not self.store.has_room_to_read(self.nbytes):
            return False
        self._begin_read(urgent=False)
        return True

    def come(self) -> None:
        """Be in memory. On a CPU, it stays where it is while others have its address.

        Raises :class:`~hf_offload.errors.StorageError` if it cannot be read; it can be asked for again.
        """
        storage = self._storage()
        if storage is None or self.where is Where.HERE:
            return
        for lent in self.lent:
            lent.check()
        self._parts.wait()
        self._parts.drop_reads()
        if self.on_host and self.where is Where.LEAVING:
            self.where = Where.HERE
            return
        if self.on_host and self._is_pinned and not self._parts.rescued:
            return
        slab = self._slab if self.where is Where.LEAVING else self._loaded(storage)
        assert slab is not None
        with signals_deferred:
            if self.on_host:
                storage._swap_data_ptr_(slab.storage(self.nbytes))
                self._slab = slab
            else:
                content = slab.content[: self.nbytes].to(self._device)
                self._stream = torch.accelerator.current_stream(self._device)
                storage._swap_data_ptr_(content.untyped_storage())
                if self._write is None:
                    self.store.recycle(slab)
                    self._slab = None
            self.where, self._is_private = Where.HERE, False
            self._version = self._present_version()
            for tensor in self.tensors:
                guard.lift(tensor, self)

    def settle(self, unseen: bool) -> None:
        """See :class:`~hf_offload.state.guard.Debt`."""
        self.come()
        self._may_differ = self._may_differ or unseen
        for tensor in self.tensors:
            guard.lift(tensor, self)

    def done(self) -> None:
        """See :class:`~hf_offload.state.guard.Debt`."""
        if self.takes_digests:
            return
        _visited.append(self)
        for _ in range(min(_RETRIES, len(_visited))):
            visited = _visited.pop()
            if not visited.leave() and visited.is_alive and visited.where is Where.HERE and not visited.stays:
                _visited.appendleft(visited)  # somebody has an alias: the others come first
            visited.store.throttle()

    def forget(self) -> None:
        """It is in memory, and a plain one from now on."""
        guard.settle(self.tensors)
        self.derivation = None
        self._let_slot_go()
        storage = self._storage()
        if storage is not None:
            _parked.pop(id(storage), None)

    def let_come(self) -> None:
        """Be in memory, and stay there."""
        self.come()
        self._wait_for_writes()
        self.stays = True

    def _loaded(self, storage: torch.UntypedStorage) -> Slab:
        if self._is_private:
            slab = self.store.new_slab(self.nbytes)
            slab.content[: self.nbytes].copy_(_bytes_of(storage))
            self._is_clean = self._has_digest_of(slab)
            return slab
        read, self._read = self._read, None
        _ahead.pop(id(self), None)
        if read is not None:
            self.store.wait(read[1])
        if read is None or read[1].exception() is not None:  # of what was read ahead, before anyone has asked for it
            read = self._begin_read(urgent=True)
            self._read = None
            _ahead.pop(id(self), None)
            self.store.wait(read[1])
        read[1].result()
        self._parts.overlay(read[0])
        if self.on_host and self.takes_digests:  # others may have written to the mapping
            self._digests = {self._whole: self._digest_of(read[0])}
        return read[0]

    def _begin_read(self, urgent: bool) -> tuple[Slab, Future[None]]:
        assert self._slot is not None
        with signals_deferred:
            slab = self.store.new_slab(self.nbytes)
            self._read = slab, self.store.read(self._slot.slot, slab, 0, urgent)
            _ahead[id(self)] = self
            return self._read

    def drop_reads(self) -> None:
        """Forget what was read ahead: it may be written to where it is."""
        self._parts.drop_reads()
        self._drop_whole()

    def _drop_whole(self) -> None:
        if self._read is not None:
            self.store.wait(self._read[1])
            self.store.recycle(self._read[0])
            self._read = None

    # -- snapshots --------------------------------------------------------------------------------------------------------

    def keep(self) -> list[KeptRange]:
        """Hold the bytes where they are on a drive: what is written next goes to another slot. Nothing where they are not
        there, or others may write to them.

        Raises :class:`~hf_offload.errors.TierFullError` where the drive has no room for them, and ``OSError``.
        """
        if self._is_private:
            self.come()  # which shows whether it was written to
        was_here = self.where is Where.HERE
        storage = self._storage()
        if storage is None or not self.be_away(must=True) or self.is_held:
            return []
        kept = self.hold()
        if kept is None:
            return []
        if self.on_host:
            if not (was_here and self._digests):  # others may have written to the mapping
                self._digests = {self._whole: kept.digest(*self._whole)}
            if not self._is_private:
                storage._swap_data_ptr_(self.mapped(private=True))
                self._is_private = True
        ranges = sorted(self._digests) or [self._whole]
        return [KeptRange(kept, begin, end, self._digests.get((begin, end))) for begin, end in ranges]

    def be_away(self, must: bool = False) -> bool:
        """Leave as :meth:`leave` does. Whether the slot has the bytes now."""
        self._wait_for_writes()
        self._parts.wait()
        if self.derivation is not None:
            guard.settle(self.tensors)
        if self.where is Where.HERE and not self.stays:
            self.leave(writes=True, must=must)
            self._wait_for_writes()
        return self.where is Where.AWAY and self._slot is not None and not self._parts.are_written

    def hold(self) -> KeptSlot | None:
        """Hold the slot, if it is on a drive: what is written next goes to another one."""
        assert self._slot is not None
        kept = self.store.tier.keep(self._slot.slot)
        if kept is not None:
            self._kept.append(kept)
        return kept

    @property
    def _is_kept(self) -> bool:
        return any(kept.is_needed for kept in self._kept)

    def has(self, written: object) -> bool:
        """Whether the bytes are still those of when :attr:`written` was this."""
        is_same = self._is_clean and not self._may_differ and self._present_version() == self._version
        return self.is_alive and self.written is written and (self.where is Where.AWAY or is_same)

    @property
    def parts(self) -> "Parts":
        """Its bytes in parts."""
        return self._parts


class Parts:
    """The bytes of an away storage a part at a time, without the memory for all of them.

    From the first :meth:`store` to the end of the last write, tensors over the storage are guarded: the mapping may have
    former bytes. Where a write fails, its bytes stay in memory, and all of the storage comes with them when it is read.
    """

    def __init__(self, parked: Parked):
        self._parked = parked
        self._reads: dict[int, tuple[Slab, Future[None]]] = {}
        self._writes: dict[int, tuple[Slab, Future[None]]] = {}
        self.rescued: dict[int, Slab] = {}
        self._target: HeldSlot | None = None  # of what is written, if not the same slot
        self._is_elsewhere = False  # in another slot than the one that is mapped
        self._digests: dict[tuple[int, int], bytes] = {}  # of what is written
        self._is_open = False  # from the first store to the end

    @property
    def are_written(self) -> bool:
        """Whether parts are on their way to the tier."""
        return bool(self._writes or self.rescued or self._is_open)

    def read_ahead(self, begin: int, nbytes: int) -> bool:
        """Begin to read a part; false if there is no room in the window."""
        parked = self._parked
        if not parked.is_alive or parked.where is not Where.AWAY or begin in self._reads or begin in self._writes:
            return True
        if parked._is_private or parked.is_new:
            return True
        if not parked.store.has_room_to_read(nbytes):
            return False
        self._begin(begin, nbytes, urgent=False)
        return True

    def drop_reads(self) -> None:
        """Forget what was read ahead."""
        while self._reads:
            slab, future = self._reads.popitem()[1]
            self._parked.store.wait(future)
            self._parked.store.recycle(slab)

    def load(self, begin: int, nbytes: int) -> Slab:
        """A part, in memory that is the caller's.

        Raises :class:`~hf_offload.errors.StorageError` if it cannot be read; it can be asked for again.
        """
        parked = self._parked
        storage = parked._storage()
        assert storage is not None
        if begin in self._writes:
            self.wait()
        if parked._is_private or begin in self.rescued:
            slab = parked.store.new_slab(nbytes)
            found = self.rescued.pop(begin, None)
            source = _bytes_of(storage)[begin : begin + nbytes] if found is None else found.content[:nbytes]
            slab.content[:nbytes].copy_(source)
            return slab
        read = self._reads.pop(begin, None)
        if read is not None:
            parked.store.wait(read[1])
        if read is None or read[1].exception() is not None:
            read = self._begin(begin, nbytes, urgent=True)
            del self._reads[begin]
            parked.store.wait(read[1])
        read[1].result()
        return read[0]

    def _begin(self, begin: int, nbytes: int, urgent: bool) -> tuple[Slab, Future[None]]:
        parked = self._parked
        assert parked._slot is not None
        with signals_deferred:
            slab = parked.store.new_slab(nbytes)
            self._reads[begin] = slab, parked.store.read(parked._slot.slot, slab, begin, urgent)
            _ahead[id(parked)] = parked
            return self._reads[begin]

    def store(self, begin: int, slab: Slab) -> None:
        """Begin to write a part. All parts are stored, one after the other, until :meth:`end`."""
        parked = self._parked
        storage = parked._storage()
        if storage is None:
            return
        parked._drop_whole()
        with signals_deferred:
            if self._target is None and (parked._slot is None or parked._is_kept or parked._is_private):
                slot = parked.store.reserve(whole_pages(parked.nbytes))
                self._target = parked.store.free_with(slot, storage)
            target = self._target or parked._slot
            assert target is not None
            self._is_open, parked._digests, parked.written = True, {}, object()
            for tensor in parked.tensors:
                guard.put(tensor, self)
            if parked.store.storage.takes_digests and not parked.on_host:
                end = min(begin + slab.nbytes, parked.nbytes)
                self._digests[begin, end] = xxhash.xxh3_128_digest(memoryview(slab.memory)[: end - begin])
            future = parked.store.write(target.slot, slab, begin, functools.partial(self._written, begin))
            self._writes[begin] = slab, future

    def end(self) -> None:
        """All parts were stored."""
        parked = self._parked
        with signals_deferred:
            if self._target is not None:
                parked._let_slot_go()
                parked._slot, self._target = self._target, None
                self._is_elsewhere = True
            self._is_open = False
            is_known = sum(last - first for first, last in self._digests) == parked.nbytes
            parked._digests, self._digests = self._digests if is_known else {}, {}
            parked._sums, parked._is_clean, parked.is_new = b"", True, False
            parked._version = parked._present_version()
            self._ended()

    def _written(self, begin: int) -> None:
        slab, future = self._writes.pop(begin, (None, None))
        if slab is None or future is None:
            return
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
        storage = parked._storage()
        if self.are_written or storage is None:
            return
        if parked.on_host and self._is_elsewhere:
            self._is_elsewhere = False
            parked._depart(storage)
        for tensor in parked.tensors:
            guard.lift(tensor, self)

    def wait(self) -> None:
        """Wait until all parts were written."""
        for begin, (_, future) in list(self._writes.items()):
            self._parked.store.wait(future)
            self._written(begin)

    def overlay(self, slab: Slab) -> None:
        """Put the parts that could not be written over what was read of the slot."""
        while self.rescued:
            begin, rescued = self.rescued.popitem()
            slab.content[begin : begin + rescued.nbytes].copy_(rescued.content)
            self._parked.stays, self._parked._is_clean = True, False

    def settle(self, unseen: bool) -> None:
        """See :class:`~hf_offload.state.guard.Debt`."""
        self.wait()
        if self.rescued:
            self._parked.come()
        self._ended()
        for tensor in self._parked.tensors:
            guard.lift(tensor, self)

    def done(self) -> None:
        """See :class:`~hf_offload.state.guard.Debt`."""


class Observer(Protocol):
    """Counts memory."""

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Its bytes are counted where it is stored."""


observers: "weakref.WeakSet[Observer]" = weakref.WeakSet()
_parked: dict[int, Parked] = {}
_leaving: dict[int, Parked] = {}
_visited: collections.deque[Parked] = collections.deque()
"""What came because somebody has read it."""
_ahead: dict[int, Parked] = {}


def _sums_of(storage: torch.UntypedStorage) -> bytes:
    """A digest of memory on an accelerator: of the sums of its words by row and by column, which that computes."""
    content = _bytes_of(storage)
    words = content[: content.numel() // 4 * 4].view(torch.int32)
    width = max(1, math.isqrt(words.numel()))
    square = words[: words.numel() // width * width].view(-1, width)
    rest = content[4 * square.numel() :].to(torch.int64)
    sums = torch.cat([square.sum(0, dtype=torch.int64), square.sum(1, dtype=torch.int64), rest])
    return xxhash.xxh3_128_digest(memoryview(sums.cpu().numpy()))


def _is_held_unseen(tensor: Tensor) -> bool:
    """Whether C++ holds a tensor: a graph that has saved it without hooks, a transform, a script."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor._use_count() == 1:  # type: ignore[attr-defined]
            return False
        if not tensor.requires_grad:
            return True
        with torch.enable_grad():
            edge = torch.autograd.graph.get_gradient_edge(tensor)  # which graphs hold, too, and which holds the tensor
        return edge is not None and tensor._use_count() > 2  # type: ignore[attr-defined]


def pause() -> None:
    """Code of the user runs from now on, which may write to tensors without a new version (fused optimizers, ``.data``): what
    is still being written stays in memory for now, and what was read ahead is forgotten.
    """
    for parked in list(_leaving.values()):
        if parked.on_host and parked.where is Where.LEAVING:
            parked.where = Where.HERE
            parked.doubt()
    while _ahead:
        _ahead.popitem()[1].drop_reads()


def parked_of(tensor: Tensor) -> Parked | None:
    """What moves the storage of a strided ``tensor``, if anything does."""
    if not _parked:
        return None
    storage = _storage_of(tensor)
    found = _parked.get(id(storage))
    return found if found is not None and found.is_of(storage) else None


def is_held(tensor: Tensor) -> bool:
    """Whether others have the memory of a tensor, who would read it without asking."""
    if not torch._C._has_storage(tensor) or tensor.layout is not torch.strided:
        return False
    parked = parked_of(tensor)
    if parked is not None:
        return parked.is_held
    storage = _storage_of(tensor)
    if tensor.device.type == "cpu" and storage.is_shared():
        return True
    return int(torch._C._storage_Use_Count(storage._cdata)) > _ALONE


def is_parked(storage: torch.UntypedStorage) -> bool:
    """Whether anything moves a storage."""
    found = _parked.get(id(storage))
    return found is not None and found.is_of(storage)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The bytes of a storage, where they are."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def empty_away(like: Tensor, device: torch.device, name: str, store: Store) -> Tensor:
    """A tensor as ``like`` on ``device``, whose bytes are to be stored in parts: it takes no memory until then."""
    nbytes = like.numel() * like.element_size()
    with outside():  # nobody is to count it
        if device.type == "cpu":
            storage = Slab(nbytes).storage(nbytes)  # the system gives memory to what is touched
            made = torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())
            parked = Parked(made, name, store)
        else:
            nothing: Any = torch._C._construct_storage_from_data_pointer(0, device, nbytes)
            made = torch.empty(0, dtype=like.dtype, device=device).set_(nothing, 0, like.shape, like.stride())
            parked = Parked(made, name, store)
            parked._empty(nothing)
    parked.where, parked.is_new = Where.AWAY, True
    return made
