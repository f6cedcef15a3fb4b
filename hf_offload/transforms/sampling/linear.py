"""Linear layers that keep a part of their input for backward, and estimate the gradient of their weight from it.

The functions that choose the part keep shapes fixed and read no value on the host, so that an accelerator is never waited
for. The estimates of ``G.T @ X`` are unbiased.
"""

import functools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_offload.errors import OffloadConfigError
from hf_offload.interrupts import signals_deferred
from hf_offload.settings.sampling import GRADIENT_CACHE, SampledLinearConfig
from hf_offload.transforms.backward import autocast_dtype
from hf_offload.transforms.linear_of_part import Part, linear_of_part
from hf_offload.transforms.sampling.gradient_cache import GradientCache, SampleRows

_WHOLE = 2.0**62


def winners(sorted_probabilities: Tensor, count: int) -> Tensor:
    """How many of the most probable are kept for certain when ``count`` are kept: a scalar, ``0 <= winners < count``.

    ``argmin over c of (1 - P(c)) / (count - c)``, ``P(c)`` the sum of the ``c`` largest (WTA-CRS, arXiv 2305.15265).
    ``sorted_probabilities`` is ``[rows]``, from the largest down.
    """
    before = torch.cat([sorted_probabilities.new_zeros(1), running_sums(sorted_probabilities)])[:count]
    left = count - torch.arange(len(before), device=before.device, dtype=before.dtype)
    return ((1 - before).clamp_min(0) / left).argmin()


def running_sums(probabilities: Tensor) -> Tensor:
    """The sums of the first one, of the first two, and so on, of ``probabilities`` whose sum is 1."""
    return probabilities.cumsum(0) if probabilities.device.type == "cpu" else _whole_sums(probabilities)


def _whole_sums(probabilities: Tensor) -> Tensor:
    # CUDA adds floating-point numbers up in any order, and not at all where algorithms have to be deterministic. Sums of
    # whole numbers are the same in each order, and these are finer than what float64 can tell apart next to 1.
    whole = (probabilities.double() * _WHOLE).round().long()
    return (whole.cumsum(0).double() / _WHOLE).to(probabilities.dtype)


def draw_rows(importance: Tensor, random: Tensor, *, keep_winners: bool) -> tuple[Tensor, Tensor]:
    """Some of the rows, and what each is multiplied by so that their sum is on average that of all rows.

    ``importance`` is ``[rows]``, at least zero: any is unbiased as long as it is positive where a row is not zero. The best
    is proportional to the norm of the row's part of the sum. ``random`` is ``[count]``, float64, uniform in 0..1. Returns
    indices ``[count]`` (repeated where a row was drawn more than once) and factors ``[count]`` in float64. ``keep_winners``
    is WTA-CRS; without it, column-row sampling (CRS).
    """
    probabilities = importance.double()
    total = probabilities.sum()
    probabilities = torch.where(total > 0, probabilities / total, 1.0 / len(probabilities))
    ordered, order = probabilities.sort(descending=True, stable=True)
    upto = running_sums(ordered)
    count = len(random)
    slots = torch.arange(count, device=order.device)
    certain = winners(ordered, count) if keep_winners else slots.new_zeros(())
    mass = torch.cat([upto.new_zeros(1), upto]).take(certain)  # an index in brackets would be read on the host
    rest = (upto[-1] - mass).clamp_min(0)
    # One of the others each: the first whose sum of probabilities is above a random height.
    heights = mass + rest * random
    drawn = torch.searchsorted(upto, heights, right=True).clamp_max(_last_positive(ordered))
    drawn = torch.maximum(drawn, certain)
    chances = ordered[drawn] * (count - certain)
    factors = torch.where(chances > 0, rest / chances.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    is_certain = slots < certain
    return order[torch.where(is_certain, slots, drawn)], torch.where(is_certain, 1.0, factors)


def _last_positive(ordered: Tensor) -> Tensor:
    return (ordered > 0).sum().clamp_min(1) - 1


def signs(shape: tuple[int, int], seed: int, like: Tensor) -> Tensor:
    """A matrix of random signs over the root of its columns: ``S`` with ``E[S @ S.T] = I``. The same for the same seed."""
    generator = torch.Generator(like.device).manual_seed(seed)
    values = torch.randint(0, 2, shape, generator=generator, device=like.device, dtype=torch.int8)
    return (2 * values - 1).to(like.dtype) * shape[1] ** -0.5


PADDING_WEIGHT = 0.05
"""How probable rows of padding are, relative to others of their norm. Their gradients are zero in most models, so drawing
them is a waste. Where they are not, the estimate is still right on average, as with any weight above zero.
"""


def _of_rows(
    samples: SampleRows | None, gradient: Tensor, kept: tuple[Tensor, ...], transposed: bool = False
) -> Tensor:
    rows, indices = kept
    if samples is not None:
        samples.seen(gradient)
    return rows.t() @ gradient[indices] if transposed else gradient[indices].t() @ rows


def _draw_rows(
    rows: Tensor, random: Tensor, weights: Tensor | None, samples: SampleRows | None, *, keep_winners: bool
) -> Part:
    """Some rows, each multiplied so that the product is right on average."""
    importance = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float)
    if weights is not None:
        importance *= weights
    if samples is not None:
        importance *= samples.guesses()
    indices, factors = draw_rows(importance, random, keep_winners=keep_winners)
    return Part((rows[indices] * factors.to(rows.dtype).unsqueeze(1), indices), functools.partial(_of_rows, samples))


def _of_columns(width: int, gradient: Tensor, kept: tuple[Tensor, ...], transposed: bool = False) -> Tensor:
    columns, indices = kept
    result = gradient.new_zeros(gradient.shape[1], width)
    result.index_add_(1, indices, gradient.t() @ columns)
    return result.t() if transposed else result


def _draw_columns(rows: Tensor, random: Tensor) -> Part:
    """Some columns, each multiplied so that the product is right on average."""
    importance = torch.linalg.vector_norm(rows, dim=0, dtype=torch.float)
    indices, factors = draw_rows(importance, random, keep_winners=True)
    return Part((rows[:, indices] * factors.to(rows.dtype), indices), functools.partial(_of_columns, rows.shape[1]))


def _of_directions(
    shape: tuple[int, int], seed: int, gradient: Tensor, kept: tuple[Tensor, ...], transposed: bool = False
) -> Tensor:
    (projected,) = kept
    result = (gradient.t() @ projected) @ signs(shape, seed, projected).t()
    return result.t() if transposed else result


def _project(rows: Tensor, count: int, seed: int) -> Part:
    """The columns in fewer random directions; the directions are drawn again from their seed."""
    shape = (rows.shape[1], count)
    return Part((rows @ signs(shape, seed, rows),), functools.partial(_of_directions, shape, seed))


def draw_part(
    inputs: Tensor,
    dtype: torch.dtype,
    config: SampledLinearConfig,
    weights: Tensor | None = None,
    samples: SampleRows | None = None,
) -> Part | None:
    """A part of ``inputs`` ``[..., columns]`` in ``dtype``, or None where all of them would be kept. The larger a row's entry
    in ``weights`` (``[rows]``, positive), the more probable it is; ``samples`` says how large the rows' gradients were.

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
        seed = int(torch.randint(2**62, (), device="cpu").item())
    else:
        random = torch.rand(count, dtype=torch.float64, device=inputs.device)
    if not torch.is_grad_enabled():
        return None
    with torch.no_grad():
        rows = inputs.detach().reshape(-1, width).to(dtype)
        if config.estimator == "rad":
            return _project(rows, count, seed)
        if config.estimator == "features":
            return _draw_columns(rows, random)
        return _draw_rows(rows, random, weights, samples, keep_winners=config.estimator == "wta-crs")


class _Source(weakref.ref[Tensor]):
    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Draws:
    """One part for all layers that are given the same tensor, per thread; forgotten when the tensor goes."""

    def __init__(self, config: SampledLinearConfig, cache: GradientCache | None = None):
        self.config = config
        self.cache = cache
        self._mask: Tensor | None = None
        self._thread = threading.local()

    def of(self, inputs: Tensor, dtype: torch.dtype, name: str) -> Part | None:
        """The part of ``inputs`` in ``dtype``, drawn for whichever layer asks first; ``name`` is that of the layer."""
        known = self._known
        if self.config.share_inputs:
            for source, (*kind, part) in list(known.items()):
                if source() is inputs and kind == [inputs._version, dtype, torch.is_grad_enabled()]:
                    return part
        part = draw_part(inputs, dtype, self.config, self._weights(inputs), self._samples(inputs, name))
        known.clear()
        # The callback is in C: Ctrl-C in one of Python would be discarded.
        known[_Source(inputs, known.pop)] = (inputs._version, dtype, torch.is_grad_enabled(), part)
        return part

    @property
    def _known(self) -> "dict[_Source, tuple[int, torch.dtype, bool, Part | None]]":
        """What this thread drew last, as long as its inputs are there."""
        try:
            return self._thread.known
        except AttributeError:
            self._thread.known = {}
            return self._thread.known

    def begin(self, mask: Tensor | None) -> None:
        """A forward begins, of tokens of which ``mask`` ``[batch, sequence]`` is zero where they are padding."""
        self._mask = mask

    def _weights(self, inputs: Tensor) -> Tensor | None:
        mask = self._mask
        if mask is None or mask.shape != inputs.shape[:-1] or mask.device != inputs.device:
            return None
        return torch.where(mask.reshape(-1) != 0, 1.0, PADDING_WEIGHT)

    def _samples(self, inputs: Tensor, name: str) -> SampleRows | None:
        if self.cache is not None:
            return self.cache.rows_of(name, inputs)
        if self.config.probabilities == GRADIENT_CACHE and torch.is_grad_enabled():
            raise OffloadConfigError(
                "probabilities='gradient-cache' needs to know the training samples. The Trainer's callback takes care of "
                "that; in your own loop, call session.carry_sample_ids(loader) before the first step."
            )
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Draws":
        return memo.setdefault(id(self), Draws(self.config))

    def __reduce__(self) -> tuple[Any, ...]:
        return Draws, (self.config,)


class NoteMask:
    """A forward pre-hook of the model: which tokens of its inputs are padding."""

    def __init__(self, draws: Draws):
        self._draws = draws

    @torch.compiler.disable
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Changes nothing."""
        mask = kwargs.get("attention_mask")
        self._draws.begin(mask if isinstance(mask, Tensor) else None)


class _Sampled:
    """What both kinds of layer share. Both attributes are put on a layer by ``convert_linears``."""

    draws: Draws
    sampled_as: str
    """The layer's name in its model."""

    @signals_deferred
    def _sampled_forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor | None:
        """None where nothing is left out: the usual forward is exact, to the last bit."""
        if not weight.requires_grad or not inputs.is_floating_point():
            return None
        part = self.draws.of(inputs, autocast_dtype(inputs.device) or inputs.dtype, self.sampled_as)
        return None if part is None else linear_of_part(inputs, weight, bias, part, transposed)


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
