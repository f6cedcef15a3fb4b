"""Who has the memory of a storage, in addition to the tensors that are known to be over it."""

import sys
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_OF_ONE_TENSOR = 2
"""Uses of a storage that one tensor has: its own, and that of Python's object for the storage."""


class Holder:
    """By which all graphs hold a storage: that is one reference to it, however many they are."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: torch.UntypedStorage):
        self.storage = storage


class Uses:
    """Uses of one storage.

    Args:
        storage: It.
        on_host: Its device is the CPU.
        may_be_saved: Graphs, transforms or scripts may hold its tensors.
    """

    def __init__(self, storage: weakref.ref[torch.UntypedStorage], on_host: bool, may_be_saved: bool):
        self._storage = storage
        self._on_host = on_host
        self._may_be_saved = may_be_saved
        self._holder: weakref.ref[Holder] | None = None

    def have_others(self, tensors: Sequence[Tensor]) -> bool:
        """Whether anybody else than these ``tensors`` has the memory."""
        storage = self._storage()
        if storage is None:
            return False
        if has_others(storage, len(tensors)):
            return True
        if self._on_host:
            return False
        of_graphs = self._holder is not None and self._holder() is not None
        return _count_names(storage) > _NAMES + of_graphs or (self._may_be_saved and any(map(_is_saved, tensors)))

    def holder(self) -> Holder:
        """What a graph is to hold, rather than the storage."""
        found = None if self._holder is None else self._holder()
        if found is None:
            storage = self._storage()
            assert storage is not None
            found = Holder(storage)
            self._holder = weakref.ref(found)
        return found


def has_others(storage: torch.UntypedStorage, tensors: int) -> bool:
    """Whether anybody else than so many ``tensors`` holds the memory."""
    return _count(storage) > _OF_ONE_TENSOR - 1 + tensors


def _count(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def _is_saved(tensor: Tensor) -> bool:
    """Whether C++ holds a tensor: a graph that has saved it without hooks, a transform, a script."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor._use_count() == 1:  # type: ignore[attr-defined]
            return False
        if not tensor.requires_grad:
            return True
        with torch.enable_grad():
            edge = torch.autograd.graph.get_gradient_edge(tensor)  # which graphs hold, too, and which holds the tensor
        return edge is not None and tensor._use_count() > 2  # type: ignore[attr-defined]


def _count_names(storage: torch.UntypedStorage) -> int:
    """How many references to Python's object for the storage there are."""
    return sys.getrefcount(storage)


def _count_names_of_one() -> int:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return _count_names(storage)


_NAMES = _count_names_of_one()
"""References to a storage that one name refers to, as its caller counts them."""
