"""Parameters whose memory, next value or gradient is elsewhere, and comes when it is used.

Note: another class
    Such a parameter is the same object as ever, of a subclass of its class whose ``__torch_function__`` PyTorch calls before
    any operation with it. The operation then finds the parameter as a run in memory would have it. What autograd saves of a
    parameter whose memory comes and goes is noted by :mod:`~hf_offload.parameters.hooks`, and comes when backward asks for
    it. What PyTorch does not see are views and NumPy arrays that share the parameter's memory and were made before: a
    parameter that has any waits for no update, and its memory stays.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from hf_offload.interrupts import signals_deferred
from hf_offload.parameters.backward import asking_in_backward
from hf_offload.parameters.casts import forget_cast
from hf_offload.parameters.changes import Call, changes_uncounted
from hf_offload.parameters.harmless import is_harmless
from hf_offload.parameters.holders import storage_holders
from hf_offload.parameters.saved import Residence
from hf_offload.parameters.views import HoldingView, note_views, parameters_of, views_in_memory
from hf_offload.parameters.waiting import DEMAND, RESIDENCE, Demand, complete, demand_of, in_memory, residence_of

_GRADIENT: Any = torch.Tensor.grad
_GET_GRADIENT = _GRADIENT.__get__
_WRITE_GRADIENT = {_GRADIENT.__set__, _GRADIENT.__delete__}
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SETTING = {torch.Tensor.copy_, _SET_DATA}
_MAKING = nn.Parameter.__new__.__code__
_SAVING = nn.Module._save_to_state_dict.__code__
_ADDRESSES = {torch.Tensor.data_ptr, vars(torch.Tensor)["__cuda_array_interface__"].__get__}
# They read every gradient only to drop it, or to make zeros of it.
_ZEROING = {inspect.unwrap(owner.zero_grad).__code__ for owner in (nn.Module, torch.optim.Optimizer)}
_ASKS_FOR_KINDS = "transformers.trainer"
"""It reads gradients before the step to know whether they are spread over processes."""


class DemandedParameter(nn.Parameter):
    """A parameter that is completed when it is used."""

    @classmethod
    @torch._disable_dynamo  # or it would become part of a graph
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if is_harmless(func):
                return func(*args, **kwargs)
            asked = list(dict.fromkeys(demanded_in((args, kwargs))))
            for each in asked:
                _answer(each, func, args)
            if func == _GET_GRADIENT or func in _WRITE_GRADIENT:
                return func(*args, **kwargs)
            if func in _SETTING and is_demanded(args[0]):
                _check_source(*args[:2])
            if func is torch.Tensor.detach and _caller().f_code is _SAVING:
                residence = residence_of(asked[0])
                if residence is not None and (copy := residence.saved()) is not None:
                    return copy
            parameters = [*asked, *parameters_of((args, kwargs))]
        others = any(
            each is not torch.Tensor and not issubclass(each, (DemandedParameter, HoldingView)) for each in types
        )
        if others or _has_functions_of_its_own(cls) or _is_traced():
            with as_plain(asked, changes_uncounted(func)), views_in_memory((args, kwargs)):
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.autograd.grad:  # whose weights need not be in memory
                with in_memory(list(demanded_in((args[2:], kwargs)))), asking_in_backward():
                    return func(*args, **kwargs)
            with (
                in_memory(parameters, changes_uncounted(func), Call(func, args, kwargs)),
                views_in_memory((args, kwargs)),
            ):
                if func in _ADDRESSES and (residence := residence_of(asked[0])) is not None:
                    residence.note_address()
                result = func(*args, **kwargs)
                note_views(func, result, parameters)
            if func is torch.Tensor.detach and _caller().f_code is _MAKING:
                result.__class__ = type(asked[0])  # with which it is compared
            return result

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        with as_plain([self]):
            return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with as_plain([self]):
            return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with as_plain([self]):
            return _without_notes(self.__reduce_ex__(protocol), self)


@functools.cache
def demanded_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class for parameters of class ``kind`` while they are demanded."""
    if kind is nn.Parameter:
        return DemandedParameter
    return type(kind.__name__, (DemandedParameter, kind), {"__module__": kind.__module__, "_hf_offload_class": kind})


def own_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    """The class that a parameter has when it waits for nothing."""
    kind = type(parameter)
    if not issubclass(kind, DemandedParameter):
        return kind
    return getattr(kind, "_hf_offload_class", nn.Parameter)


def _has_functions_of_its_own(kind: type) -> bool:
    """Whether the class below is asked by PyTorch, too."""
    below: Any = getattr(kind, "_hf_offload_class", nn.Parameter)
    return below.__torch_function__ is not nn.Parameter.__torch_function__


def _is_traced() -> bool:
    """Whether a tracer looks at the operation, such as that of ``make_fx``: it takes plain parameters alone."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_demanded(value: Any) -> bool:
    """Whether ``value`` is a parameter that is completed when it is used."""
    return issubclass(type(value), DemandedParameter)  # isinstance() of a Parameter runs in Python


def demanded(parameter: nn.Parameter, demand: Demand | None) -> None:
    """Let ``demand`` know of all that is done with ``parameter`` from now on; None ends that."""
    _note(parameter, DEMAND, demand)


def housed(parameter: nn.Parameter, residence: Residence | None) -> None:
    """Let ``residence`` bring the memory of ``parameter`` for all that is done with it from now on; None ends that."""
    _note(parameter, RESIDENCE, residence)


def _note(parameter: nn.Parameter, name: str, value: Any) -> None:
    if value is None:
        vars(parameter).pop(name, None)
    else:
        vars(parameter)[name] = value
    kind = own_class(parameter)
    waits = DEMAND in vars(parameter) or RESIDENCE in vars(parameter)
    if not waits:
        forget_cast(parameter)
    wanted = demanded_class(kind) if waits else kind
    if type(parameter) is not wanted:
        parameter.__class__ = wanted


@contextlib.contextmanager
def as_plain(parameters: Sequence[nn.Parameter], changed: bool = False) -> Iterator[None]:
    """Complete ``parameters``, and let them be plain ones inside the block, in memory. It may have ``changed`` them in a way
    that does not show.
    """
    for parameter in parameters:
        complete(parameter)
    with in_memory(parameters, changed):
        # A gradient may still be elsewhere.
        demands = [(each, demand_of(each), residence_of(each)) for each in parameters]
        try:
            with signals_deferred:
                for parameter in parameters:
                    demanded(parameter, None)
                    housed(parameter, None)
            yield
        finally:
            try:
                _demand_again(demands)
            except BaseException:  # a signal came before it began
                _demand_again(demands)
                raise


def _demand_again(demands: list[tuple[nn.Parameter, Demand | None, Residence | None]]) -> None:
    with signals_deferred:
        for parameter, demand, residence in demands:
            housed(parameter, residence)
            demanded(parameter, demand)


def held_elsewhere(parameter: nn.Parameter) -> bool:
    """Whether others may read the parameter's memory without asking: views of it, NumPy arrays, other processes."""
    residence = residence_of(parameter)
    if residence is not None:
        return residence.is_held
    return storage_holders(parameter) > 1 or (parameter.device.type == "cpu" and parameter.is_shared())


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that is in memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def has_gradient(parameter: nn.Parameter) -> bool:
    """Whether there is a gradient, wherever it is: where it is elsewhere, ``parameter.grad`` would bring it to memory."""
    demand = demand_of(parameter)
    return gradient_of(parameter) is not None or (demand is not None and demand.has_gradient)


def set_gradient(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Set the gradient that is in memory."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = gradient


def ask_in_transforms() -> None:
    """Ask before ``torch.func`` wraps a parameter: it does so without PyTorch's calling anyone. Idempotent."""
    from torch._functorch import eager_transforms, vmap

    transforms = (eager_transforms, "_wrap_tensor_for_grad"), (eager_transforms, "_wrap_functional_tensor")
    for module, name in (*transforms, (vmap, "_add_batch_dim")):
        wrap = getattr(module, name)
        if not hasattr(wrap, "__wrapped__"):
            setattr(module, name, _asking(wrap))


def _asking(wrap: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wrap)
    def asking(value: Any, *args: Any, **kwargs: Any) -> Any:
        if is_demanded(value):
            complete(value)
            if (residence := residence_of(value)) is not None:
                with in_memory([value]):
                    residence.note_address()
        return wrap(value, *args, **kwargs)

    return asking


def _answer(parameter: nn.Parameter, func: Any, args: Any) -> None:
    demand = demand_of(parameter)
    if demand is None:
        if residence_of(parameter) is None:  # a new one, made of another
            parameter.__class__ = own_class(parameter)
        return
    caller = _caller()
    if func == _GET_GRADIENT:
        if caller.f_code in _ZEROING:
            demand.replace_gradient(zeros=not caller.f_locals.get("set_to_none", True))
        else:
            if caller.f_globals.get("__name__") != _ASKS_FOR_KINDS:
                demand.check_gradient()
            demand.reveal_gradient()
    elif func in _WRITE_GRADIENT:
        demand.replace_gradient(zeros=False)
    elif func is torch.Tensor.copy_ and args[0] is parameter and all(each is not parameter for each in args[1:]):
        demand.overwrite()
    else:
        demand.finish()
        if func in (_SET_DATA, torch.Tensor.data.__set__) or caller.f_code is _MAKING:  # type: ignore[attr-defined]
            demand.reveal_gradient()  # which might not fit any more, or keep the class


def _check_source(parameter: nn.Parameter, *source: Any) -> None:
    """``parameter`` is about to be set to ``source``."""
    residence = residence_of(parameter)
    if residence is not None and source and isinstance(source[0], torch.Tensor):
        residence.check_source(source[0])


def _without_notes(reduced: Any, parameter: nn.Parameter) -> Any:
    """What pickling takes of ``parameter``, with its attributes as they are now: not those that come back afterwards."""
    if reduced is vars(parameter):
        return dict(reduced)
    return tuple(_without_notes(each, parameter) for each in reduced) if type(reduced) is tuple else reduced


def _caller() -> FrameType:
    """The frame that uses a parameter: the first one that is neither here nor in what keeps Dynamo out."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") in (__name__, "torch._compile", "torch._dynamo.eval_frame"):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame


def demanded_in(values: Any) -> Iterable[DemandedParameter]:
    """The demanded parameters among arguments, also those in lists and tuples."""
    if is_demanded(values):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from demanded_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from demanded_in(value)
