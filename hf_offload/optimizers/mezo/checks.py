"""What MeZO refuses: weights it cannot move, gradients, and losses that are not one number."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.optimizers.mezo.directions import RESTORES
from hf_offload.settings.load import choose, collect_errors

HOW = (
    "pass a closure that returns the loss to step(), and leave out backward(). With a Trainer, set memory_mode='mezo' in "
    "OffloadTrainingArguments"
)


def check_options(eps: float, restore: str) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` with all that are out of range."""
    with collect_errors("options of MeZO") as check:
        with check:
            if not isinstance(eps, (int, float)) or not 0 < eps < float("inf"):
                raise OffloadConfigError(f"eps={eps!r}: give a number above 0.")
        with check:
            choose("restore", restore, RESTORES)


def check_groups(groups: Iterable[dict[str, Any]]) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for a learning rate or a decay below 0."""
    with collect_errors("parameter groups of MeZO") as check:
        for number, group in enumerate(groups):
            for key in ("lr", "weight_decay"):
                with check:
                    if not float(group[key]) >= 0:
                        raise OffloadConfigError(f"{key}={group[key]!r} of group {number}: give a number of 0 or more.")


def check_model(model: nn.Module) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for a model that is wrapped for gradients."""
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
                if not one.is_floating_point():
                    raise OffloadConfigError(f"{name} is {one.dtype}: only real floating point is trained.")
                if one.is_meta:
                    raise OffloadConfigError(f"{name} has no data (device meta): load the weights first.")


def check_no_gradients(weights: dict[str, nn.Parameter]) -> None:
    """Raise :class:`~hf_offload.errors.OffloadError` if any has been computed, or if a weight has been frozen."""
    for name, one in weights.items():
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
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise OffloadError(
            f"The closure has returned {found}: return the loss, a tensor of one number, or a list of such losses."
        )
    return value.detach().reshape(1)
