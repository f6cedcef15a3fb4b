"""Whether code of a Trainer's user looks at gradients, or changes options, between a backward and its step."""

from collections.abc import Iterable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import Trainer, TrainerCallback

_OF_LIBRARIES = ("transformers", "hf_offload")
_COMPUTES_ONE_LOSS = (*_OF_LIBRARIES, "trl")
"""Libraries whose ``compute_loss`` leaves backward to the Trainer."""


def needs_gradients(trainer: Trainer, model: nn.Module) -> bool:
    """Whether weights are to be updated after backward, as things are now: methods may be set on objects, and callbacks and
    hooks come, at any time.
    """
    return (
        any(_acts(one) for one in trainer.callback_handler.callbacks)
        or not _is_of(trainer, "training_step", _OF_LIBRARIES)
        or not _is_of(trainer, "compute_loss", _COMPUTES_ONE_LOSS)
        or _has_hooks(trainer.optimizer)
        or any(len(parameter._post_accumulate_grad_hooks or ()) > 1 for parameter in model.parameters())
    )


def _acts(callback: TrainerCallback) -> bool:
    events = ("on_pre_optimizer_step", "on_optimizer_step")
    return any(
        getattr(getattr(callback, event), "__func__", None) is not getattr(TrainerCallback, event) for event in events
    )


def _is_of(trainer: Trainer, method: str, libraries: Iterable[str]) -> bool:
    """Whether the method that is called is that of one of these libraries."""
    if method in vars(trainer):
        return False
    owner = next(one for one in type(trainer).__mro__ if method in vars(one))
    return owner.__module__.partition(".")[0] in libraries


def _has_hooks(optimizer: Any) -> bool:
    """Whether others than this package are called before or after the steps of ``optimizer``."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return any(not (getattr(one, "__module__", None) or "").startswith("hf_offload.") for one in hooks)
