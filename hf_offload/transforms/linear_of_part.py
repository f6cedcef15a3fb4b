"""A linear function that saves something other than its input: a sample of it, or what it can be rebuilt from."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.interrupts import signals_deferred
from hf_offload.transforms.once import differentiable_once

Product = Callable[[Tensor, tuple[Tensor, ...], bool], Tensor]
"""Of a gradient ``[rows, out]`` and :attr:`Part.kept` as autograd returns them: ``gradient.T @ X`` for the input ``X``
``[rows, columns]``, or an estimate of it; with True, ``X.T @ gradient``. Holds no tensors: what autograd saves may be moved.
"""


@dataclasses.dataclass(frozen=True)
class Part:
    """What replaces an input in backward: ``kept`` is for autograd to save."""

    kept: tuple[Tensor, ...]
    product: Product


class LinearOfPart(torch.autograd.Function):
    """``inputs @ weight.T + bias``, with the weight's gradient from a part of the inputs.

    Inputs are ``[..., in]``; the weight is ``[out, in]``, or ``[in, out]`` if ``transposed``.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, part: Part, transposed: bool) -> Tensor:
        ctx.product, ctx.transposed, ctx.has_bias = part.product, transposed, bias is not None
        ctx.save_for_backward(weight, *part.kept)
        # The operations of the usual layers, so that outputs are theirs to the last bit; autocast is as it was outside.
        if transposed:
            assert bias is not None
            outputs = torch.addmm(bias, inputs.reshape(-1, inputs.shape[-1]), weight)
            return _own(outputs.view(*inputs.shape[:-1], weight.shape[1]))
        return _own(nn.functional.linear(inputs, weight, bias))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        of_inputs = of_weight = of_bias = None
        with signals_deferred, torch.autocast(gradient.device.type, enabled=False):
            rows = gradient.reshape(-1, gradient.shape[-1])
            if ctx.needs_input_grad[0]:
                matrix = (weight.t() if ctx.transposed else weight).to(gradient.dtype)
                of_inputs = (rows @ matrix).view(*gradient.shape[:-1], matrix.shape[1])
            if ctx.needs_input_grad[1]:
                of_weight = ctx.product(rows, tuple(kept), ctx.transposed)
            if ctx.has_bias and ctx.needs_input_grad[2]:
                of_bias = rows.sum(0)
        return of_inputs, of_weight, of_bias, None, None


def _own(outputs: Tensor) -> Tensor:
    """``outputs``, and not a view of anything: autograd refuses to write to a view that a custom function returns."""
    return torch.ops.aten._unsafe_view(outputs, outputs.shape) if outputs._is_view() else outputs
