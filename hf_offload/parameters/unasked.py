"""Functions of PyTorch that take tensors without asking their class: they find parameters in memory, too.

This replaces ``torch.autograd.Function.apply`` and three constructors, once and for good. They do nothing for tensors that
are no such parameters. PyTorch tells constructors by identity in a few places, which know both functions afterwards.
"""

import functools
from typing import Any

import torch

from hf_offload.parameters.backward import ask_in_backward, keep_inputs_of_checkpoints
from hf_offload.parameters.demand import as_plain, is_demanded
from hf_offload.parameters.saved import whereabouts
from hf_offload.parameters.views import FollowingView, follow_views, parameters_of, views_in_memory
from hf_offload.parameters.waiting import complete, in_memory


def ask_everywhere() -> None:
    """Ask before a custom function of autograd, or a constructor, takes a parameter. Idempotent."""
    if not hasattr(torch.autograd.Function.apply, "_hf_offload_asks"):
        _ask_in_apply()
        ask_in_backward()
        keep_inputs_of_checkpoints(is_demanded)
        _ask_in_constructors()


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
    for name in ("tensor", "as_tensor", "asarray"):
        own = getattr(torch, name)
        asking = _asking(own)
        torch.jit._builtins._register_builtin(asking, f"aten::{name}")
        setattr(torch, name, asking)


def _asking(own: Any) -> Any:
    @functools.wraps(own)
    def constructor(*args: Any, **kwargs: Any) -> Any:
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if not isinstance(data, torch.Tensor) or not (is_demanded(data) or type(data) is FollowingView):
            return own(*args, **kwargs)
        asked: list[Any] = [data] if is_demanded(data) else []
        with as_plain(asked), views_in_memory((args, kwargs)):
            return own(*args, **kwargs)

    return constructor
