"""What state dicts have of tensors that an accelerator's memory has not: copies on the CPU, mapped where the bytes are.

Files are written of them without the memory of the accelerator. A copy is one of then; where PyTorch's state dict would show,
or make, changes of the tensor itself, that is an error.
"""

import weakref

import torch
from torch import Tensor

from hf_offload.errors import OffloadError
from hf_offload.state import guard
from hf_offload.state.parked import Parked
from hf_offload.state.registry import parked_of
from hf_offload.state.storages import moves
from hf_offload.storage.tier import KeptSlot

_COPY = "_hf_offload_copy"  # an attribute of the storage: copies of it have none


class StateDictCopy:
    """A copy of what ``parked`` has in its slot, which is ``kept`` as long as the copy is there."""

    def __init__(self, parked: Parked, tensor: Tensor, kept: KeptSlot | None):
        self.name, self.written = parked.name, parked.written
        self._parked = weakref.ref(parked)
        storage = tensor.untyped_storage()
        self.storage = weakref.ref(storage)
        self._counter = tensor.detach()  # shares the version
        self._counter.data = torch.empty(0, dtype=tensor.dtype)
        self._version = tensor._version
        vars(storage)[_COPY] = self, kept

    @property
    def parked(self) -> Parked | None:
        """What it is a copy of, if that is still there and has the same bytes."""
        parked = self._parked()
        return None if self.is_changed or parked is None or not parked.has(self.written) else parked

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place."""
        return self._counter._version != self._version

    def check(self) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` if it was changed."""
        if self.is_changed:
            raise OffloadError(
                f"A tensor that state_dict() returned for {self.name} was changed in place. In memory, that would "
                "have changed what it was made of, but that is on a tier, and the tensor is a copy: change the parameter, or "
                "the entry of optimizer.state, itself."
            )


def copy_of(tensor: Tensor) -> StateDictCopy | None:
    """The copy that was given out, if ``tensor`` is one."""
    if not moves(tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        found = vars(tensor.untyped_storage()).get(_COPY)
    return None if found is None else found[0]


def check_loaded(tensor: Tensor) -> None:
    """``tensor`` is about to be loaded. Raise :class:`~hf_offload.errors.OffloadError` if it is a copy of former bytes."""
    copy = copy_of(tensor)
    if copy is not None and copy.parked is None:
        raise OffloadError(
            f"What is to be loaded for {copy.name} was returned by state_dict(), and one of the two has changed "
            "since. In memory, they would be the same, and nothing would change; this is a copy of then. To go back to "
            "former values, load a copy: copy.deepcopy(state_dict), taken then."
        )


def for_state_dict(tensor: Tensor) -> Tensor:
    """``tensor``, as a state dict has it: itself where it is in memory, or on a CPU."""
    parked = parked_of(tensor)
    if parked is None or parked.on_host:
        return tensor
    complete(tensor)
    for copy in parked.state_dict_copies:
        copy.check()
    parked.state_dict_copies = [copy for copy in parked.state_dict_copies if copy.storage() is not None]
    if not parked.be_away():
        return tensor
    present = next((copy for copy in parked.state_dict_copies if copy.written is parked.written), None)
    storage = None if present is None else present.storage()
    if storage is None:
        kept, storage = parked.hold(), parked.mapped(private=True)
    else:
        kept = vars(storage)[_COPY][1]
    with torch._C.DisableTorchFunctionSubclass():
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
    made = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, *place)
    parked.state_dict_copies.append(StateDictCopy(parked, made, kept))
    return made


def complete(tensor: Tensor) -> None:
    """Let it owe nothing but its memory."""
    for debt in guard.debts_of(tensor):
        if not isinstance(debt, Parked):
            debt.settle(False)


guard.as_saved = for_state_dict
