"""Updating each parameter in backward, as soon as its gradient is complete, so that full gradients never coexist."""

import functools
from typing import Any

import torch
from torch import Tensor

from hf_offload.errors import OffloadConfigError
from hf_offload.optimizers.projected.optimizer import ProjectedAdamW


class UpdateInBackward:
    """Let backward itself update the parameters of ``optimizer``; :meth:`remove` ends it.

    A gradient is dropped right after its parameter was updated with it, by the very function that ``step()`` calls, with the
    learning rate that the group has at that moment. ``optimizer.step()`` is still called after backward (a scheduler
    counts it) and ``scheduler.step()`` after that, as always: the bits are those of a run that updates in ``step()``.
    Saving and loading go through the optimizer, before backward or after ``step()``.

    Gradients cannot be clipped by their norm: they are never there at once. Two backward passes without a ``step()`` in
    between, and the ``step`` of a ``GradScaler``, are refused by name when they happen
    (:class:`~hf_offload.errors.OffloadConfigError`). Several processes are refused at once: the gradient is not averaged over
    ranks when its parameter would be updated.
    """

    def __init__(self, optimizer: ProjectedAdamW):
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise OffloadConfigError(
                f"Update in backward takes a gradient before it is averaged over {distributed.get_world_size()} processes: "
                "use one process, or update in step()."
            )
        if optimizer.in_backward:
            raise OffloadConfigError("This optimizer already updates in backward.")
        self._optimizer = optimizer
        self._updated: set[Tensor] = set()
        self._handles: list[Any] = [optimizer.register_step_post_hook(lambda *_: self._updated.clear())]
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    update = functools.partial(self._update, number)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(update))
        optimizer.in_backward = True

    def remove(self) -> None:
        """Gradients stay again, and ``step()`` uses them. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._optimizer.in_backward = False

    def _update(self, group_number: int, parameter: Tensor) -> None:
        if parameter in self._updated:
            raise OffloadConfigError(
                "A parameter got a second gradient before optimizer.step(), but it is updated in backward: call step() after "
                "each backward, without gradient accumulation, and use non-reentrant activation checkpointing."
            )
        self._updated.add(parameter)
        # The groups are other dicts after a state dict was loaded.
        self._optimizer.update(parameter, self._optimizer.param_groups[group_number])
        parameter.grad = None
