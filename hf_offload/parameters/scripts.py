"""TorchScript, which reads parameters without asking for them: those that it is called with, and those of its modules.

This replaces how scripted functions are called and how modules become scripts, once and for good. For tensors that are no
such parameters, both do nothing.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.parameters.demand import demanded_in
from hf_offload.parameters.views import parameters_of, views_in_memory
from hf_offload.parameters.waiting import complete, in_memory

_MEMORY = "_hf_offload_memory"


def ask_in_scripts() -> None:
    """Ask before TorchScript takes a parameter. Idempotent."""
    from torch.jit import _recursive

    own = _recursive.create_script_module_impl
    if hasattr(own, "__wrapped__"):
        return
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        kind.__call__ = _asking(kind.__call__)  # type: ignore[method-assign]

    @functools.wraps(own)
    def create(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        script = own(module, *args, **kwargs)
        _hold(script, module)
        return script

    setattr(_recursive, "create_script_module_impl", create)  # noqa: B010


def _hold(script: Any, module: nn.Module) -> None:
    """Hold the memory of the parameters of ``module`` as long as ``script`` is alive, so that it stays, and no update waits,
    although the script reads it without asking.
    """
    vars(script)[_MEMORY] = [_memory_of(each) for each in module.parameters(recurse=False)]


def _asking(own: Any) -> Any:
    @functools.wraps(own)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked: list[Any] = list(demanded_in((args, kwargs)))
        for each in asked:
            complete(each)
        with in_memory([*asked, *parameters_of((args, kwargs))]), views_in_memory((args, kwargs)):
            return own(self, *args, **kwargs)

    return call


def _memory_of(parameter: nn.Parameter) -> Tensor:
    complete(parameter)
    with in_memory([parameter]), torch._C.DisableTorchFunctionSubclass():
        return parameter.detach()
