"""What an Accelerator does with gradients, and a memory mode that has none refuses. Imports no Trainer."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import collect_errors
from hf_offload.settings.schema import OffloadConfig

_SHARDING = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


class LeavesModelsUnwrapped(Accelerator):
    """Models are not wrapped for several processes: there are no gradients to reduce, and no memory for them is wanted."""

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, *_: Any, **__: Any) -> Any:
        return super().prepare_model(model, device_placement, evaluation_mode=True)


def check_processes(accelerator: Accelerator, name: str) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` where ``accelerator`` shards models, or reduces their gradients in
    a way that is not known; ``name`` is the memory mode's.
    """
    if accelerator.distributed_type in _SHARDING:
        raise OffloadConfigError(
            f"memory_mode={name!r} draws directions for whole weights, and {accelerator.distributed_type.value} shards them "
            "or makes another optimizer: start the processes without it (DDP), where each has all weights, or takes them "
            "from a tier (offload_params)."
        )


def check_step(accelerator: Accelerator | None, config: OffloadConfig) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` where ``accelerator`` accumulates or scales gradients that the
    memory mode has not.
    """
    if accelerator is None or not lacks_gradients(config):
        return
    steps = accelerator.gradient_accumulation_steps
    with collect_errors("Accelerator with a memory mode") as check:
        with check:
            if steps > 1:
                raise OffloadConfigError(
                    f"gradient_accumulation_steps={steps} adds up gradients, and memory_mode={config.memory_mode!r} has "
                    "none: leave it out, and let the closure return the mean loss of several batches."
                )
        with check:
            if accelerator.scaler is not None:
                raise OffloadConfigError(
                    f"mixed_precision='fp16' scales the loss for gradients, and memory_mode={config.memory_mode!r} has none: "
                    "use 'bf16', or none."
                )


def check_gradients(config: OffloadConfig, method: str) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` if there are no gradients, which ``method`` works on."""
    if lacks_gradients(config):
        raise OffloadConfigError(
            f"memory_mode={config.memory_mode!r} has no gradients, which {method}() works on: leave it out."
        )


def lacks_gradients(config: OffloadConfig) -> bool:
    """Whether the memory mode of ``config`` has no gradients."""
    mode = config.mode()
    return mode is not None and not mode.uses_gradients
