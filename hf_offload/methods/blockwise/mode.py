"""The memory modes lisa and badam: a few blocks at a time, each with AdamW."""

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from hf_offload.methods.blockwise import BlockwiseConfig, BlockwiseOptimizer, deepest_turn, peak_bytes, release
from hf_offload.methods.param_groups import WeightDecay, decay_groups
from hf_offload.methods.protocol import MemoryMode, OptimizerBytes, trained_parameters
from hf_offload.settings.classes import settings


@settings(frozen=True, kw_only=True)
class Blockwise(BlockwiseConfig, MemoryMode):
    """:class:`BlockwiseOptimizer`, whose settings are those of the mode."""

    takes_fused: ClassVar[bool] = True

    def prepare(self, model: nn.Module) -> nn.Module:
        """Unfreeze what an earlier training left frozen."""
        release(model)
        return model

    def optimizer(self, model: nn.Module, *, weight_decay: WeightDecay, **adam: Any) -> torch.optim.Optimizer:
        """:class:`BlockwiseOptimizer` over all trainable parameters."""
        return BlockwiseOptimizer(decay_groups(model, weight_decay), model, self, **adam)

    def begin_training(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Blocks wait for their turn until the training ends."""
        assert isinstance(optimizer, BlockwiseOptimizer)
        optimizer.open()
        optimizer_ref, model_ref = weakref.ref(optimizer), optimizer.model_ref

        def end() -> None:
            present, model = optimizer_ref(), model_ref()
            if present is not None:
                present.close()
            elif model is not None:  # what waited for its turn must not stay frozen
                release(model)

        return end

    def waiting(self, model: nn.Module) -> list[nn.Parameter]:
        """In the turn with the first block: backward ends at the first block that trains."""
        trains = deepest_turn(model, self)
        return [parameter for name, parameter in model.named_parameters() if name not in trains]

    def state_bytes(self, model: nn.Module) -> int:
        """Moments, counters and float32 copies of the weights, of the turn that needs most."""
        most = peak_bytes(model, self)
        return most.state + most.masters

    def optimizer_bytes(self, model: nn.Module, *, on_cpu: bool, fused: bool) -> OptimizerBytes:
        """Of the turn with the largest gradients and state, which need not be the one of :meth:`waiting`. State that waits is
        counted where the host's RAM is the device's memory.
        """
        most = peak_bytes(model, self)
        state = used = most.state + most.masters
        if on_cpu and self.inactive_state == "keep":
            state = most.all_state + most.masters  # what waits is in the same memory
        if fused:
            copies = 0
        elif on_cpu:
            copies = max((one.nbytes for one in trained_parameters(model)), default=0)
        else:
            copies = max(most.masters, most.gradients)  # of all at once (foreach), in float32 where there are masters
        moved = 3 * most.gradients + 2 * used
        return OptimizerBytes(state, most.step_gradients + copies, moved, most.gradients)
