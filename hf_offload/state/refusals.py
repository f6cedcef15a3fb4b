"""Models whose weights cannot leave memory, each with what to do instead."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.schema import OffloadConfig


def refuse(model: nn.Module, config: OffloadConfig, processes: int) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for a model whose weights cannot leave memory."""
    refuse_processes(config, processes, all(parameter.is_cpu for parameter in model.parameters()))
    if getattr(model, "hf_device_map", None):
        raise OffloadConfigError(
            "The model was loaded with a device_map (hf_device_map), so accelerate's hooks move its weights already: load it "
            "without, or set params='none'."
        )
    # On a CPU, what is away can be read where it is. A whole model in TorchScript takes no hooks.
    modules = list(model.named_modules())
    if all(parameter.is_cpu for parameter in model.parameters()):
        modules = [("", model)] if isinstance(model, torch.jit.ScriptModule) else []
    for name, module in modules:
        _refuse_module(name or "The model", module)
    refuse_scripts("params", modules)
    refuse_shards("params", model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise OffloadConfigError(f"{name} is on the meta device, without values: load the model first.")


def refuse_processes(config: OffloadConfig, count: int, on_host: bool) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` if ``count`` processes train one model together by gradients on
    accelerators, whose collective operations ask no tensor's class. On a CPU, they read what is away where it is.
    """
    mode = config.mode()
    if count > 1 and not on_host and (mode is None or mode.uses_gradients):
        raise OffloadConfigError(
            f"params=... moves the weights of one process, and {count} train together, which exchange gradients of "
            "weights in memory: shard them with FSDP2 and its CPUOffloadPolicy (fsdp_offload_params: true in the file of "
            "`hf-offload config --where fsdp2`), or with DeepSpeed's ZeRO-3 (offload_param_device: cpu in that of "
            "`hf-offload config --where zero3`), or set params='none'."
        )


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module run compiled code."""
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def refuse_scripts(setting: str, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for modules in TorchScript: nothing sees what they read."""
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise OffloadConfigError(
                f"{name or 'The model'} is in TorchScript, which reads weights without asking for them: use the module that "
                f"it was made of, or set {setting}='none'."
            )


def refuse_shards(setting: str, model: nn.Module) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for weights that another library shards and moves. The optimizer's
    state of FSDP2's shards may leave memory where they are on the CPU.
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise OffloadConfigError(
                f"{name} belongs to DeepSpeed's ZeRO-3, which moves weights and state itself: use its offload_param and "
                f"offload_optimizer, or set {setting}='none'."
            )
        on_host = isinstance(parameter, DTensor) and parameter.device.type == "cpu"
        is_shard = isinstance(parameter, DTensor) or type(parameter).__name__ == "FlatParameter"
        if is_shard and not (on_host and setting == "optimizer"):
            raise OffloadConfigError(
                f"{name} is sharded by FSDP: use FSDP2's CPUOffloadPolicy (fsdp_offload_params: true), or set "
                f"{setting}='none'."
            )


def _refuse_module(name: str, module: Any) -> None:
    if isinstance(module, nn.DataParallel):
        raise OffloadConfigError(
            f"{name} is an nn.DataParallel, which copies all weights to each GPU: start one process, or set params='none'."
        )
    if is_compiled(module):
        raise OffloadConfigError(
            f"{name} is compiled, and compiled code reads weights without asking for them: leave torch.compile out, or set "
            "params='none'."
        )
