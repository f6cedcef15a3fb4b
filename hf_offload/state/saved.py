"""What autograd saves of a weight that may leave memory: which one it is, and how to look at it."""

import functools
import threading
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.errors import SavedTensorModifiedError
from hf_offload.interrupts import signals_deferred
from hf_offload.state.parked import Parked
from hf_offload.state.registry import parked_of
from hf_offload.state.units import Unit, Units, note_backward, unit_with, units_of
from hf_offload.surgery import EagerHook


class KeptTensor:
    """What autograd holds for a tensor that stays where it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int):
        self.tensor = tensor
        self.version = version

    def unpack(self) -> Tensor:
        """The tensor. Raises :class:`~hf_offload.errors.SavedTensorModifiedError` if it was changed in place."""
        tensor = self.tensor
        if tensor._version != self.version:
            raise modified(tensor._version, self.version, tensor.type(), tensor.size(), "kept in memory")
        return tensor


class SavedWeight:
    """What autograd holds for a weight, or a view of one. It holds the storage and none of its aliases, which would count as
    others that have its memory.
    """

    __slots__ = ("_counter", "_holder", "conj", "dtype", "neg", "offset", "size", "stride", "unit", "units", "version")

    def __init__(self, tensor: Tensor, parked: Parked, units: Units, unit: Unit):
        with torch._C.DisableTorchFunctionSubclass():
            self._holder = parked.uses.holder()
            self._counter = tensor.detach()  # shares the version
            self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self.version = tensor._version
            self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
            self.offset = tensor.storage_offset()
            self.conj, self.neg = tensor.is_conj(), tensor.is_neg()
        self.units, self.unit = units, unit

    @signals_deferred
    def unpack(self) -> Tensor:
        """What was saved, in memory.

        Raises :class:`~hf_offload.errors.SavedTensorModifiedError` if the weight was changed since, and
        :class:`~hf_offload.errors.StorageError` if it cannot be read.
        """
        if self._counter._version != self.version:
            raise modified(self._counter._version, self.version, str(self.dtype), self.size, "a weight")
        _in_use.hold(self.units, self.unit)
        storage = self._holder.storage
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conj:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.neg else tensor


def saved_weight(tensor: Tensor) -> SavedWeight | KeptTensor | None:
    """What to save instead of ``tensor``, if it is a weight that may leave memory, or a view of one."""
    parked = parked_of(tensor)
    if parked is None:
        return None
    for owner in parked.tensors:
        found = unit_with(owner)
        if found is not None and found[0].all_stay([found[1]]):
            with torch._C.DisableTorchFunctionSubclass():
                return KeptTensor(tensor.detach(), tensor._version)  # an alias, by which it stays until backward
        if found is not None:
            return SavedWeight(tensor, parked, *found)
    return None


class _InUse(threading.local):
    """The units that this thread's backward has asked for in its present operation: they stay until another asks."""

    def __init__(self) -> None:
        self._operation: tuple[int, int] | None = None
        self._units: list[Unit] = []

    def hold(self, units: Units, unit: Unit) -> None:
        """Let it be in memory, and stay. Signals are deferred."""
        node: Any = torch._C._current_autograd_node()
        task = torch._C._current_graph_task_id()
        operation = (task, -1 if node is None else node._sequence_nr())
        if operation != self._operation:
            _release(self._units)
            if task >= 0 and (self._operation is None or self._operation[0] != task):
                self._units = []
                callback = functools.partial(_release, self._units)
                torch.autograd.Variable._execution_engine.queue_callback(callback)
            self._operation = operation
        note_backward()
        units.need(unit)
        unit.pin_count += 1
        self._units.append(unit)


@signals_deferred
def _release(units: list[Unit]) -> None:
    """The operation is over, or all of backward."""
    while units:
        units.pop().pin_count -= 1


_in_use = _InUse()


def modified(found: int, expected: int, kind: str, size: torch.Size, unit: str) -> SavedTensorModifiedError:
    """Autograd's own check, which saved-tensor hooks switch off."""
    return SavedTensorModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(size)}] ({unit}) is at version {found}; expected version {expected} instead. "
        "Use the out-of-place form of the operation that changed it, or clone the tensor before changing it."
    )


# -- forwards without an engine, whose own hooks save weights in the same way ------------------------------------------


def pack(tensor: Tensor) -> Tensor | SavedWeight | KeptTensor:
    """Called when an operation saves ``tensor`` for backward."""
    saved = saved_weight(tensor)
    if saved is not None:
        return saved
    return KeptTensor(tensor if isinstance(tensor, nn.Parameter) else tensor.detach(), tensor._version)


def unpack(handle: SavedWeight | KeptTensor) -> Tensor:
    """Called when backward needs it."""
    return handle.unpack()


class _Forwards(threading.local):
    def __init__(self) -> None:
        self.entered: list[Any] = []


class _SavedWeightHooks:
    """Hooks around the forwards of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._thread = _Forwards()
        self._handles = [
            model.register_forward_pre_hook(EagerHook(self.enter)),
            model.register_forward_hook(EagerHook(self.leave), always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._unwind()

    def _unwind(self) -> None:
        """Leave forwards that Ctrl-C has ended, which calls no hook."""
        while self._thread.entered:
            self.leave()

    @signals_deferred
    def enter(self, module: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._unwind()
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            self._thread.entered.append(None)
            return
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            self._thread.entered.append(None)  # those of an engine save weights, too; checkpointing's must be innermost
            return
        units = units_of(module)
        if units.all_stay(units.units):  # what a graph has saved without hooks stays until its backward
            self._thread.entered.append(None)
            return
        hooks.__enter__()
        self._thread.entered.append(hooks)

    @signals_deferred
    def leave(self, *_: Any) -> None:
        if self._thread.entered:
            hooks = self._thread.entered.pop()
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if hooks is not None and top is not None and top[0] is pack:
                hooks.__exit__()


def hook_saved_weights(model: nn.Module) -> _SavedWeightHooks:
    """From now on, forwards of ``model`` save the weights that leave memory as :class:`SavedWeight`."""
    return _SavedWeightHooks(model)
