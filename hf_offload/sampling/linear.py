"""Linear layers that keep a part of their input for backward, and estimate the gradient of their weight from it."""

import threading
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from hf_offload.sampling.estimator import draw_rows, signs
from hf_offload.settings.sampling import SampledLinearConfig


class Part(Protocol):
    """What stands for an input ``X`` ``[rows, columns]`` in backward."""

    def tensors(self) -> tuple[Tensor, ...]:
        """What is kept, for autograd to save."""
        ...

    def product(self, gradient: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """The estimate of ``gradient.T @ X``; ``kept`` are :meth:`tensors` as autograd gives them back."""
        ...


class _Rows:
    """Some rows, each multiplied so that the product is right on average."""

    def __init__(self, rows: Tensor, random: Tensor, *, keep_winners: bool):
        importance = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float)
        self._indices, factors = draw_rows(importance, random, keep_winners=keep_winners)
        self._rows = rows[self._indices] * factors.to(rows.dtype).unsqueeze(1)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._rows, self._indices

    def product(self, gradient: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        rows, indices = kept
        return gradient[indices].t() @ rows


class _Columns:
    """Some columns, each multiplied so that the product is right on average."""

    def __init__(self, rows: Tensor, random: Tensor):
        self._width = rows.shape[1]
        importance = torch.linalg.vector_norm(rows, dim=0, dtype=torch.float)
        self._indices, factors = draw_rows(importance, random, keep_winners=True)
        self._columns = rows[:, self._indices] * factors.to(rows.dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._columns, self._indices

    def product(self, gradient: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        columns, indices = kept
        result = gradient.new_zeros(gradient.shape[1], self._width)
        return result.index_add_(1, indices, gradient.t() @ columns)


class _Projected:
    """The columns in fewer random directions; the directions are made again from their seed."""

    def __init__(self, rows: Tensor, count: int, seed: int):
        self._seed = seed
        self._shape = (rows.shape[1], count)
        self._projected = rows @ signs(self._shape, self._seed, rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._projected,)

    def product(self, gradient: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        (projected,) = kept
        return (gradient.t() @ projected) @ signs(self._shape, self._seed, projected).t()


def draw_part(inputs: Tensor, dtype: torch.dtype, config: SampledLinearConfig) -> Part | None:
    """A part of ``inputs`` ``[..., columns]`` in ``dtype``, or None where all of them would be kept.

    Without gradients there is none either, but as many random numbers are drawn: reentrant checkpointing runs a block first
    without and then with them, and its dropout has to see the same random numbers both times.
    """
    width = inputs.shape[-1]
    whole = width if config.estimator in ("rad", "features") else inputs.numel() // max(1, width)
    count = config.kept(whole)
    if not config.samples or count >= whole:
        return None
    if config.estimator == "rad":
        # From the CPU's generator, so that no accelerator is waited for; checkpointing restores it, too.
        seed = int(torch.randint(2**62, ()).item())
    else:
        random = torch.rand(count, dtype=torch.float64, device=inputs.device)
    if not torch.is_grad_enabled():
        return None
    with torch.no_grad():
        rows = inputs.detach().reshape(-1, width).to(dtype)
        if config.estimator == "rad":
            return _Projected(rows, count, seed)
        if config.estimator == "features":
            return _Columns(rows, random)
        return _Rows(rows, random, keep_winners=config.estimator == "wta-crs")


class Draws:
    """One part for all layers that are given the same tensor, per thread; forgotten when the tensor goes."""

    def __init__(self, config: SampledLinearConfig):
        self.config = config
        self._thread = threading.local()

    def of(self, inputs: Tensor, dtype: torch.dtype) -> Part | None:
        """The part of ``inputs`` in ``dtype``, drawn for whichever layer asks first."""
        known = getattr(self._thread, "known", None)
        if known is not None and self.config.share_inputs:
            source, *kind, part = known
            if source() is inputs and kind == [inputs._version, dtype, torch.is_grad_enabled()]:
                return part
        part = draw_part(inputs, dtype, self.config)
        source = weakref.ref(inputs, self._forget)
        self._thread.known = (source, inputs._version, dtype, torch.is_grad_enabled(), part)
        return part

    def _forget(self, source: Any) -> None:
        known = getattr(self._thread, "known", None)
        if known is not None and known[0] is source:
            self._thread.known = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Draws":
        return memo.setdefault(id(self), Draws(self.config))

    def __reduce__(self) -> tuple[Any, ...]:
        return Draws, (self.config,)


class _Linear(torch.autograd.Function):
    """``inputs @ weight.T + bias``, with the weight's gradient from a part of the inputs."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, part: Part, transposed: bool) -> Tensor:
        ctx.part, ctx.transposed, ctx.has_bias = part, transposed, bias is not None
        ctx.save_for_backward(weight, *part.tensors())
        # The operations of the usual layers, so that outputs are theirs to the last bit; autocast is as it was outside.
        if transposed:
            assert bias is not None
            outputs = torch.addmm(bias, inputs.reshape(-1, inputs.shape[-1]), weight)
            return outputs.view(*inputs.shape[:-1], weight.shape[1])
        return nn.functional.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        of_inputs = of_weight = of_bias = None
        with torch.autocast(gradient.device.type, enabled=False):
            rows = gradient.reshape(-1, gradient.shape[-1])
            if ctx.needs_input_grad[0]:
                matrix = (weight.t() if ctx.transposed else weight).to(gradient.dtype)
                of_inputs = (rows @ matrix).view(*gradient.shape[:-1], matrix.shape[1])
            if ctx.needs_input_grad[1]:
                of_weight = ctx.part.product(rows, tuple(kept))
                of_weight = of_weight.t() if ctx.transposed else of_weight
            if ctx.has_bias and ctx.needs_input_grad[2]:
                of_bias = rows.sum(0)
        return of_inputs, of_weight, of_bias, None, None


class _Sampled:
    """What both kinds of layer share. ``draws`` is put on a layer by :func:`~hf_offload.sampling.convert_linears`."""

    draws: Draws

    def _sampled_forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor | None:
        """None where nothing is left out: the usual forward is exact, to the last bit."""
        if not weight.requires_grad or not inputs.is_floating_point():
            return None
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        part = self.draws.of(inputs, dtype)
        return None if part is None else _Linear.apply(inputs, weight, bias, part, transposed)


class SampledLinear(_Sampled, nn.Linear):
    """:class:`torch.nn.Linear` whose weight gradient is estimated while training. Made by ``convert_linears``."""

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        sampled = self._sampled_forward(input, self.weight, self.bias, False) if self.training else None
        return super().forward(input) if sampled is None else sampled


class SampledConv1D(_Sampled, Conv1D):
    """transformers' ``Conv1D`` (GPT-2), whose weight is ``[in, out]``, likewise."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        sampled = self._sampled_forward(x, self.weight, self.bias, True) if self.training else None
        return super().forward(x) if sampled is None else sampled
