"""Freezes parameters until their turn, and tells them from those that the user froze.

Note: when blocks are frozen
    Code that wraps a model (``DistributedDataParallel``, ``Accelerator.prepare``) or converts its layers looks once at which
    parameters require gradients. So all of them still do when the optimizer is built, and the first forward of the
    model (or the first step, where the model itself is never called) freezes those that have to wait.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# An attribute of the parameter itself: another optimizer finds it later, when this one may be gone.
_MARK = "_waits_for_its_turn"


def is_waiting(parameter: nn.Parameter) -> bool:
    """Whether ``parameter`` is frozen only until its block takes its turn."""
    return hasattr(parameter, _MARK) and not parameter.requires_grad


def freeze(parameter: nn.Parameter) -> None:
    """Let ``parameter`` wait, without a gradient."""
    parameter.requires_grad_(False)
    parameter.grad = None
    setattr(parameter, _MARK, True)


def unfreeze(parameter: nn.Parameter) -> None:
    """Let ``parameter`` train."""
    parameter.requires_grad_(True)
    vars(parameter).pop(_MARK, None)


def release(model: nn.Module) -> None:
    """Let every parameter of ``model`` that waits for its turn require gradients again; what the user froze stays frozen."""
    for parameter in model.parameters():
        if is_waiting(parameter):
            unfreeze(parameter)


class BeforeForward:
    """A forward pre-hook that calls a bound method, while its object is there. Copies of the model get one that is idle."""

    def __init__(self, method: Callable[[], None] | None = None):
        self._method = None if method is None else weakref.WeakMethod(method)

    @torch._dynamo.disable  # type: ignore[untyped-decorator, unused-ignore]
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method()

    def __reduce__(self) -> tuple[Any, ...]:
        return BeforeForward, ()
