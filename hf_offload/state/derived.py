"""Weights whose value in use is rebuilt from the one in the slot, so that not each value has to be written."""

from typing import Protocol

import torch
from torch import Tensor

from hf_offload.interrupts import signals_deferred
from hf_offload.state import guard
from hf_offload.state.parked import Parked, Where
from hf_offload.state.storages import bytes_of, digest_of
from hf_offload.storage.store import Slab, Store


class Derivation(Protocol):
    """Makes the value to use from the one that the slot has."""

    @property
    def needs_slot(self) -> bool:
        """Whether the value in the slot is needed again: the one in memory is dropped."""

    @property
    def may_go(self) -> bool:
        """Whether the value in memory need not be written: it is rebuilt from the one in the slot."""

    def arrived(self) -> None:
        """What reads the storage finds the value of the slot from now on."""

    def kept(self) -> None:
        """The value in memory is now that of the slot."""

    def rescue(self, content: Tensor) -> None:
        """The value that was to be in the slot could not be written: its bytes, to be copied."""

    def finish(self) -> None:
        """Make the value to use."""


class ParkedWeight(Parked):
    """The storage of a weight.

    Attributes:
        derivation: What makes the value to use from the one in the slot, if anything does.
    """

    compares = True

    def __init__(self, tensor: Tensor, name: str, store: Store):
        super().__init__(tensor, name, store)
        self.derivation: Derivation | None = None
        self._derived_digest: bytes | None = None  # of what was derived in memory
        self._copy: Slab | None = None  # that is being written, while the storage may change

    # -- what leaves --------------------------------------------------------------------------------------------------------

    def leave(self, writes: bool = False) -> bool:
        """See :meth:`Parked.leave`. A value of which the slot's is needed again is dropped, unless others hold it."""
        if self.derivation is None or not self.derivation.needs_slot or self.slot is None:
            return super().leave(writes)
        if self.where is not Where.HERE or self.stays or self.is_held:
            return False
        self.wait_until_written()
        storage = self._storage()
        if self.stays or storage is None:
            return False
        self.depart(storage)
        return True

    def _need_not_be_written(self, writes: bool) -> bool:
        if self.derivation is not None and (writes or not self.derivation.may_go or self._is_derived_and_held):
            return False
        return super()._need_not_be_written(writes)

    @property
    def _is_derived_and_held(self) -> bool:
        """Whether aliases would read the slot, which has another value than memory."""
        return self._derived_digest is not None and self.is_held

    @property
    def _expected_digest(self) -> bytes:
        return self._digest if self._derived_digest is None else self._derived_digest

    def _note_written(self, digest: bytes) -> None:
        super()._note_written(digest)
        self._derived_digest = None
        if self.derivation is not None and self._copy is None:
            self.derivation.kept()

    def depart(self, storage: torch.UntypedStorage) -> None:
        """See :meth:`Parked.depart`."""
        super().depart(storage)
        self._derived_digest = None
        if self.derivation is not None:
            self.derivation.arrived()

    def _written(self) -> None:
        write, copy = self._write, self._copy
        self._copy = None
        content = copy or self._slab
        has_failed = write is not None and not write.cancelled() and write.exception() is not None
        if has_failed and self.derivation is not None and content is not None:
            self.derivation.rescue(content.content[: self.nbytes])
        super()._written()
        if copy is not None:
            self.store.recycle(copy)

    def be_away(self) -> bool:
        """See :meth:`Parked.be_away`."""
        if self.derivation is not None:
            self.wait_until_written()
            guard.settle(self.tensors)
        return super().be_away()

    def done(self) -> None:
        """See :class:`~hf_offload.state.guard.Debt`. Its unit lets it leave."""

    def forget(self) -> None:
        """See :meth:`Parked.forget`."""
        guard.settle(self.tensors)
        self.derivation = None
        super().forget()

    # -- what is derived ----------------------------------------------------------------------------------------------------

    def write_copy(self) -> bool:
        """Write what is in memory, which may change meanwhile: the slot has this value. False if there is no room."""
        storage = self._storage()
        if self.where is not Where.HERE or storage is None:
            return False
        self.wait_until_written()  # which may find that it has to stay
        with signals_deferred:
            if not self._reserve(storage):
                return False
            assert self.slot is not None
            self._copy = self.store.new_slab(self.nbytes)
            self._copy.content[: self.nbytes].copy_(bytes_of(storage))
            self._note_written(digest_of(storage))
            self._write = self.store.write(self.slot.slot, self._copy, 0, self._written)
        self.store.throttle()
        return True

    def restore(self) -> bool:
        """Let memory have the value of the slot again. False if there is none."""
        storage = self._storage()
        self.wait_until_written()
        if storage is None or self.slot is None or self.where is not Where.HERE:
            return False
        with signals_deferred:
            slab = self.store.new_slab(self.nbytes)
            read = self.store.read(self.slot.slot, slab, 0, urgent=True)
            self.store.wait(read)
            self.check_read(read)
            bytes_of(storage).copy_(slab.content[: self.nbytes])
            self.store.recycle(slab)
            self.version, self._derived_digest, self._is_clean = self.present_version(), None, True
        return True

    def is_derivable(self) -> bool:
        """Whether memory has the value that was read from the slot, or derived from it, without any other change."""
        storage = self._storage()
        if self._copy is None:
            self.wait_until_written()  # before it changes
        is_clean = self._is_clean or self._copy is not None
        if storage is None or not is_clean or self.present_version() != self.version:
            return False
        if self.on_host and not self._may_differ:
            return True
        expected = self._expected_digest
        return bool(expected) and digest_of(storage) == expected

    def note_derived(self, is_derived: bool) -> None:
        """Memory has changed: the value ``is_derived`` from that of the slot."""
        storage = self._storage()
        if storage is None:
            return
        if self.where is not Where.HERE:  # the slot itself has changed, for others have its address
            self.drop_reads()
            self._digest, self._derived_digest, self.written = b"", None, object()
        elif is_derived:
            self.version = self.present_version()
            self._derived_digest = digest_of(storage)
        else:
            self._is_clean = False

    def count_change(self, tensor: Tensor) -> None:
        """A change of ``tensor``, which is one of its, is counted now and made later."""
        is_known = self.present_version() == self.version
        torch.autograd.graph.increment_version(tensor)
        if is_known:
            self.version = self.present_version()
