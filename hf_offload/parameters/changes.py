"""Which functions of PyTorch change the tensors that they are called with."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

# They change tensors without counting it as a version.
_UNCOUNTED = {getattr(torch, name) for name in dir(torch) if name.startswith("_fused_") and name.endswith("_")}
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
