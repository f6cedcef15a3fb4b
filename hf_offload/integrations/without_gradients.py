"""What an Accelerator does with gradients, and a memory mode that has none refuses."""

from accelerate import Accelerator

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import collect_errors
from hf_offload.settings.schema import OffloadConfig


def check_step(accelerator: Accelerator | None, config: OffloadConfig) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` where ``accelerator`` accumulates or scales gradients that the
    memory mode has not.
    """
    if accelerator is None or not _lacks_gradients(config):
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
    if _lacks_gradients(config):
        raise OffloadConfigError(
            f"memory_mode={config.memory_mode!r} has no gradients, which {method}() works on: leave it out."
        )


def _lacks_gradients(config: OffloadConfig) -> bool:
    mode = config.mode()
    return mode is not None and not mode.uses_gradients
