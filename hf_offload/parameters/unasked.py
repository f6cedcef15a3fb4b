"""Functions of PyTorch that take tensors without asking their class: they find parameters in memory, too.

This replaces ``torch.autograd.Function.apply``, constructors and a few methods, once and for good. They do nothing for
tensors that are no such parameters. PyTorch tells some by identity in a few places, which know both functions afterwards.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from hf_offload.parameters.backward import ask_in_backward, keep_inputs_of_checkpoints
from hf_offload.parameters.demand import as_plain, demanded_in, is_demanded
from hf_offload.parameters.recompute import resolve_in_checkpoints
from hf_offload.parameters.saved import whereabouts
from hf_offload.parameters.views import FollowingView, follow_views, parameters_of, views_in_memory
from hf_offload.parameters.waiting import complete, in_memory, other_memory, residence_of


def ask_everywhere() -> None:
    """Ask before a custom function of autograd, or a constructor, takes a parameter. Idempotent."""
    if not hasattr(torch.autograd.Function.apply, "_hf_offload_asks"):
        _ask_in_apply()
        ask_in_backward(_used)
        keep_inputs_of_checkpoints(is_demanded, complete)
        resolve_in_checkpoints()
        _ask_in_constructors()
        _ask_in_methods()
        _ask_in_tensors()
        _ask_in_swaps()


def _ask_in_apply() -> None:
    own = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    @functools.wraps(own)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        asked = [each for each in values if is_demanded(each)]
        if not asked and not whereabouts.is_in_use and not any(type(each) is FollowingView for each in values):
            return own(cls, *args, **kwargs)
        for each in asked:
            complete(each)
        with in_memory([*asked, *parameters_of(values)]), views_in_memory(values):
            result = own(cls, *args, **kwargs)
            follow_views(result)
            return result

    apply._hf_offload_asks = True  # type: ignore[attr-defined]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]


def _ask_in_constructors() -> None:
    torch.utils._device._device_constructors()  # a default device is for PyTorch's own, which these call
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    for name in ("tensor", "as_tensor", "asarray", "sparse_coo_tensor"):
        own = getattr(torch, name)
        asking = _asking(own)
        torch.jit._builtins._register_builtin(asking, f"aten::{name}")
        setattr(torch, name, asking)


def _ask_in_methods() -> None:
    import torch._dynamo.polyfills.loader  # which compares the signatures of PyTorch's own

    for name in ("set_", "new", "new_tensor", "as_subclass"):
        setattr(torch.Tensor, name, _asking(getattr(torch.Tensor, name)))
    torch.Tensor._make_subclass = staticmethod(_asking(torch.Tensor._make_subclass))  # type: ignore[method-assign]
    torch.nested.nested_tensor = _asking(torch.nested.nested_tensor)
    capsule = torch.to_dlpack

    @functools.wraps(capsule)
    def to_dlpack(tensor: torch.Tensor) -> Any:
        return capsule(tensor.detach() if is_demanded(tensor) else tensor)  # which is known to hold the memory

    for module in (torch, torch.utils.dlpack):
        setattr(module, "to_dlpack", to_dlpack)  # noqa: B010


def _ask_in_tensors() -> None:
    """``torch.Tensor(weight)``, and ``tensor.data = weight``, which shares the memory: it stays."""
    own = torch.Tensor.__new__

    @functools.wraps(own)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not args or not is_demanded(args[0]):
            return own(cls, *args, **kwargs)
        with as_plain(args[:1]):
            return own(cls, *args, **kwargs)

    torch.Tensor.__new__ = new  # type: ignore[assignment]
    data: Any = torch._C.TensorBase.data

    def take(tensor: Any, value: Any) -> None:
        given = is_demanded(tensor) and torch._C._is_torch_function_enabled()  # else its own memory goes, or comes
        with (
            other_memory(tensor) if given else contextlib.nullcontext(),
            as_plain([value] if is_demanded(value) and value is not tensor else []),
        ):
            data.__set__(tensor, value)

    torch.Tensor.data = property(data.__get__, take)  # type: ignore[assignment]


def _ask_in_swaps() -> None:
    """``swap_tensors`` takes no tensor that has weak references: parameters lose theirs, and stay in memory."""
    own = torch.utils.swap_tensors

    @functools.wraps(own)
    def swap(t1: Any, t2: Any) -> None:
        for each in (t1, t2):
            residence = residence_of(each) if is_demanded(each) else None
            if residence is not None:
                complete(each)
                residence.let_go()
        own(t1, t2)

    torch.utils.swap_tensors = swap


@contextlib.contextmanager
def _used(values: Any) -> Iterator[None]:
    """Let the parameters in ``values`` be in memory inside the block."""
    asked = list(dict.fromkeys(demanded_in(values)))
    for each in asked:
        complete(each)
    with in_memory(asked):
        yield


def _asking(own: Any) -> Any:
    @functools.wraps(own)
    def asking(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        if values and isinstance(values[0], (list, tuple)) and values[0] and isinstance(values[0][0], torch.Tensor):
            values += values[0]
        asked: list[Any] = [each for each in values if is_demanded(each)]
        if not asked and not any(type(each) is FollowingView for each in values):
            return own(*args, **kwargs)
        with as_plain(asked), views_in_memory((args, kwargs)):
            return own(*args, **kwargs)

    return asking
