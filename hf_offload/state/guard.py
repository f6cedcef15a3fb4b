"""Tensors that must not be read as they are: an operation on one settles first what it owes.

A guarded tensor is the same object, of a subclass of its class, until nothing is owed any more. It owes an update that was
put off, factors of clipping, or, on an accelerator, its memory.
"""

import contextlib
import copy
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_offload.interrupts import signals_deferred

_SAVING = nn.Module._save_to_state_dict.__code__
_DEBTS = "_hf_offload_debts"  # an attribute of the tensor: copies and pickles settle first, and have none

_FRAMES = 4
"""Between a module that asks for a tensor and the guard: those of decorators."""

_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "layout",
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
"""What neither reads nor writes values. Not ``dim``: ``torch.func.vmap`` asks for it before it wraps a tensor, unasked."""
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


def _itself(tensor: Tensor) -> Tensor:
    return tensor


keep_in_memory: Callable[[list[Any]], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
"""A block in which tensors are in memory, and stay: units know how."""
as_saved: Callable[[Tensor], Tensor] = _itself
"""What a state dict has of a tensor: :mod:`~hf_offload.state.state_dict_copies` knows."""


class Debt:
    """What a tensor owes.

    Attributes:
        is_memory: It owes its bytes. An update comes before that: parts of it may be on their way to the tier.
    """

    is_memory = False

    def settle(self, unseen: bool) -> None:
        """See to it, and :func:`lift` the guard. ``unseen``, the tensor may be written to without a new version."""
        raise NotImplementedError

    def done(self) -> None:
        """The operation that it was settled for has ended, and did not hand out the tensor's address."""


class Guarded:
    """In front of a tensor's class."""

    @classmethod
    @torch._disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        owing: list[Any] = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Guarded)]
        if func is Tensor.detach and _is_saving() and (saved := as_saved(args[0])) is not args[0]:
            return saved
        unseen = func in _UNSEEN
        visited = [] if func in _ADDRESSES else [debt for tensor in owing for debt in debts_of(tensor)]
        with keep_in_memory([tensor for tensor in owing if not tensor.is_cpu]):  # on a CPU, what is away can be read
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


def is_guarded(tensor: Tensor) -> bool:
    """Whether it owes anything."""
    return isinstance(tensor, Guarded)


def own_class(tensor: Any) -> type:
    """The class of a tensor without its guard."""
    return type(tensor).__mro__[2] if isinstance(tensor, Guarded) else type(tensor)


@signals_deferred
def settle(tensors: Any, unseen: bool = False) -> None:
    """Let none of ``tensors`` owe anything."""
    for tensor in tensors:
        for debt in sorted(debts_of(tensor), key=lambda debt: debt.is_memory):
            debt.settle(unseen)
            lift(tensor, debt)  # also of a tensor that the debtor does not know any more


def debts_of(tensor: Tensor) -> list[Any]:
    """What it owes."""
    return list(vars(tensor).get(_DEBTS, ()))


def _is_saving() -> bool:
    """Whether a module puts a tensor into its state dict."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None or frame.f_code is _SAVING:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is _SAVING
