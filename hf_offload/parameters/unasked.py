"""Functions of PyTorch that take tensors without asking their class: they find parameters in memory, too.

These replace functions of the process, once and for good. For tensors that are no demanded parameters, they do nothing.
"""

import functools
from typing import Any

import torch

from hf_offload.parameters.demand import as_plain, is_demanded
from hf_offload.parameters.saved import whereabouts
from hf_offload.parameters.views import FollowingView, follow_views, parameters_of, views_in_memory
from hf_offload.parameters.waiting import complete, in_memory


def ask_everywhere() -> None:
    """Ask before a custom function of autograd, or a constructor, takes a parameter. Idempotent."""
    if not hasattr(torch.autograd.Function.apply, "_hf_offload_asks"):
        _ask_in_apply()
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
    for name in ("tensor", "as_tensor", "asarray"):
        own = getattr(torch, name)

        @functools.wraps(own)
        def constructor(data: Any = None, *args: Any, _own: Any = own, **kwargs: Any) -> Any:
            if not is_demanded(data):
                return _own(data, *args, **kwargs) if data is not None else _own(*args, **kwargs)
            with as_plain([data]):
                return _own(data, *args, **kwargs)

        setattr(torch, name, constructor)
