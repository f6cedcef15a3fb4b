"""Views of parameters that a custom function of autograd keeps for its backward: they follow the parameter's memory.

Note: what custom functions keep
    A function that does not call ``save_for_backward`` keeps tensors as attributes of its context, where autograd's hooks do
    not see them: bitsandbytes does so with quantised weights. A view that is kept there would hold its parameter's memory
    until backward. It becomes one of a class that PyTorch asks before any operation, and has its memory then.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.interrupts import signals_deferred
from hf_offload.parameters.harmless import is_harmless
from hf_offload.parameters.holders import hull_of
from hf_offload.parameters.saved import SavedWeight, whereabouts
from hf_offload.parameters.waiting import complete, in_memory

_LEVELS = 3
_SAVED = "_hf_offload_view"


class FollowingView(Tensor):
    """A view whose memory is there while an operation uses it."""

    @classmethod
    @torch._disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_harmless(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with views_in_memory((args, kwargs)):
            return func(*args, **kwargs)


@contextlib.contextmanager
def views_in_memory(values: Any) -> Iterator[None]:
    """Let the views that are in ``values`` be plain tensors with their memory inside the block."""
    views = {id(view): view for view in _found(values, FollowingView)}
    if not views:
        yield
        return
    saved = [(view, vars(view)[_SAVED]) for view in views.values()]
    for _, weight in saved:
        complete(weight.parameter)
    with in_memory([weight.parameter for _, weight in saved]):
        try:
            with torch._C.DisableTorchFunctionSubclass():
                for view, weight in saved:
                    view.data = weight.data()
                    view.__class__ = Tensor
                    vars(view).pop(_SAVED, None)
            yield
        finally:
            with signals_deferred:
                for view, weight in saved:
                    if _lies_in(weight.parameter, view):
                        _follow(view, weight)


def follow_views(result: Any) -> None:
    """Let views follow that the functions have kept which gave ``result``."""
    for output in _found(result, Tensor):
        node = output.grad_fn
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            for view in list(_found(vars(node), Tensor)):
                if view.grad_fn is None and not view.requires_grad:
                    weight = whereabouts.find(view)
                    if weight is not None and not weight.whole:
                        _follow(view, weight)


def follow_attributes(parameter: nn.Parameter, values: Any) -> None:
    """Let tensors in ``values`` that have the memory of ``parameter``, which is there, follow it from now on."""
    with torch._C.DisableTorchFunctionSubclass():
        residence = whereabouts.residence(parameter)
        for view in list(_found(values, Tensor)):
            if residence is not None and _lies_in(parameter, view):
                _follow(view, SavedWeight(parameter, residence, view))


def _lies_in(parameter: nn.Parameter, view: Tensor) -> bool:
    """Whether ``view`` has memory of ``parameter``, and not other memory that it was given."""
    if view.layout is not torch.strided:
        return False
    return bool(view.untyped_storage()._cdata == parameter.untyped_storage()._cdata)


def _follow(view: Tensor, weight: SavedWeight) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        view.data = hull_of(view)
        vars(view)[_SAVED] = weight
        view.__class__ = FollowingView


def _found(values: Any, kind: type, levels: int = _LEVELS) -> Iterator[Any]:
    if type(values) is kind:
        yield values
    elif levels and isinstance(values, (list, tuple)):
        for value in values:
            yield from _found(value, kind, levels - 1)
    elif levels and isinstance(values, dict):
        for value in values.values():
            yield from _found(value, kind, levels - 1)
