"""What is done with a model, and where its weights are meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.state.peers import train_with_deepspeed
from benchmarks.state.ways import LAZY, Loop, train_in_torch
from hf_offload import OffloadConfig
from hf_offload.errors import OffloadConfigError
from hf_offload.session import OffloadSession

FULL, LORA, FORWARD = TASKS = ("full", "lora", "forward")
"""All weights are trained, or adapters on a frozen model, or nothing."""
IN_MEMORY, SSD = WAYS = ("memory", "ssd")
ACCELERATE, MAPPED, DEEPSPEED = PEERS = ("accelerate", "mapped-limited", "deepspeed-3-nvme")
"""For forwards only: accelerate's ``disk_offload``, and weights in mapped files, with no more memory than ours takes. For
training: DeepSpeed's ZeRO-3 with weights, gradients and optimizer state on the drive.
"""


def settings_of(way: str, task: str, budget: str | None, directory: str) -> OffloadConfig:
    """What the package moves."""
    # ZeRO-3's hooks use the logits.
    common: dict[str, Any] = {"tier": "none", "tiled_loss": "off" if task == FORWARD or way == DEEPSPEED else "on"}
    if way != SSD:
        return OffloadConfig(**common)
    return OffloadConfig(
        **common,
        params="ssd",
        optimizer="ssd" if task == FULL else "none",
        memory_budget=budget,
        directory=directory,
    )


def with_adapters(model: nn.Module) -> nn.Module:
    """LoRA of rank 16 on all linear layers of the blocks, as PEFT makes it."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(model, adapters)


def _with_accelerate(model: nn.Module, folder: Path) -> nn.Module:
    """Source: accelerate's documentation of big model inference, ``disk_offload``."""
    from accelerate import disk_offload

    disk_offload(model, str(folder), execution_device=torch.device("cpu"), offload_buffers=False)
    return model


def _mapped(model: nn.Module, folder: Path) -> nn.Module:
    """The kernel reads pages when they are touched, and drops them where memory is limited."""
    for number, parameter in enumerate(model.parameters()):
        file = str(folder / f"weight_{number}")
        Path(file).write_bytes(parameter.detach().numpy().tobytes())
        flat = torch.from_file(file, shared=True, size=parameter.numel(), dtype=parameter.dtype)
        parameter.data = flat.view(parameter.shape)
    return model


_PREPARED: dict[str, Callable[[nn.Module, Path], nn.Module]] = {ACCELERATE: _with_accelerate, MAPPED: _mapped}


def prepared(model: nn.Module, way: str, task: str, folder: Path) -> nn.Module:
    """The model as ``way`` wants it. Raises :class:`~hf_offload.errors.OffloadConfigError` where it cannot do the task."""
    if way not in _PREPARED:
        if way == DEEPSPEED and task == FORWARD:
            raise OffloadConfigError(f"{way} is measured with --tasks {FULL} or {LORA}.")
        return model
    if task != FORWARD:
        raise OffloadConfigError(f"{way} does not train: it is measured with --tasks {FORWARD}.")
    return _PREPARED[way](model, folder)


def training(way: str, model: nn.Module, session: OffloadSession, folder: Path) -> Loop:
    """The steps of a training."""
    if way == DEEPSPEED:
        return train_with_deepspeed(3, "nvme", True, model, session, folder)
    return train_in_torch(LAZY, model, session)
