"""What MeZO refuses: weights it cannot move, gradients, and losses that are not one number."""

import math
import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.optimizers.mezo.directions import RESTORES
from hf_offload.optimizers.mezo.log import Setup
from hf_offload.settings.load import choose, collect_errors

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

HOW = (
    "pass a closure that returns the loss to step(), and leave out backward(). With a Trainer, set memory_mode='mezo' in "
    "OffloadTrainingArguments"
)


def check_options(eps: float, restore: str, seed: int) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for one that is out of range."""
    choose("restore", restore, RESTORES)
    if not _is_number(eps) or not 0 < eps < math.inf:
        raise OffloadConfigError(f"eps={eps!r}: give a number above 0.")
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise OffloadConfigError(f"seed={seed!r}: give a whole number of 64 bits.")


def check_groups(groups: Iterable[dict[str, Any]]) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` unless all learning rates and decays are numbers, 0 or more."""
    for number, group in enumerate(groups):
        for key in ("lr", "weight_decay"):
            if not _is_number(group[key]) or not 0 <= group[key] < math.inf:
                raise OffloadConfigError(f"{key}={group[key]!r} of group {number}: give a number of 0 or more.")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_model(model: nn.Module) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for a model that is none, that is wrapped, or that is frozen."""
    if not isinstance(model, nn.Module):
        raise OffloadConfigError(f"MeZO moves the weights of a torch.nn.Module, and was given {type(model).__name__}.")
    if any(isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)) for module in model.modules()):
        raise OffloadConfigError(
            "DistributedDataParallel has memory for all gradients, and FullyShardedDataParallel parts of weights, while "
            "directions are drawn for whole ones: give MeZO the model that is not wrapped, which each process computes with. "
            "MeZO averages the losses of all processes itself."
        )
    if not any(one.requires_grad for one in model.parameters()):
        raise OffloadConfigError("No parameter requires gradients: unfreeze what is to be trained.")


def check_weights(weights: dict[str, nn.Parameter], foreign: int) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` with everything about ``weights`` that cannot be trained."""
    with collect_errors("parameters of MeZO") as check:
        devices = sorted({str(one.device) for one in weights.values()})
        refused = {name: why for name, one in weights.items() if (why := _refusal(one))}
        with check:
            if foreign:
                raise OffloadConfigError(
                    f"{foreign} parameters are not the model's: give MeZO those of the model whose loss is computed."
                )
        with check:
            if not weights:
                raise OffloadConfigError("No parameter requires gradients: unfreeze what is to be trained.")
        with check:
            if len(devices) > 1:
                raise OffloadConfigError(
                    f"Parameters are on {', '.join(devices)}: MeZO draws directions on one device. Move the model to one."
                )
        for name, why in refused.items():
            with check:
                raise OffloadConfigError(f"{name} {why}.")


def _refusal(weight: nn.Parameter) -> str:
    if isinstance(weight, DTensor):
        return (
            "is sharded (DTensor), and directions are drawn for whole weights: leave out what shards it. With several "
            "processes, each has all weights"
        )
    if isinstance(weight, UninitializedParameter):
        return "has no shape yet: call the model once before"
    if weight.dtype not in _DTYPES:
        return f"is {weight.dtype}: directions are drawn in {', '.join(map(str, _DTYPES))}"
    if weight.is_meta:
        return "has no data (device meta): load the weights first"
    if weight.layout is not torch.strided:
        return f"is {weight.layout}: only dense weights are trained"
    if torch._debug_has_internal_overlap(weight) == 1:
        return "has elements that share memory, as expand() makes them: give the module a copy of it"
    return ""


def check_ready(weights: dict[str, nn.Parameter], model: nn.Module, setup: Setup) -> None:
    """Raise :class:`~hf_offload.errors.OffloadError` if a gradient has been computed, or if a weight is not what it was when
    the optimizer was made.
    """
    present = dict(model.named_parameters())
    for (name, one), shape, dtype in zip(weights.items(), setup.shapes, setup.dtypes, strict=True):
        found = (tuple(one.shape), str(one.dtype), one.device.type)
        if present.get(name) is not one or found != (shape, dtype, setup.device):
            raise OffloadError(
                f"{name} is another weight than when MeZO was made, or has another shape, dtype or device: make a new "
                "optimizer when the model is as it is to be trained."
            )
        if one.grad is not None:
            raise OffloadError(f"{name} has a gradient, which MeZO does not use: {HOW}.")
        if not one.requires_grad:
            raise OffloadError(
                f"{name} was frozen after MeZO was made, which trains all that it began with: make a new optimizer."
            )


def losses_of(value: Any) -> Tensor:
    """The losses a closure has returned, one or a list of them, ``[count]``. Raises
    :class:`~hf_offload.errors.OffloadError` unless each is one number.
    """
    return torch.cat([_loss_of(one) for one in (value if isinstance(value, list) and value else [value])])


def _loss_of(value: Any) -> Tensor:
    if isinstance(value, (int, float)):
        return torch.tensor([value], dtype=torch.float64, device="cpu")
    is_loss = isinstance(value, Tensor) and value.numel() == 1 and value.layout is torch.strided and not value.is_meta
    if not is_loss or value.is_complex() or value.dtype is torch.bool:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise OffloadError(
            f"The closure has returned {found}: return the loss, a tensor of one number, or a list of such losses."
        )
    return value.detach().reshape(1)
