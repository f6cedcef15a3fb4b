"""Reads of a storage whose bytes are in its slot: of all of them, or of a part."""

import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING

from hf_offload.errors import StorageError
from hf_offload.state import registry
from hf_offload.storage.store import Slab

if TYPE_CHECKING:
    from hf_offload.state.parked import Parked


class Reads:
    """What is being read, or was read ahead, by the first byte and the number of bytes.

    Attributes:
        version: Of the storage's tensors, when the reads began: bytes read before a later one are not taken.
    """

    def __init__(self, parked: "Parked"):
        self.version: tuple[int, ...] = ()
        self._owner = weakref.ref(parked)  # which holds this
        self._begun: dict[tuple[int, int], tuple[Slab, Future[None]]] = {}

    @property
    def _parked(self) -> "Parked":
        parked = self._owner()
        assert parked is not None
        return parked

    def has(self, begin: int, nbytes: int) -> bool:
        """Whether these bytes are being read, or were."""
        return (begin, nbytes) in self._begun

    def begin(self, begin: int, nbytes: int, urgent: bool) -> None:
        """Begin to read these bytes, before all other reads if it is ``urgent``."""
        parked = self._parked
        assert parked.slot is not None
        if self.version != parked.present_version():
            self.drop()
            self.version = parked.present_version()
        slab = parked.store.new_slab(nbytes)
        self._begun[begin, nbytes] = slab, parked.store.read(parked.slot.slot, slab, begin, urgent)
        registry.note_on_the_way(parked)

    def take(self, begin: int, nbytes: int) -> Slab:
        """These bytes, in memory that is the caller's.

        Raises :class:`~hf_offload.errors.StorageError` if they cannot be read; they can be asked for again.
        """
        parked = self._parked
        if self.version != parked.present_version():  # a module before has written to the mapping (MoCo's momentum)
            self.drop()
        read = self._begun.pop((begin, nbytes), None)
        if read is not None:
            parked.store.wait(read[1])
        if read is None or read[1].exception() is not None:  # of what was read ahead, before anyone has asked for it
            self.begin(begin, nbytes, urgent=True)
            read = self._begun.pop((begin, nbytes))
            parked.store.wait(read[1])
        try:
            read[1].result()
        except StorageError as error:
            name = parked.name
            what = name[:1].upper() + name[1:] if " " in name else f"The weight {name}"
            raise StorageError(f"{what} cannot be read back: go on from the last checkpoint. {error}") from error
        return read[0]

    def drop(self) -> None:
        """Forget all that was read ahead: it may be written to where it is."""
        for begin, nbytes in list(self._begun):
            self.drop_one(begin, nbytes)

    def drop_one(self, begin: int, nbytes: int) -> None:
        """Forget these bytes, if they were read ahead."""
        read = self._begun.pop((begin, nbytes), None)
        if read is not None:
            self._parked.store.wait(read[1])
            self._parked.store.recycle(read[0])
