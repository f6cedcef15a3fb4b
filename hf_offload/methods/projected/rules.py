"""Update rules of AdamW, GaLore, APOLLO and FRUGAL.

All work on one parameter and its state, a dict of tensors. A weight and its gradient are ``[m, n]`` = ``[out, in]``.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from hf_offload.methods.projected.config import ApolloConfig, FrugalConfig, GaLoreConfig
from hf_offload.methods.projected.formats import StateFormat
from hf_offload.methods.projected.projections import Basis

FIRST, SECOND = "exp_avg", "exp_avg_sq"


@dataclasses.dataclass(frozen=True)
class Hyper:
    """A parameter group's numbers at this moment, and how many steps its moments have seen, this one included."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    steps: int

    @property
    def bias1(self) -> float:
        """What the first moment is divided by."""
        return 1 - self.beta1**self.steps

    @property
    def bias2_root(self) -> float:
        """What the root of the second moment is divided by."""
        return (1 - self.beta2**self.steps) ** 0.5


def moments(
    state: dict[str, Any], gradient: Tensor, hyper: Hyper, form: StateFormat, parameter_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Take ``gradient`` into both moments; the first, and ``sqrt(second) / bias2_root + eps``. In the gradient's dtype.

    The operations are those of ``torch.optim.AdamW``, in its order.
    """
    if FIRST not in state:
        for name in (FIRST, SECOND):
            form.write(state, name, torch.zeros_like(gradient), parameter_dtype)
    first = form.read(state, FIRST, gradient.dtype)
    second = form.read(state, SECOND, gradient.dtype)
    first.lerp_(gradient, 1 - hyper.beta1)
    second.mul_(hyper.beta2).addcmul_(gradient, gradient, value=1 - hyper.beta2)
    form.write(state, FIRST, first, parameter_dtype)
    form.write(state, SECOND, second, parameter_dtype)
    return first, (second.sqrt() / hyper.bias2_root).add_(hyper.eps)


def decay(weight: Tensor, hyper: Hyper) -> None:
    """Decoupled weight decay."""
    if hyper.weight_decay != 0:
        weight.mul_(1 - hyper.lr * hyper.weight_decay)


def adamw(weight: Tensor, gradient: Tensor, state: dict[str, Any], hyper: Hyper, form: StateFormat) -> None:
    """AdamW; where the moments have the parameter's dtype, with the bits of ``torch.optim.AdamW(foreach=False)``."""
    decay(weight, hyper)
    stored = form.dtype(weight.dtype)
    wide = gradient if stored == weight.dtype else gradient.to(torch.promote_types(weight.dtype, torch.float32))
    first, root = moments(state, wide, hyper, form, weight.dtype)
    if wide.dtype == weight.dtype:
        weight.addcdiv_(first, root, value=-(hyper.lr / hyper.bias1))
    else:
        weight.add_(first / root, alpha=-(hyper.lr / hyper.bias1))


def _working(gradient: Tensor) -> Tensor:
    """In the dtype that moments of projected gradients are reckoned in."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def galore(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    space: Basis,
    hyper: Hyper,
    form: StateFormat,
    config: GaLoreConfig,
) -> None:
    """Adam in the small space, its step brought back."""
    first, root = moments(state, _working(space.project(gradient)), hyper, form, weight.dtype)
    decay(weight, hyper)
    space.add_back(weight, first / root, -hyper.lr / hyper.bias1 * config.scale)


def frugal(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    space: Basis | None,
    hyper: Hyper,
    form: StateFormat,
    config: FrugalConfig,
) -> None:
    """Adam in the small space, a rule without state on the rest. Without a space everything is rest."""
    decay(weight, hyper)
    rest = gradient
    if space is not None:
        small = space.project(gradient)
        rest = space.residual(gradient, small)
        first, root = moments(state, _working(small), hyper, form, weight.dtype)
        space.add_back(weight, first / root, -hyper.lr / hyper.bias1)
    if config.free_rule == "sign":
        rest = rest.sign() if rest is gradient else rest.sign_()
    weight.add_(rest, alpha=-hyper.lr * config.free_scale)


def apollo(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    space: Basis,
    across: int,
    hyper: Hyper,
    form: StateFormat,
    config: ApolloConfig,
) -> None:
    """The gradient, each channel times ``||m/sqrt(v)|| / ||R||``. ``across`` is the dimension that a channel extends over."""
    small = _working(space.project(gradient))
    first, root = moments(state, small, hyper, form, weight.dtype)
    if config.scale_by == "channel":
        wanted, found = ((first / root).norm(dim=across, keepdim=True), small.norm(dim=across, keepdim=True))
    else:
        wanted, found = (first / root).norm(), small.norm()
    # The limiter sees the step before the correction of the bias, as published: that is taken out here and put back below.
    corrected = hyper.bias2_root / hyper.bias1
    scaled = gradient * (wanted / hyper.bias2_root / (found + 1e-8)).to(gradient.dtype)
    if config.norm_growth_limit is not None:
        _limit_growth(scaled, state, config.norm_growth_limit)
    decay(weight, hyper)
    weight.add_(scaled, alpha=-hyper.lr * corrected * config.scale)


def _limit_growth(scaled: Tensor, state: dict[str, Any], limit: float) -> None:
    """Shorten ``scaled`` so that its norm is at most ``limit`` times that of the step before (Fira, arXiv 2410.01623)."""
    norm = torch.linalg.vector_norm(scaled, dtype=torch.promote_types(scaled.dtype, torch.float32))
    before = state.get("norm")
    if before is not None:
        # All on the device: the host never waits for a norm. After a gradient of zeros there is nothing to compare with; the
        # published code would let the parameter start again from 1e-8.
        excess = torch.where(before > 0, (norm / (before + 1e-8) / limit).clamp_min(1), 1)
        scaled.div_(excess.to(scaled.dtype))
        norm = norm / excess
    state["norm"] = norm.float()
