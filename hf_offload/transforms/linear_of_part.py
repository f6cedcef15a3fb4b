"""A linear function that saves something other than its input: a sample of it, or what it can be rebuilt from.

Note: weights that autocast casts
    Autocast casts a weight once, and all layers that use it until its block ends use that copy. Gradients of these uses are
    added up in the copy's dtype, and the sum is cast to the weight's. So that copy has to get the gradient here, too.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.transforms.backward import autocast_dtype, differentiable_once

Product = Callable[[Tensor, tuple[Tensor, ...], bool], Tensor]
"""Of a gradient ``[rows, out]`` and :attr:`Part.kept` as autograd returns them: ``gradient.T @ X`` for the input ``X``
``[rows, columns]``, or an estimate of it; with True, ``X.T @ gradient``. Holds no tensors: what autograd saves may be moved.
"""


@dataclasses.dataclass(frozen=True)
class Part:
    """What replaces an input in backward: ``kept`` is for autograd to save."""

    kept: tuple[Tensor, ...]
    product: Product


def linear_of_part(inputs: Tensor, weight: Tensor, bias: Tensor | None, part: Part, transposed: bool) -> Tensor:
    """``inputs @ weight.T + bias``, with the weight's gradient from a part of the inputs.

    Inputs are ``[..., in]``; the weight is ``[out, in]``, or ``[in, out]`` if ``transposed``.
    """
    casts = _autocasts(inputs, weight, bias, transposed)
    return _LinearOfPart.apply(inputs, weight, bias, part, transposed, *casts)


def _autocasts(inputs: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> tuple[Tensor | None, ...]:
    """The copies of weight and bias that autocast has, or makes here, as parts of the graph; None for what it does not
    keep a copy of.
    """
    if autocast_dtype(inputs.device) is None or not torch.is_autocast_cache_enabled():
        return None, None
    of_weight = of_bias = None
    # Products without rows: what autograd saves for them is the copy, and no session shall look at it.
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        if _has_copy(weight):
            rows = inputs.new_zeros((0, weight.shape[0] if transposed else weight.shape[1]), requires_grad=True)
            node: Any = (torch.mm(rows, weight) if transposed else torch.mm(weight, rows.t())).grad_fn
            of_weight = node._saved_mat2 if transposed else node._saved_self
        if bias is not None and _has_copy(bias):
            node = torch.matmul(inputs.new_zeros((0, len(bias)), requires_grad=True), bias).grad_fn
            of_bias = node._saved_vec
    return of_weight, of_bias


def _has_copy(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf and tensor.dtype == torch.float32


class _LinearOfPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        part: Part,
        transposed: bool,
        cast_weight: Tensor | None,
        cast_bias: Tensor | None,
    ) -> Tensor:
        ctx.product, ctx.transposed, ctx.has_bias = part.product, transposed, bias is not None
        ctx.to_casts = cast_weight is not None, cast_bias is not None
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
        with torch.autocast(gradient.device.type, enabled=False):
            rows = gradient.reshape(-1, gradient.shape[-1])
            if ctx.needs_input_grad[0]:
                matrix = (weight.t() if ctx.transposed else weight).to(gradient.dtype)
                of_inputs = (rows @ matrix).view(*gradient.shape[:-1], matrix.shape[1])
            if ctx.needs_input_grad[1]:
                of_weight = ctx.product(rows, tuple(kept), ctx.transposed)
            if ctx.has_bias and ctx.needs_input_grad[2]:
                of_bias = rows.sum(0)
        weights = (None, of_weight) if ctx.to_casts[0] else (of_weight, None)
        biases = (None, of_bias) if ctx.to_casts[1] else (of_bias, None)
        return of_inputs, weights[0], biases[0], None, None, weights[1], biases[1]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _own(outputs: Tensor) -> Tensor:
    """``outputs``, and not a view of anything: autograd refuses to write to a view that a custom function returns."""
    return torch.ops.aten._unsafe_view(outputs, outputs.shape) if outputs._is_view() else outputs
