"""Gradients that leave memory in backward, and come back when they are read."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.clip_grad import _has_foreach_support

from hf_offload.state import guard
from hf_offload.state.contexts import outside
from hf_offload.state.parked import Parked
from hf_offload.state.registry import parked_of
from hf_offload.storage.store import Store
from hf_offload.surgery import InertInCopies


class ParkedGradient(Parked):
    """The storage of a gradient.

    Attributes:
        factors: What it is still to be multiplied with, one after the other: by clipping.
        norm: Its 2-norm without the ``factors``, if it was computed as the gradient left.
    """

    def __init__(self, gradient: Tensor, name: str, store: Store):
        super().__init__(gradient, name, store)
        self.factors: tuple[Tensor, ...] = ()
        self.norm: Tensor | None = None

    def scale(self, factor: Tensor) -> None:
        """Multiply it when it is read."""
        self.factors += (factor,)
        for gradient in self.tensors:
            guard.put(gradient, self)

    def settle(self, unseen: bool) -> None:
        if self.factors or not self.on_host:
            self.come()  # or raise, and have all factors still
        factors, self.factors, self.norm = self.factors, (), None
        tensors = self.tensors
        for gradient in tensors:
            guard.lift(gradient, self)
        with outside():
            for gradient in tensors[:1]:  # all of them have the same memory
                scaled(gradient, factors)
        if unseen:
            self.note_uncounted_writes()


def gradient_of(parameter: Tensor) -> Tensor | None:
    """``parameter.grad``, which is not read."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def has_gradient(parameter: Tensor) -> bool:
    """Whether there is a gradient, wherever it is."""
    return gradient_of(parameter) is not None


def has_gradient_here(parameter: Tensor) -> bool:
    """Whether there is a gradient in memory, which is not about to leave it."""
    gradient = gradient_of(parameter)
    parked = parked_gradient(gradient)
    return gradient is not None and (parked is None or (parked.is_here and not parked.write_was_cancelled))


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Set ``parameter.grad``, whatever the parameter owes."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = gradient


def parked_gradient(gradient: Tensor | None) -> ParkedGradient | None:
    """What moves a gradient, if anything does."""
    found = None if gradient is None else parked_of(gradient)
    if gradient is None or not isinstance(found, ParkedGradient):
        return None
    found.add(gradient)  # which may be another tensor by now (``p.grad = p.grad.detach()``)
    return found


def park_gradient(gradient: Tensor, name: str, store: Store, wants_norm: bool) -> None:
    """Let a gradient leave memory that backward has just put into ``.grad``."""
    parked = parked_gradient(gradient) or ParkedGradient(gradient, name, store)
    norm = norm_of(gradient, 2.0) if wants_norm else None
    if parked.leave() and norm is not None:
        parked.norm = norm
        guard.put(gradient, parked)  # who changes it changes its norm
    store.throttle()


def scaled(gradient: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    """``gradient``, multiplied in place as ``torch.nn.utils.clip_grad_norm_`` does it."""
    for factor in factors:
        torch._foreach_mul_([gradient], factor.to(gradient.device))
    return gradient


def norm_of(gradient: Tensor, norm_type: float) -> Tensor:
    """As ``torch.nn.utils.get_total_norm`` computes that of one tensor."""
    if _has_foreach_support([gradient], gradient.device):
        return torch._foreach_norm([gradient], norm_type)[0]
    return torch.linalg.vector_norm(gradient, norm_type)


def watch(parameter: nn.Parameter, before: Callable[[Tensor], None], arrived: Callable[[Tensor], None]) -> None:
    """Call ``before`` with a gradient to be added up, and ``arrived`` with the parameter once it is in ``.grad``."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        call: Any = InertInCopies(before)
        parameter.register_hook(call)
        parameter.register_post_accumulate_grad_hook(InertInCopies(arrived))
    finally:
        parameter.requires_grad_(trains)
