"""Models whose activations cannot be offloaded, and why."""

import logging
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from hf_offload.errors import OffloadConfigError

logger = logging.getLogger(__name__)


def check_one_process_per_device(model: nn.Module) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for ``nn.DataParallel``."""
    if isinstance(model, nn.DataParallel):
        raise OffloadConfigError(
            "nn.DataParallel runs forwards in threads with copies of the model and cannot be offloaded. Start one process "
            "per GPU instead: `accelerate launch --multi_gpu train.py`, or set CUDA_VISIBLE_DEVICES to one GPU."
        )


def check_no_other_offloading(model: nn.Module) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for PyTorch's ``offload_wrapper``."""
    for name, module in model.named_modules():
        if type(module).__name__ == "OffloadWrapper":
            raise OffloadConfigError(
                f"{name or 'The model'} is in PyTorch's offload_wrapper (accelerate's activation_checkpointing_offload=True),"
                " which moves the same tensors as hf_offload: set activation_checkpointing_offload=False, or drop the "
                "offload settings. Activation checkpointing alone works together with hf_offload."
            )


def check_initialized(model: nn.Module) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for lazy modules that have not run."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise OffloadConfigError(
                f"{name} gets its shape in the first forward, and tier='auto' plans with the shapes of all weights: run a "
                "forward before attaching, or set tier='ssd' or tier='ram'."
            )


def check_eager(model: nn.Module, compiled: bool = False) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` if a part of ``model`` is compiled, or ``compiled`` says so."""
    if compiled or any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    ):
        raise compiled_error()


def check_no_graphs(model: nn.Module) -> None:
    """Refuse compile modes that replay CUDA graphs: what they save lives in memory that the next replay writes to."""
    for module in model.modules():
        call: Any = module if hasattr(module, "get_compiler_config") else getattr(module, "_compiled_call_impl", None)
        options = call.get_compiler_config() if hasattr(call, "get_compiler_config") else None
        if options and options.get("triton.cudagraphs"):
            raise OffloadConfigError(
                f"{type(module).__name__} is compiled with CUDA graphs (mode 'reduce-overhead' or 'max-autotune'), whose "
                "saved tensors live in memory that the next replay overwrites: compile it with mode='default' or "
                "'max-autotune-no-cudagraphs'."
            )


def compiled_error() -> OffloadConfigError:
    """The error of ``tier="auto"`` with a compiled model."""
    return OffloadConfigError(
        "tier='auto' measures single operations, which a compiled model does not run: set tier='ssd' or 'ram' with "
        "torch.compile."
    )


def trains_anything(model: nn.Module) -> bool:
    """Whether a parameter of ``model`` requires a gradient; says so in the log if none does."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        return True
    logger.warning(
        "No parameter of %s requires a gradient, so autograd saves nothing and there is nothing to offload.",
        type(model).__name__,
    )
    return False
