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
    """Raise :class:`~hf_offload.errors.OffloadConfigError` with all that are out of range."""
    with collect_errors("options of MeZO") as check:
        with check:
            if not _is_number(eps) or not 0 < eps < math.inf:
                raise OffloadConfigError(f"eps={eps!r}: give a number above 0.")
        with check:
            choose("restore", restore, RESTORES)
        with check:
            if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
                raise OffloadConfigError(f"seed={seed!r}: give a whole number of 64 bits.")


def check_groups(groups: Iterable[dict[str, Any]]) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` unless all learning rates and decays are numbers, 0 or more."""
    with collect_errors("parameter groups of MeZO") as check:
        for number, group in enumerate(groups):
            for key in ("lr", "weight_decay"):
                with check:
                    if not _is_number(group[key]) or not 0 <= group[key] < math.inf:
                        raise OffloadConfigError(f"{key}={group[key]!r} of group {number}: give a number of 0 or more.")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_model(model: nn.Module) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for a model that is none, or that is wrapped for gradients."""
    if not isinstance(model, nn.Module):
        raise OffloadConfigError(f"MeZO moves the weights of a torch.nn.Module, and was given {type(model).__name__}.")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise OffloadConfigError(
                "DistributedDataParallel has memory for all gradients, and MeZO has none: give it the model that is not "
                "wrapped, which each process computes with. MeZO averages the losses of all processes itself."
            )
        if isinstance(module, FullyShardedDataParallel):
            raise OffloadConfigError(
                "FullyShardedDataParallel shards weights, and directions are drawn for whole ones: give MeZO the model that "
                "is not wrapped."
            )


def check_trainable(model: nn.Module) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for a model that is frozen."""
    if not any(one.requires_grad for one in model.parameters()):
        raise OffloadConfigError("No parameter requires gradients: unfreeze what is to be trained.")


def check_weights(weights: dict[str, nn.Parameter], foreign: int) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` with everything about ``weights`` that cannot be trained."""
    with collect_errors("parameters of MeZO") as check:
        with check:
            if foreign:
                raise OffloadConfigError(
                    f"{foreign} parameters are not the model's: give MeZO those of the model whose loss is computed."
                )
        with check:
            if not weights:
                raise OffloadConfigError("No parameter requires gradients: unfreeze what is to be trained.")
        with check:
            devices = sorted({str(one.device) for one in weights.values()})
            if len(devices) > 1:
                raise OffloadConfigError(
                    f"Parameters are on {', '.join(devices)}: MeZO draws directions on one device. Move the model to one."
                )
        for name, one in weights.items():
            with check:
                if isinstance(one, DTensor):
                    raise OffloadConfigError(
                        f"{name} is sharded (DTensor), and directions are drawn for whole weights: leave out "
                        "what shards it. With several processes, each has all weights."
                    )
                if isinstance(one, UninitializedParameter):
                    raise OffloadConfigError(f"{name} has no shape yet: call the model once before.")
                if one.dtype not in _DTYPES:
                    raise OffloadConfigError(
                        f"{name} is {one.dtype}: directions are drawn in {', '.join(map(str, _DTYPES))}."
                    )
                if one.is_meta:
                    raise OffloadConfigError(f"{name} has no data (device meta): load the weights first.")
                if one.layout is not torch.strided:
                    raise OffloadConfigError(f"{name} is {one.layout}: only dense weights are trained.")
                if torch._debug_has_internal_overlap(one) == 1:
                    raise OffloadConfigError(
                        f"{name} has elements that share memory, as expand() makes them: give the module a copy of it."
                    )


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
