"""What MeZO refuses: weights it cannot move, gradients, and losses that are not one number."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.methods.mezo.directions import RESTORES
from hf_offload.methods.mezo.log import Setup, Trained
from hf_offload.settings.load import choose
from hf_offload.state.storages import moves

HOW = (
    "pass a closure that returns the loss to step(), and leave out backward(). With a Trainer, set memory_mode='mezo' in "
    "OffloadTrainingArguments"
)


def check_options(eps: float, restore: str, groups: Iterable[dict[str, Any]]) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for one that is out of range."""
    choose("restore", restore, RESTORES)
    options = [("eps", eps, eps > 0)]
    options += [(key, group[key], group[key] >= 0) for group in groups for key in ("lr", "weight_decay")]
    for key, value, is_in_range in options:
        if not (is_in_range and value < math.inf):
            raise OffloadConfigError(f"{key}={value!r}: give a number of 0 or more, and above 0 for eps.")


def check_weights(weights: Mapping[str, nn.Parameter], model: nn.Module, foreign: int) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for ``weights`` that cannot be trained, a wrapped model, or
    parameters that are ``foreign`` to it.
    """
    if any(isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)) for module in model.modules()):
        raise OffloadConfigError(
            "DistributedDataParallel has memory for all gradients, and FullyShardedDataParallel parts of weights, while "
            "directions are drawn for whole ones: give MeZO the model that is not wrapped, which each process computes with. "
            "MeZO averages the losses of all processes itself."
        )
    if foreign or not weights:
        raise OffloadConfigError(
            f"{foreign} parameters are not the model's, and {len(weights)} require gradients: give MeZO those of the model "
            "whose loss is computed, and unfreeze what is to be trained."
        )
    for name, one in weights.items():
        if not (moves(one) and one.is_floating_point() and one.itemsize > 1):
            raise OffloadConfigError(
                f"{name} ({one.dtype}, {one.layout}, on {one.device}) is not a whole weight with data of its own: MeZO "
                "trains dense weights of 16 bits or more that are loaded, and not sharded."
            )
    devices = sorted({str(one.device) for one in weights.values()})
    if len(devices) > 1:
        raise OffloadConfigError(
            f"Parameters are on {', '.join(devices)}: MeZO draws directions on one device. Move the model to one."
        )


def check_ready(weights: Mapping[str, nn.Parameter], model: nn.Module, setup: Setup) -> None:
    """Raise :class:`~hf_offload.errors.OffloadError` if a gradient has been computed, or if a weight is not what it was when
    the optimizer was made.
    """
    present = dict(model.named_parameters())
    for (name, one), entry in zip(weights.items(), setup.weights, strict=True):
        if present.get(name) is not one or Trained.of(name, one, entry.group) != entry or not one.requires_grad:
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
