"""Cross-entropy from hidden states, a few tokens at a time: the logits of all tokens never exist.

The gradients of hidden states and head are computed in one pass, as in Liger's fused linear cross-entropy (Hsu et al. 2024,
arXiv 2410.10989): the three matrix products of the usual way, and nothing computed twice. Backward multiplies them by the
gradient of the loss.

Note: tokens without a label
    Their part of the gradient is 0, also where the gradient of the loss is infinite or NaN, as after a division by a count of
    labels that is 0. A product of the two would be NaN, so backward leaves these tokens out. Of the others, and of the head,
    a gradient of the loss that is not finite makes NaN, as the backward of PyTorch's softmax does.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.checkpointing import checkpoint
from hf_offload.interrupts import signals_deferred
from hf_offload.state.guard import own_class
from hf_offload.tensors import is_ordinary
from hf_offload.transforms.backward import differentiable_once
from hf_offload.transforms.tiling.cut import Cut
from hf_offload.transforms.tiling.sums import WideSum, product, wide_dtype, widened

# Gradients of single logits are around 1e-5: in 16 bits with a small exponent they need to be larger to be numbers.
_FLOAT16_SCALE = 64.0


@dataclasses.dataclass(frozen=True)
class HeadProjection:
    """From hidden states to logits.

    Attributes:
        head: The output head; a ``nn.Linear``, or whatever stands in its place.
        forward: The head's own forward.
        vocabulary: How many logits a token has.
        dtype: Of the logits.
        autocast: Dtype of mixed precision in which the head was called, or None.
        finish: What is done with logits behind the head, one token like the other: casts, soft caps, scales.
        only_casts: Whether ``finish`` is nothing but casts.
        cut: How large pieces are.
    """

    head: nn.Module
    forward: Callable[[Tensor], Tensor]
    vocabulary: int
    dtype: torch.dtype
    autocast: torch.dtype | None
    cut: Cut
    finish: tuple[Callable[[Tensor], Tensor], ...] = ()
    only_casts: bool = True

    def tile_rows(self, tokens: int) -> int:
        """How many tokens a piece has."""
        return self.cut.loss_rows(tokens, self.vocabulary)

    def then(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype, *, cast: bool = False) -> "HeadProjection":
        """The same with one more thing done to the logits, which then have ``dtype``."""
        return dataclasses.replace(
            self, finish=(*self.finish, function), dtype=dtype, only_casts=self.only_casts and cast
        )

    def project(self, rows: Tensor) -> Tensor:
        """The head's own output, in the precision that was in force where it was called."""
        with self._autocast(rows):
            return self.forward(rows)

    def finished(self, raw: Tensor) -> Tensor:
        """The logits, of the head's output for the same rows."""
        with self._autocast(raw):
            return functools.reduce(lambda logits, function: function(logits), self.finish, raw)

    def logits(self, rows: Tensor) -> Tensor:
        """The logits ``[..., vocabulary]`` of rows of hidden states ``[..., hidden]``."""
        return self.finished(self.project(rows))

    @property
    def wide(self) -> torch.dtype:
        """In which losses are computed: 32 bits, or the dtype of the logits where that has more."""
        return torch.promote_types(self.dtype, torch.float)

    def _autocast(self, tensor: Tensor) -> torch.autocast:
        return torch.autocast(tensor.device.type, dtype=self.autocast, enabled=self.autocast is not None)

    @property
    def linear(self) -> nn.Linear | None:
        """The head, if it is a plain linear layer whose products can be made here."""
        head: Any = self.head
        plain = type(head) is nn.Linear and getattr(self.forward, "__func__", None) is nn.Linear.forward
        return head if plain and is_ordinary(own_class(head.weight)) else None


def tiled_cross_entropy(
    hidden: Tensor,
    labels: Tensor,
    projection: HeadProjection,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """``torch.nn.functional.cross_entropy(projection.logits(hidden), labels, ...)`` without the logits.

    Args:
        hidden: ``[tokens, hidden]``.
        labels: ``[tokens]``, indices of classes.
        projection: From one to the other.
        ignore_index: Labels that do not count.
        label_smoothing: As in PyTorch.
        reduction: ``mean``, ``sum`` or ``none``.

    Returns a scalar, or ``[tokens]`` with ``reduction="none"`` (then backward recomputes the logits). The gradient cannot
    be differentiated again.
    """
    rule = _Rule(ignore_index, label_smoothing, reduction, projection)
    if reduction == "none":
        return _by_rows(hidden, labels, rule)
    parameters = [parameter for parameter in projection.head.parameters() if parameter.requires_grad]
    loss: Tensor = _CrossEntropy.apply(rule, hidden, labels, *parameters)
    return loss


@dataclasses.dataclass(frozen=True)
class _Rule:
    ignore_index: int
    label_smoothing: float
    reduction: str
    projection: HeadProjection

    def nll(self, logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
        return nn.functional.cross_entropy(
            widened(logits),
            labels,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=reduction,
        )


def _by_rows(hidden: Tensor, labels: Tensor, rule: _Rule) -> Tensor:
    def piece(rows: Tensor, targets: Tensor) -> Tensor:
        return rule.nll(rule.projection.logits(rows), targets, "none")

    rows = rule.projection.tile_rows(len(hidden))
    pieces = zip(hidden.split(rows), labels.split(rows), strict=True)
    losses = [checkpoint(piece, part, targets) for part, targets in pieces]
    return torch.cat(losses).to(rule.projection.dtype)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: _Rule, hidden: Tensor, labels: Tensor, *parameters: Tensor) -> Tensor:
        projection = rule.projection
        rows_wanted, wanted = ctx.needs_input_grad[1], any(ctx.needs_input_grad)
        ctx.labelled = labels != rule.ignore_index
        counted = ctx.labelled.sum()
        divisor = counted.clamp(min=1) if rule.reduction == "mean" else torch.ones_like(counted)
        share = 1.0 / divisor.to(projection.wide)
        # The share is in the gradient of the logits before that is rounded, but for powers of two, which change no digit.
        scale, ctx.left = share, None
        if torch.float16 in (projection.autocast, hidden.dtype):
            digits, exponent = torch.frexp(share)
            scale, ctx.left = digits * _FLOAT16_SCALE, torch.ldexp(torch.ones_like(share), exponent) / _FLOAT16_SCALE
        rows_gradient = torch.empty_like(hidden, dtype=wide_dtype(hidden)) if rows_wanted else None
        sums = [WideSum(parameter) for parameter in parameters] if wanted else []
        make_tile = _any_tile if projection.linear is None else _linear_tile
        tile = signals_deferred(make_tile(rule, parameters))
        total = hidden.new_zeros((), dtype=projection.wide)
        step = projection.tile_rows(len(hidden))
        for begin in range(0, max(1, len(hidden)), step):
            end = begin + step
            rows, targets = hidden[begin:end], labels[begin:end]
            loss, gradient = tile(rows, targets, scale if wanted else None, sums, rows_wanted)
            total += loss
            if rows_gradient is not None and gradient is not None:
                rows_gradient[begin:end] = gradient
        ctx.sums, ctx.rows_gradient = sums, rows_gradient
        ctx.rows_dtype, ctx.taken = hidden.dtype, False
        loss = total / counted if rule.reduction == "mean" else total
        return loss.to(projection.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.taken:
            raise RuntimeError(
                "Trying to backward through the tiled loss a second time: its gradients have been freed. Pass "
                "retain_graph=True the first time."
            )
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.taken = not again  # at once: what an error leaves half scaled is not to be used
        factor = widened(outer) if ctx.left is None else widened(outer) * ctx.left
        factor = factor.where(factor.isfinite(), torch.nan)
        rows = ctx.rows_gradient
        if rows is not None:
            rows = (rows * factor.to(rows.dtype).where(ctx.labelled.unsqueeze(1), 1)).to(ctx.rows_dtype)
        factor = factor.where(ctx.labelled.any(), 1)
        weights = [one.scaled(factor, in_place=not again) if one.is_used else None for one in ctx.sums]
        if not again:
            ctx.sums, ctx.rows_gradient = [], None
        return None, rows, None, *weights


Tile = Callable[[Tensor, Tensor, Tensor | None, list[WideSum], bool], tuple[Tensor, Tensor | None]]


def _linear_tile(rule: _Rule, parameters: Sequence[Tensor]) -> Tile:
    """A piece of a head that is one matrix: its products are computed here, so that they are summed in place."""
    projection = rule.projection
    head = projection.linear
    assert head is not None
    device = head.weight.device.type
    dtype = projection.autocast or head.weight.dtype
    weight = head.weight.detach().to(dtype)
    bias = None if head.bias is None else head.bias.detach().to(dtype)
    where = {id(parameter): index for index, parameter in enumerate(parameters)}
    of_weight, of_bias = where.get(id(head.weight)), where.get(id(head.bias))

    def tile(
        rows: Tensor, labels: Tensor, scale: Tensor | None, sums: list[WideSum], rows_wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(device, enabled=False):
            rows = rows.detach().to(dtype)
            raw = nn.functional.linear(rows, weight, bias)
        if projection.only_casts:
            logits = raw.to(projection.wide)
            del raw
            loss = _cross_entropy_(logits, labels, rule, scale)
            if scale is None:
                return loss, None
            # Tensor cores want 16 bits, and give 32; elsewhere both factors are widened for that, and this one is wide.
            gradient = logits if dtype.itemsize == 2 and not logits.is_cuda else logits.to(dtype)
        else:
            loss, gradients = _by_autograd(rule, raw, labels, scale, [raw])
            if gradients is None:
                return loss, None
            of_raw = gradients[0]
            assert of_raw is not None
            gradient = of_raw
        with torch.autocast(device, enabled=False):
            if of_weight is not None:
                sums[of_weight].add_product(gradient, rows)
            if of_bias is not None:
                sums[of_bias].add(gradient.sum(0, dtype=wide_dtype(gradient)))
            return loss, product(gradient, weight) if rows_wanted else None

    return tile


def _any_tile(rule: _Rule, parameters: Sequence[Tensor]) -> Tile:
    """A piece of whatever stands in the head's place: autograd knows its gradient."""

    def tile(
        rows: Tensor, labels: Tensor, scale: Tensor | None, sums: list[WideSum], rows_wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows = rows.detach().requires_grad_(rows_wanted)
        with torch.set_grad_enabled(scale is not None), _not_moved():
            raw = rule.projection.project(rows)
        asked = [rows, *parameters] if rows_wanted else list(parameters)
        loss, gradients = _by_autograd(rule, raw, labels, scale, asked)
        if gradients is None:
            return loss, None
        for one, gradient in zip(sums, gradients[1:] if rows_wanted else gradients, strict=True):
            if gradient is not None:
                one.add(gradient)
        return loss, gradients[0] if rows_wanted else None

    return tile


def _by_autograd(
    rule: _Rule, raw: Tensor, labels: Tensor, scale: Tensor | None, asked: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor | None] | None]:
    """Sum of the losses, and its gradients times ``scale``."""
    projection = rule.projection
    if scale is None:
        return rule.nll(projection.finished(raw), labels, "sum"), None
    if raw.grad_fn is None:
        raw.requires_grad_()
    with torch.enable_grad(), _not_moved():
        loss = rule.nll(projection.finished(raw), labels, "sum")
        gradients = torch.autograd.grad(loss * scale, asked, allow_unused=True)
    return loss.detach(), gradients


def _not_moved() -> torch.autograd.graph.saved_tensors_hooks:
    """What a piece saves is needed at once: no outer hook may move it."""
    # Detached: a graph that holds a tensor which holds the graph is never freed.
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)


def _cross_entropy_(logits: Tensor, labels: Tensor, rule: _Rule, scale: Tensor | None) -> Tensor:
    """Sum of the losses; ``logits`` (32 bits or more, ``[rows, vocabulary]``) become their gradient times ``scale``."""
    kept = labels != rule.ignore_index
    target = labels.where(kept, 0).unsqueeze(1)
    smoothing = rule.label_smoothing
    top = logits.amax(1, keepdim=True)
    logits.sub_(top)
    own = logits.gather(1, target)
    mean = logits.mean(1, keepdim=True) if smoothing else None
    logits.exp_()
    total = logits.sum(1, keepdim=True)
    log_total = total.log()
    loss = log_total - own
    if mean is not None:
        loss = (1 - smoothing) * loss + smoothing * (log_total - mean)
    if scale is not None:
        weight = kept.unsqueeze(1) * scale
        logits.mul_(weight / total)
        logits.scatter_add_(1, target, (smoothing - 1) * weight)
        if smoothing:
            logits.sub_(weight * (smoothing / rule.projection.vocabulary))
    return loss.squeeze(1).where(kept, 0).sum()
