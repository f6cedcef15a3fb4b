"""Which functions of PyTorch change the tensors that they are called with."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

# They change tensors without counting it as a version; those of lists do so while a dispatch mode is active.
_UNCOUNTED = {
    getattr(torch, name) for name in dir(torch) if name.startswith(("_fused_", "_foreach_")) and name.endswith("_")
}
# With one of these arguments, they change others.
_CHANGING = ("out", "inplace", "max_norm")
_READING = {"__index__", "__int__", "__invert__"}


class Call(NamedTuple):
    """A function with its arguments, as PyTorch gives them to a class of tensors."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def changes_uncounted(func: Any) -> bool:
    """Whether ``func`` may change its arguments without a change of their versions, as fused optimizers do. Operators that
    were defined elsewhere do so, too, unless their authors have thought of it.
    """
    return func in _UNCOUNTED or _is_mutable(func)


def count_changes_of_lists(func: Any, args: Sequence[Any]) -> None:
    """Count versions for what ``func``, such as ``torch._foreach_mul_``, has done to lists of tensors in a dispatch mode.

    PyTorch counts them outside of such modes alone.
    """
    for place in _changed_lists(func):
        for tensor in args[place]:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


@functools.cache
def _changed_lists(func: Any) -> tuple[int, ...]:
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.name.startswith("aten::_foreach_"):
        return ()
    written = (argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)
    return tuple(place for place, is_written in enumerate(written) if is_written)


def changes_arguments(call: Call) -> bool:
    """Whether ``call`` may change its arguments, as far as its names tell. Functions of others may."""
    func, name = call.func, getattr(call.func, "__name__", "")
    if isinstance(func, (torch._ops.OpOverloadPacket, torch._ops.OpOverload)):
        return _is_mutable(func)
    if not (getattr(func, "__module__", None) or "torch").startswith("torch"):
        return True
    if name.startswith("__"):
        return name in ("__set__", "__setitem__") or (name.startswith("__i") and name not in _READING)
    given = (call.kwargs.get(each) for each in _CHANGING)
    return name.endswith("_") or any(value is not None and value is not False for value in given)


def _is_mutable(func: Any) -> bool:
    if isinstance(func, torch._ops.OpOverloadPacket):
        return any(schema.is_mutable for schema in func._schemas.values())
    return isinstance(func, torch._ops.OpOverload) and bool(func._schema.is_mutable)
