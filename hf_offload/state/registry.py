"""All storages that are moved, those that are on their way, and the observers that count memory."""

import functools
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hf_offload.state.storages import has_others, moves, storage_of
from hf_offload.tensors import is_wrapped

if TYPE_CHECKING:
    from hf_offload.state.parked import Parked


class Observer(Protocol):
    """Counts memory."""

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Its bytes are counted where it is stored."""


observers: "weakref.WeakSet[Observer]" = weakref.WeakSet()
_parked: "dict[int, Parked]" = {}
_on_the_way: "dict[int, weakref.ref[Parked]]" = {}
"""Those whose bytes are in memory and being written, or of which something was read ahead."""


def register(parked: "Parked", storage: torch.UntypedStorage) -> weakref.ref[torch.UntypedStorage]:
    """``parked`` moves ``storage`` from now on, which it may refer to weakly."""
    # pop(key, reference) runs no Python, in which Ctrl-C would be lost.
    gone: Any = functools.partial(_parked.pop, id(storage))
    _parked[id(storage)] = parked
    return weakref.ref(storage, gone)


def forget(storage: torch.UntypedStorage) -> None:
    """Nothing moves ``storage`` any more."""
    _parked.pop(id(storage), None)


def note_on_the_way(parked: "Parked") -> None:
    """Its bytes are being written while they are in memory, or are read ahead. It may go meanwhile."""
    gone: Any = functools.partial(_on_the_way.pop, id(parked))
    _on_the_way[id(parked)] = weakref.ref(parked, gone)


def tell(storage: torch.UntypedStorage) -> None:
    """Tell who counts memory that the bytes of ``storage`` are not theirs to count."""
    for observer in list(observers):
        observer.forget(storage)


def parked_of(tensor: Tensor) -> "Parked | None":
    """What moves the storage of ``tensor``, if anything does."""
    if not _parked or not torch._C._has_storage(tensor) or tensor.layout is not torch.strided or is_wrapped(tensor):
        return None
    storage = storage_of(tensor)
    found = _parked.get(id(storage))
    return found if found is not None and found.is_of(storage) else None


def can_leave(tensor: Tensor) -> bool:
    """Whether a tensor can leave memory: one of a kind that :func:`moves <hf_offload.state.storages.moves>`, with a storage
    of its own that no other process has.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if not moves(tensor):
            return False
        nbytes = tensor.untyped_storage().nbytes()
        if parked_of(tensor) is not None:
            return nbytes in (tensor.nbytes, 0)  # none, while it is away from an accelerator
        return nbytes == tensor.nbytes and not (tensor.device.type == "cpu" and tensor.is_shared())


def is_parked(storage: torch.UntypedStorage) -> bool:
    """Whether anything moves a storage."""
    found = _parked.get(id(storage))
    return found is not None and found.is_of(storage)


def is_held(tensor: Tensor) -> bool:
    """Whether others have the memory of a tensor, who would read it without asking."""
    parked = parked_of(tensor)
    if parked is not None:
        return parked.is_held
    if not torch._C._has_storage(tensor) or tensor.layout is not torch.strided:
        return False
    storage = storage_of(tensor)
    return (tensor.device.type == "cpu" and storage.is_shared()) or has_others(storage, 1)


def before_user_code() -> None:
    """Code of the user runs from now on, which may write to tensors without a new version (fused optimizers, ``.data``): what
    is still being written stays in memory for now, and what was read ahead is forgotten. Of guarded tensors it is kept: who
    asks for these settles what they owe, which takes what was read.
    """
    for key, reference in list(_on_the_way.items()):
        parked = reference()
        if parked is not None:
            parked.cancel_leaving()
            if parked.is_guarded:
                continue
            parked.reads.drop()
        _on_the_way.pop(key, None)
