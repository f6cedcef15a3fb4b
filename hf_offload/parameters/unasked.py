"""Custom functions of autograd take tensors without asking their class: they find parameters in memory, too.

This replaces ``torch.autograd.Function.apply``, once and for good. It does nothing for tensors that are no such parameters.
Constructors such as ``torch.tensor``, which do not ask either, stay as they are: PyTorch and libraries tell them by identity.
"""

import functools
from typing import Any

import torch

from hf_offload.parameters.backward import ask_in_backward, keep_inputs_of_checkpoints
from hf_offload.parameters.demand import is_demanded
from hf_offload.parameters.saved import whereabouts
from hf_offload.parameters.views import FollowingView, follow_views, parameters_of, views_in_memory
from hf_offload.parameters.waiting import complete, in_memory


def ask_everywhere() -> None:
    """Ask before a custom function of autograd takes a parameter. Idempotent."""
    if not hasattr(torch.autograd.Function.apply, "_hf_offload_asks"):
        _ask_in_apply()
        ask_in_backward()
        keep_inputs_of_checkpoints(is_demanded)


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
