"""Updating each parameter in backward, as soon as its gradient is complete, so that full gradients never coexist."""

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

    What needs all gradients at once, or the same parameter's twice, is left to the memory mode to refuse
    (:meth:`~hf_offload.memory_modes.protocol.MemoryMode.conflicts`). Two backward passes without a ``step()`` in between, and
    a scaler's ``step``, are refused when they happen. (GaLore alone could add up projected gradients, but not at a step that
    computes a new projection; APOLLO's and FRUGAL's steps need the full gradient.)

    Raises :class:`~hf_offload.errors.OffloadConfigError` for several processes, over which the gradient is not averaged yet
    when its parameter would be updated, and for an optimizer that updates in backward already.
    """

    def __init__(self, optimizer: ProjectedAdamW):
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            processes = torch.distributed.get_world_size()
            if processes > 1:
                raise OffloadConfigError(
                    f"Update in backward takes a gradient before it is averaged over {processes} processes: use one process, "
                    "or update in step()."
                )
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
