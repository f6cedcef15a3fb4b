"""Updating each parameter in backward, as soon as its gradient is complete, so that full gradients never coexist."""

from typing import Any

import torch
from torch import Tensor

from hf_offload.errors import OffloadConfigError
from hf_offload.optimizers.projected.optimizer import NO_SCALER, ProjectedAdamW
from hf_offload.settings.load import collect_errors


class UpdateInBackward:
    """Let backward itself update the parameters of ``optimizer``; :meth:`remove` ends it.

    A gradient is dropped right after its parameter was updated with it, by the very function that ``step()`` calls, with the
    learning rate that the group has at that moment. ``optimizer.step()`` is still called after backward (a scheduler
    counts it) and ``scheduler.step()`` after that, as always: the bits are those of a run that updates in ``step()``.
    Saving and loading go through the optimizer, before backward or after ``step()``.

    What needs all gradients at once, or the same parameter's twice, is refused by name
    (:class:`~hf_offload.errors.OffloadConfigError`, all at once): pass what the run would use.

    Args:
        max_grad_norm: Of clipping by the norm of all gradients.
        accumulation_steps: Micro-batches a step. (GaLore alone could add up projected gradients, but not at a step that
            computes a new projection; APOLLO's and FRUGAL's steps need the full gradient.)
        scaler: A ``torch.amp.GradScaler``, which looks at all gradients before a step: train in bfloat16.

    Two backward passes without a ``step()`` in between, and a scaler's ``step``, are refused when they happen.
    Several processes are refused too: the gradient is not yet averaged over ranks when its parameter would be updated.
    """

    def __init__(
        self,
        optimizer: ProjectedAdamW,
        *,
        max_grad_norm: float | None = None,
        accumulation_steps: int = 1,
        scaler: Any = None,
    ):
        with collect_errors("update in backward") as check:
            with check:
                if max_grad_norm:
                    raise OffloadConfigError(
                        f"max_grad_norm={max_grad_norm} needs all gradients at once, and update in backward has one at a "
                        "time: set it to 0. (The step of Adam does not grow with the gradient.)"
                    )
            with check:
                if accumulation_steps != 1:
                    raise OffloadConfigError(
                        f"gradient_accumulation_steps={accumulation_steps} adds up gradients, and update in backward drops "
                        "them: set it to 1 and raise the batch size."
                    )
            with check:
                if scaler is not None and scaler.is_enabled():
                    raise OffloadConfigError(NO_SCALER)
            with check:
                distributed = torch.distributed
                if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
                    raise OffloadConfigError(
                        f"Update in backward takes a gradient before it is averaged over {distributed.get_world_size()} "
                        "processes: use one process, or update in step()."
                    )
            with check:
                if optimizer.in_backward:
                    raise OffloadConfigError("This optimizer already updates in backward.")
        self._optimizer = optimizer
        self._updated: set[Tensor] = set()
        self._handles: list[Any] = [optimizer.register_step_post_hook(self._on_step)]
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(_Hook(self, index)))
        optimizer.in_backward = True

    def remove(self) -> None:
        """Gradients stay again, and ``step()`` uses them. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._optimizer.in_backward = False

    def update(self, parameter: Tensor, group_index: int) -> None:
        """The parameter's step; its gradient is gone afterwards."""
        if parameter in self._updated:
            raise OffloadConfigError(
                "A parameter got a second gradient before optimizer.step(), but it is updated in backward: call step() after "
                "each backward, without gradient accumulation, and use non-reentrant activation checkpointing."
            )
        self._updated.add(parameter)
        # The groups are other dicts after a state dict was loaded.
        self._optimizer.update(parameter, self._optimizer.param_groups[group_index])
        parameter.grad = None

    def _on_step(self, *_: Any) -> None:
        self._updated.clear()


class _Hook:
    """A class at module level, because parameters are copied and pickled with their hooks."""

    def __init__(self, owner: UpdateInBackward, group_index: int):
        self._owner = owner
        self._group_index = group_index

    def __call__(self, parameter: Tensor) -> None:
        self._owner.update(parameter, self._group_index)
