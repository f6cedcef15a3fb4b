"""Views of parameters whose memory comes and goes.

Note: what operations take
    A view that the user's code makes of a parameter holds the parameter's memory while it is alive, as in a run in memory.
    But what an operation saves of the view until backward does not: such views are of a class that PyTorch asks, too.

Note: what custom functions keep
    A function that does not call ``save_for_backward`` keeps tensors as attributes of its context, where autograd's hooks do
    not see them: bitsandbytes does so with quantised weights. A view that is kept there would hold its parameter's memory
    until backward. It becomes one of a class that PyTorch asks before any operation, and has its memory then.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.interrupts import signals_deferred
from hf_offload.parameters.changes import Call
from hf_offload.parameters.harmless import is_harmless
from hf_offload.parameters.holders import hull_of
from hf_offload.parameters.saved import SavedWeight, SharesMemory, whereabouts
from hf_offload.parameters.waiting import complete, in_memory, residence_of
from hf_offload.tensors import is_wrapped

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
        with views_in_memory((args, kwargs), Call(func, args, kwargs)):
            return func(*args, **kwargs)


class HoldingView(SharesMemory):
    """A view that has its parameter's memory, of which operations save the parameter's name."""

    @classmethod
    @torch._disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if is_harmless(func):
                return func(*args, **kwargs)
            parameters = parameters_of((args, kwargs))
            for parameter in parameters:
                complete(parameter)
            if func is Tensor.detach and _is_made_a_parameter():
                args[0].__class__ = Tensor  # which the parameter is compared with; it has the memory, and holds it
            if all(each is HoldingView for each in types):
                with in_memory(parameters, call=Call(func, args, kwargs)):
                    result = func(*args, **kwargs)
                    note_views(func, result, parameters)
                    return result
        with in_memory(parameters, call=Call(func, args, kwargs)), _as_plain(list(_found((args, kwargs), HoldingView))):
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        with _as_plain([self]):
            return repr(self)

    def __format__(self, format_spec: str) -> str:
        with _as_plain([self]):
            return format(self, format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _as_plain([self]):
            return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _as_plain([self]):
            return self.__reduce_ex__(protocol)


def _is_made_a_parameter() -> bool:
    """Whether ``nn.Parameter`` has called, perhaps through what keeps Dynamo out."""
    frame: Any = sys._getframe(2)
    for _ in range(4):
        if frame is None or frame.f_code is nn.Parameter.__new__.__code__:
            return frame is not None
        frame = frame.f_back
    return False


@contextlib.contextmanager
def _as_plain(views: list[Any]) -> Iterator[None]:
    with signals_deferred:
        for view in views:
            view.__class__ = Tensor
    try:
        yield
    finally:
        with signals_deferred:
            for view in views:
                view.__class__ = HoldingView


def parameters_of(values: Any) -> list[Any]:
    """The parameters, each once, of which views that have their memory are in ``values``."""
    with torch._C.DisableTorchFunctionSubclass():
        views = _found(values, HoldingView)
        return list({id(base): base for view in views if (base := view._base) is not None}.values())


def note_views(func: Any, result: Any, parameters: list[Any]) -> None:
    """Let what is a view of one of ``parameters`` in the ``result`` of ``func`` be known to operations that save it."""
    if func is torch.Tensor.detach or not torch.is_grad_enabled():
        return
    for tensor in _found(result, Tensor):
        if is_wrapped(tensor):
            continue
        base: Any = tensor._base
        if base is not None and any(base is each for each in parameters) and residence_of(base) is not None:
            tensor.__class__ = HoldingView


@contextlib.contextmanager
def views_in_memory(values: Any, call: Call | None = None) -> Iterator[None]:
    """Let the views that are in ``values`` be plain tensors with their memory inside the block, which is a ``call``, if that
    is known.
    """
    views = {id(view): view for view in _found(values, FollowingView)}
    if not views:
        yield
        return
    saved = [(view, vars(view)[_SAVED]) for view in views.values()]
    for _, weight in saved:
        complete(weight.parameter)
    with in_memory([weight.parameter for _, weight in saved], call=call):
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
                        _take_memory(view, weight)


def follow_views(result: Any) -> None:
    """Let views follow that the functions have kept which gave ``result``."""
    for output in _found(result, Tensor):
        node = output.grad_fn
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            for view in list(_found(vars(node), Tensor)):
                if view.grad_fn is None and not view.requires_grad:
                    weight = whereabouts.find(view)
                    if weight is not None and not weight.whole:
                        _take_memory(view, weight)


def follow_attributes(parameter: nn.Parameter, values: Any) -> None:
    """Let tensors in ``values`` that have the memory of ``parameter``, which is there, follow it from now on."""
    with torch._C.DisableTorchFunctionSubclass():
        residence = whereabouts.residence(parameter)
        for view in list(_found(values, Tensor)):
            if residence is not None and _lies_in(parameter, view):
                _take_memory(view, SavedWeight(parameter, residence, view))


def _lies_in(parameter: nn.Parameter, view: Tensor) -> bool:
    """Whether ``view`` has memory of ``parameter``, and not other memory that it was given."""
    if view.layout is not torch.strided:
        return False
    return bool(view.untyped_storage()._cdata == parameter.untyped_storage()._cdata)


def _take_memory(view: Tensor, weight: SavedWeight) -> None:
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
