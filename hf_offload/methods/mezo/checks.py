"""What MeZO refuses: weights it cannot move, gradients, and losses that are not one number."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.methods.mezo.directions import RESTORES
from hf_offload.methods.mezo.log import Setup
from hf_offload.settings.load import choose, collect_errors

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

HOW = (
    "pass a closure that returns the loss to step(), and leave out backward(). With a Trainer, set memory_mode='mezo' in "
    "OffloadTrainingArguments"
)


def check_options(eps: float, restore: str, groups: Iterable[dict[str, Any]]) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for one that is out of range."""
    choose("restore", restore, RESTORES)
    if not 0 < eps < math.inf:
        raise OffloadConfigError(f"eps={eps!r}: give a number above 0.")
    for number, group in enumerate(groups):
        for key in ("lr", "weight_decay"):
            if not 0 <= group[key] < math.inf:
                raise OffloadConfigError(f"{key}={group[key]!r} of group {number}: give a number of 0 or more.")


def check_model(model: nn.Module) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for a model that is wrapped, or frozen."""
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
        with check:
            if foreign or not weights:
                raise OffloadConfigError(
                    f"{foreign} parameters are not the model's, and {len(weights)} are to be trained: give MeZO those of the "
                    "model whose loss is computed."
                )
        devices = sorted({str(one.device) for one in weights.values()})
        with check:
            if len(devices) > 1:
                raise OffloadConfigError(
                    f"Parameters are on {', '.join(devices)}: MeZO draws directions on one device. Move the model to one."
                )
        for name, one in weights.items():
            with check:
                if not _is_plain(one):
                    raise OffloadConfigError(
                        f"{name} ({one.dtype}, {one.layout}, on {one.device}) is not a whole weight with data of its own: "
                        f"MeZO trains dense weights in {', '.join(map(str, _DTYPES))} that are loaded, not sharded, and "
                        "whose elements share no memory."
                    )


def _is_plain(weight: nn.Parameter) -> bool:
    if isinstance(weight, (DTensor, UninitializedParameter)) or weight.is_meta or weight.layout is not torch.strided:
        return False
    return weight.dtype in _DTYPES and torch._debug_has_internal_overlap(weight) != 1


def check_ready(weights: dict[str, nn.Parameter], model: nn.Module, setup: Setup) -> None:
    """Raise :class:`~hf_offload.errors.OffloadError` if a gradient has been computed, or if a weight is not what it was when
    the optimizer was made.
    """
    present = dict(model.named_parameters())
    for (name, one), shape, dtype in zip(weights.items(), setup.shapes, setup.dtypes, strict=True):
        found = (tuple(one.shape), str(one.dtype), one.device.type)
        if present.get(name) is not one or found != (shape, dtype, setup.device) or not one.requires_grad:
            raise OffloadError(
                f"{name} was frozen after MeZO was made, or is another weight, or has another shape, dtype or device: make a "
                "new optimizer when the model is as it is to be trained."
            )
        if one.grad is not None:
            raise OffloadError(f"{name} has a gradient, which MeZO does not use: {HOW}.")


def losses_of(value: Any) -> Tensor:
    """The losses a closure has returned, one or a list of them, ``[count]``. Raises
    :class:`~hf_offload.errors.OffloadError` unless each is one number.
    """
    return torch.cat([_loss_of(one) for one in (value if isinstance(value, list) and value else [value])])


def _loss_of(value: Any) -> Tensor:
    if isinstance(value, (int, float)):
        return torch.tensor([value], dtype=torch.float64, device="cpu")
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise OffloadError(
            f"The closure has returned {found}: return the loss, a tensor of one number, or a list of such losses."
        )
    return value.detach().reshape(1)
