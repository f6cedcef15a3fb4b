"""Tensors that must not be read as they are: whoever reads one settles first what it owes.

A guarded tensor is the same object, of a subclass of its class, until nothing is owed any more. It owes an update that was
put off, factors of clipping, or, on an accelerator, its memory.
"""

import copy
import functools
import sys
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_DEBTS = "_hf_offload_debts"  # an attribute of the tensor: copies and pickles settle first, and have none

_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "itemsize",
    "nbytes",
    "is_cpu",
    "is_cuda",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "is_mkldnn",
    "retains_grad",
    "grad",
    "_version",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
_METHODS = (
    "__hash__",
    "__len__",
    "size",
    "stride",
    "numel",
    "nelement",
    "dim",
    "ndimension",
    "element_size",
    "get_device",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "is_signed",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
)
_HARMLESS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
        *(vars(torch._C.TensorBase)[name].__set__ for name in ("requires_grad", "grad")),
        *(getattr(Tensor, name) for name in _METHODS),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    ]
)
"""What neither reads nor writes values."""
_UNSEEN = frozenset(
    [
        Tensor.data.__get__,  # type: ignore[attr-defined]
        Tensor.data_ptr,
        Tensor.untyped_storage,
        Tensor.storage,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__dlpack__,
    ]
)
"""What gives others the memory, so that writes may come that no version counts."""
_ADDRESSES = frozenset([Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage])
"""After these, nothing tells how long the memory is used: it stays until the next gradient or step."""


_SAVING = nn.Module._save_to_state_dict.__code__
_CALLER = 4
"""Frames between an operation and whoever calls it, at most."""


class Debt(Protocol):
    """What a tensor owes."""

    def settle(self, unseen: bool) -> None:
        """See to it, and :func:`lift` the guard. ``unseen``, the tensor may be written to without a new version."""

    def done(self) -> None:
        """The operation is over that it was settled for, and nobody has the tensor's address."""


class Guarded:
    """In front of a tensor's class."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        owing: list[Any] = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Guarded)]
        if func is Tensor.detach and _is_saving() and (host := _host_copy(owing)) is not None:
            return host
        unseen = func in _UNSEEN
        visited = [] if func in _ADDRESSES else [debt for tensor in owing for debt in debts_of(tensor)]
        with pinned(owing):
            try:
                settle(owing, unseen)
                return func(*args, **kwargs)
            finally:
                for debt in visited:
                    debt.done()

    def __deepcopy__(self, memo: Any) -> Any:
        settle([self])
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        settle([self])
        return self.__reduce_ex__(protocol)


def _is_saving() -> bool:
    """Whether a module's ``state_dict`` asks."""
    frame = sys._getframe(1)
    for _ in range(_CALLER):
        if frame.f_code is _SAVING:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def _host_copy(owing: list[Any]) -> Tensor | None:
    """What a state dict has of an away tensor, so that they do not all come at once; None for the tensor itself."""
    for debt in debts_of(owing[0]):
        if not hasattr(debt, "host_copy"):
            debt.settle(unseen=False)
    copies = (debt.host_copy(owing[0]) for debt in debts_of(owing[0]) if hasattr(debt, "host_copy"))
    return next(copies, None)


@functools.cache
def _guarded(kind: type) -> type:
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind)(kind.__name__, (Guarded, kind), named)


def put(tensor: Tensor, debt: Debt) -> None:
    """Guard ``tensor``, which owes this, too, from now on."""
    debts = vars(tensor).setdefault(_DEBTS, [])
    if debt not in debts:
        debts.append(debt)
    if not isinstance(tensor, Guarded):
        tensor.__class__ = _guarded(type(tensor))


def lift(tensor: Tensor, debt: Debt) -> None:
    """It owes this no more."""
    debts = vars(tensor).get(_DEBTS, [])
    if debt in debts:
        debts.remove(debt)
    if not debts and isinstance(tensor, Guarded):
        del vars(tensor)[_DEBTS]
        tensor.__class__ = own_class(tensor)


def own_class(tensor: Any) -> type:
    """The class of a tensor without its guard."""
    return type(tensor).__mro__[2] if isinstance(tensor, Guarded) else type(tensor)


def settle(tensors: Any, unseen: bool = False) -> None:
    """Let none of ``tensors`` owe anything."""
    for tensor in tensors:
        for debt in list(vars(tensor).get(_DEBTS, ())):
            debt.settle(unseen)


def debts_of(tensor: Tensor) -> list[Any]:
    """What it owes."""
    return list(vars(tensor).get(_DEBTS, ()))


def pinned(tensors: list[Any]) -> Any:
    """A block in which those of ``tensors`` stay in memory that are there, or come."""
    from hf_offload.state.units import pinned as pinned_units

    return pinned_units(tensors)
