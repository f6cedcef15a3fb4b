"""What autograd saves of a parameter whose memory comes and goes: which one it is, and how to look at it."""

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hf_offload.errors import SavedTensorModifiedError
from hf_offload.interrupts import signals_deferred
from hf_offload.parameters.derivation import Derivation
from hf_offload.tensors import is_wrapped

if TYPE_CHECKING:
    from hf_offload.storage.kept import KeptRange


class Former:
    """The memory that a parameter has, as views in graphs need it: ``kept`` from when the parameter is given other memory."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: Tensor | None = None


class Residence(Protocol):
    """Where the memory of a parameter comes from, and goes to between uses."""

    former: Former

    @property
    def derivation(self) -> Derivation | None:
        """What makes the value to use, if another one is kept."""

    def derive(self, derivation: Derivation) -> None:
        """From now on, let ``derivation`` make the value to use. It begins with the present one."""

    def enter(self) -> None:
        """Let the parameter be in memory until :meth:`leave`. Calls may be nested."""

    def leave(self, changed: bool = False) -> None:
        """The parameter was used, and ``changed`` perhaps in a way that does not show."""

    def note_address(self) -> None:
        """The address of the parameter's memory is about to be known."""

    def count_change(self) -> None:
        """Let the version of the parameter be another one: its value to use will be."""

    @property
    def is_mostly_away(self) -> bool:
        """Whether no more than half of the weights of its model may be in memory at a time."""

    @property
    def is_held(self) -> bool:
        """Whether others may read the parameter's memory without asking."""

    @property
    def may_be_seen(self) -> bool:
        """Whether the parameter's memory may be read without asking, also by those that have let it come."""

    def let_go(self) -> None:
        """From now on, the parameter is a plain one in memory, and nothing here refers to it."""

    def saved(self) -> Tensor | None:
        """What a state dict is to hold instead of the parameter's memory; None for that."""

    def check_source(self, source: Tensor) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` if the parameter is not to be set to ``source``: what a state dict
        holds of it, and would be its present value in memory.
        """

    def keep(self) -> "KeptRange | None":
        """The bytes of the parameter's value, held where they are on a drive, after what is not there yet was written; None
        where there is no drive, or their order is not that of the elements.

        Raises :class:`~hf_offload.errors.TierFullError` where the drive has no room.
        """


class SharesMemory(Tensor):
    """A tensor that is known to share a parameter's memory."""


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
    """What autograd holds for a parameter, or a view of one, whose memory comes and goes.

    It holds the parameter, which as a leaf holds no graph. Without a ``version``, changes of the parameter are no error.
    """

    __slots__ = (
        "conj",
        "dtype",
        "former",
        "neg",
        "offset",
        "parameter",
        "residence",
        "size",
        "stride",
        "version",
        "whole",
    )

    def __init__(self, parameter: nn.Parameter, residence: Residence, tensor: Tensor):
        self.parameter = parameter
        self.residence = residence
        self.former = residence.former
        self.whole = tensor is parameter
        self.version: int | None = tensor._version
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset() * tensor.element_size() - (
            parameter.storage_offset() * parameter.element_size()
        )
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()

    def unpack(self) -> Tensor:
        """What was saved, in memory.

        Raises :class:`~hf_offload.errors.SavedTensorModifiedError` if the parameter was changed since, and
        :class:`~hf_offload.errors.StorageError` if it cannot be read.
        """
        parameter = self.parameter
        with signals_deferred, torch._C.DisableTorchFunctionSubclass():
            version = parameter._version
            if self.version is not None and version != self.version:
                raise modified(version, self.version, str(self.dtype), self.size, "a weight")
            self.residence.enter()
            try:
                if not self.whole:
                    return self._view(parameter)
                if torch.is_grad_enabled() and not parameter.requires_grad:
                    return parameter.detach()  # the graph of this backward would save the parameter itself
                _in_use.hold(self.residence)
                return parameter
            finally:
                self.residence.leave()

    def data(self) -> Tensor:
        """The memory of the view in that of the parameter, which is in memory, or in its former one."""
        parameter = self.parameter if self.former.kept is None else self.former.kept
        offset = parameter.storage_offset() * parameter.element_size() + self.offset
        data = torch.empty(0, dtype=self.dtype, device=parameter.device)
        return data.set_(parameter.untyped_storage(), offset // data.element_size(), self.size, self.stride)

    def _view(self, parameter: nn.Parameter) -> Tensor:
        tensor = parameter.detach()  # shares the version counter
        tensor.data = self.data()
        if self.conj:
            tensor = torch._conj(tensor)
        if self.neg:
            tensor = torch._neg_view(tensor)
        return tensor


class _InUse(threading.local):
    """The parameters that this thread's backward has asked for in its present operation: they stay until another asks."""

    def __init__(self) -> None:
        self._operation: tuple[int, int] | None = None
        self._residences: list[weakref.ref[Residence]] = []

    def hold(self, residence: Residence) -> None:
        """Let it stay, unless its model goes. Signals are deferred."""
        node: Any = torch._C._current_autograd_node()
        task = torch._C._current_graph_task_id()
        operation = (task, -1 if node is None else node._sequence_nr())
        if operation != self._operation:
            _release(self._residences)
            if task >= 0 and (self._operation is None or self._operation[0] != task):
                self._residences = []
                callback = functools.partial(_release, self._residences)
                torch.autograd.Variable._execution_engine.queue_callback(callback)
            self._operation = operation
        residence.enter()
        self._residences.append(weakref.ref(residence))


def _release(residences: list[weakref.ref[Residence]]) -> None:
    """The operation is over, or all of backward."""
    while residences:
        residence = residences.pop()()
        if residence is not None:
            residence.leave()


_in_use = _InUse()


class Whereabouts:
    """Which memory belongs to which parameter, of those whose memory comes and goes and is there now."""

    def __init__(self) -> None:
        self._parameters: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[Residence]]] = {}

    def __len__(self) -> int:
        return len(self._parameters)

    def put(self, parameter: nn.Parameter, residence: Residence) -> int:
        """The parameter is in memory, whose number is returned. It keeps its residence alive, which this does not."""
        number = int(parameter.untyped_storage()._cdata)
        # pop(number, reference) runs no Python, in which Ctrl-C would be lost. A replaced entry took its reference with it.
        gone: Any = functools.partial(self._parameters.pop, number)
        self._parameters[number] = weakref.ref(parameter, gone), weakref.ref(residence)
        return number

    @property
    def is_in_use(self) -> bool:
        """Whether there are any."""
        return bool(self._parameters)

    def remove(self, number: int, residence: Residence) -> None:
        """The memory of this number is no longer that of the parameter of ``residence``."""
        found = self._parameters.get(number)
        if found is not None and found[1]() is residence:  # else it was freed, and is another one's by now
            del self._parameters[number]

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether this is the memory of such a parameter."""
        return int(storage._cdata) in self._parameters

    def find(self, tensor: Tensor) -> SavedWeight | None:
        """What to save instead of ``tensor``, if it is such a parameter or a view of one, and counts its changes."""
        if not self._parameters or tensor.layout is not torch.strided or has_no_memory(tensor):
            return None
        number = int(tensor.untyped_storage()._cdata)
        found = self._parameters.get(number)
        if found is None:
            return None
        parameter, residence, base = found[0](), found[1](), tensor._base
        if parameter is None or residence is None or parameter is not (tensor if base is None else base):
            return None
        if parameter.untyped_storage()._cdata != number:
            return None
        return SavedWeight(parameter, residence, tensor)

    def residence(self, parameter: nn.Parameter) -> Residence | None:
        """That of a parameter that is in memory now."""
        found = self._parameters.get(int(parameter.untyped_storage()._cdata))
        return found[1]() if found is not None and found[0]() is parameter else None


whereabouts = Whereabouts()
"""Of the process: operations do not know whose parameters they use."""


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a wrapper of others, or has no bytes."""
    return (
        tensor.is_meta
        or is_wrapped(tensor)
        or not (type(tensor) is Tensor or issubclass(type(tensor), nn.Parameter) or isinstance(tensor, SharesMemory))
    )


def modified(found: int, expected: int, kind: str, size: torch.Size, unit: str) -> SavedTensorModifiedError:
    """Autograd's own check, which saved-tensor hooks switch off."""
    return SavedTensorModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(size)}] ({unit}) is at version {found}; expected version {expected} instead. "
        "Use the out-of-place form of the operation that changed it, or clone the tensor before changing it."
    )
