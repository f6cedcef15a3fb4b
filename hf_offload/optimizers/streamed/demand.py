"""Parameters whose next value or gradient is not in memory yet, and comes there when it is used.

Note: a class for a while
    Such a parameter is the same object as ever, of a subclass of ``nn.Parameter`` whose ``__torch_function__`` PyTorch calls
    before any operation with it. The operation then finds the parameter as a run in memory would have it. Backward, which
    takes tensors from the graph without asking, follows a forward that has asked. What PyTorch does not see are views and
    NumPy arrays that share the parameter's memory and were made before.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn


class Demand(Protocol):
    """What a demanded parameter is waiting for."""

    def finish(self) -> None:
        """The parameter is about to be used: its update has to come first."""

    def overwrite(self) -> None:
        """The parameter is about to get another value, whatever it was."""

    def reveal_gradient(self) -> None:
        """``.grad`` is about to be read: put it there."""

    def replace_gradient(self, zeros: bool) -> None:
        """``.grad`` is about to be written, or set to zeros, and what it was does not matter."""


# The demand belongs to the parameter, so that the garbage collector finds both: what it refers to may refer to the parameter.
_DEMAND = "_hf_offload_demand"

_GRADIENT: Any = torch.Tensor.grad
_GET_GRADIENT = _GRADIENT.__get__
_WRITE_GRADIENT = {_GRADIENT.__set__, _GRADIENT.__delete__}
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_MAKING = nn.Parameter.__new__.__code__
# They read every gradient only to drop it, or to make zeros of it.
_ZEROING = {nn.Module.zero_grad.__code__}

_PROPERTIES = [
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
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
]
_METHODS = [
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
]


def _harmless() -> Iterator[Any]:
    """Functions that neither read nor write values."""
    for name in _PROPERTIES:
        if hasattr(torch.Tensor, name):
            yield getattr(torch.Tensor, name).__get__
    yield vars(torch._C.TensorBase)["requires_grad"].__set__
    for name in _METHODS:
        yield getattr(torch.Tensor, name)
    yield from (torch.is_floating_point, torch.is_complex, torch.numel)


_HARMLESS = frozenset(_harmless())


class DemandedParameter(nn.Parameter):
    """A parameter that is completed when it is used."""

    @classmethod
    @torch._disable_dynamo  # or it would become part of a graph
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _HARMLESS:
                for each in _demanded((args, kwargs or {})):
                    _answer(each, func, args)
            result = func(*args, **(kwargs or {}))
            if func is torch.Tensor.detach and _caller().f_code is _MAKING:
                result.__class__ = nn.Parameter  # which it compares with the class that it was given
            return result

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        demand = plain(self)
        try:
            return repr(self)
        finally:
            demanded(self, demand)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        demand = plain(self)
        try:
            return self.__deepcopy__(memo)
        finally:
            demanded(self, demand)

    def __reduce_ex__(self, protocol: Any) -> Any:
        demand = plain(self)
        try:
            return self.__reduce_ex__(protocol)
        finally:
            demanded(self, demand)


def demanded(parameter: nn.Parameter, demand: Demand | None) -> None:
    """Let ``demand`` know of all that is done with ``parameter`` from now on; None ends that."""
    if demand is None:
        parameter.__class__ = nn.Parameter
        vars(parameter).pop(_DEMAND, None)
    else:
        vars(parameter)[_DEMAND] = demand
        parameter.__class__ = DemandedParameter


def demand_of(parameter: nn.Parameter) -> Demand | None:
    """What the parameter is waiting for."""
    return vars(parameter).get(_DEMAND)


def plain(parameter: nn.Parameter) -> Demand | None:
    """Complete ``parameter`` and make it a plain one, until the demand that is returned is put back."""
    demand = demand_of(parameter)
    if demand is not None:
        demand.finish()
    demand = demand_of(parameter)  # whose gradient is still elsewhere
    demanded(parameter, None)
    return demand


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that is in memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def set_gradient(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Set the gradient that is in memory."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = gradient


def ask_in_transforms() -> None:
    """Ask before ``torch.func`` wraps a parameter: it does so without PyTorch's calling anyone. Idempotent."""
    from torch._functorch import eager_transforms, vmap

    for module, name in ((eager_transforms, "_wrap_tensor_for_grad"), (vmap, "_add_batch_dim")):
        wrap = getattr(module, name)
        if not hasattr(wrap, "__wrapped__"):
            setattr(module, name, _asking(wrap))


def _asking(wrap: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wrap)
    def asking(value: Any, *args: Any, **kwargs: Any) -> Any:
        if type(value) is DemandedParameter and (demand := demand_of(value)) is not None:
            demand.finish()
        return wrap(value, *args, **kwargs)

    return asking


def _answer(parameter: nn.Parameter, func: Any, args: Any) -> None:
    demand = demand_of(parameter)
    if demand is None:
        return
    caller = _caller()
    if func == _GET_GRADIENT:
        if caller.f_code in _ZEROING:
            demand.replace_gradient(zeros=not caller.f_locals.get("set_to_none", True))
        else:
            demand.reveal_gradient()
    elif func in _WRITE_GRADIENT:
        demand.replace_gradient(zeros=False)
    elif func is torch.Tensor.copy_ and args[0] is parameter and all(each is not parameter for each in args[1:]):
        demand.overwrite()
    else:
        demand.finish()
        if func == _SET_DATA or caller.f_code is _MAKING:
            demand.reveal_gradient()  # which might not fit any more, or keep the class


def _caller() -> FrameType:
    """The frame that uses a parameter: the first one that is neither here nor in what keeps Dynamo out."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") in (__name__, "torch._compile", "torch._dynamo.eval_frame"):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame


def _demanded(values: Any) -> Iterable[DemandedParameter]:
    """The demanded parameters among arguments, also those in lists and tuples."""
    if type(values) is DemandedParameter:
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _demanded(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _demanded(value)
