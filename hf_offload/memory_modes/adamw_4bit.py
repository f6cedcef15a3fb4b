"""The memory mode adamw_4bit."""

from typing import Any, ClassVar

import torch
from torch import nn

from hf_offload.memory_modes.libraries import load_library
from hf_offload.memory_modes.protocol import MemoryMode, trained_parameters
from hf_offload.optimizers.param_groups import WeightDecay, decay_groups

_SINGLE_BYTES = 4
_LEAST_ELEMENTS = 4096
"""torchao leaves the moments of smaller tensors alone."""


class AdamW4bit(MemoryMode):
    """AdamW with moments in 4 bits (Li et al., NeurIPS 2023, arXiv 2309.01507), from torchao."""

    alters_step: ClassVar[bool] = False

    def optimizer(self, model: nn.Module, *, weight_decay: WeightDecay, **adam: Any) -> torch.optim.Optimizer:
        """The package's."""
        made: torch.optim.Optimizer = load_library("torchao.optim", "adamw_4bit", "torchao").AdamW4bit(
            decay_groups(model, weight_decay), **adam
        )
        return made

    def state_bytes(self, model: nn.Module) -> int:
        """After a step: 4 bits, a float32 scale for each 128, and the 16 numbers that codes stand for, for each moment.
        Tensors that are small, or not a multiple of 128, keep moments in their own dtype.
        """
        total = 0
        for one in trained_parameters(model):
            n = one.numel()
            narrow = n >= _LEAST_ELEMENTS and n % 128 == 0
            moment = n // 2 + _SINGLE_BYTES * (n // 128 + 16) if narrow else one.nbytes
            total += 2 * moment + _SINGLE_BYTES
        return total

    def step_bytes(self, model: nn.Module, *, on_cpu: bool, fused: bool) -> int:
        """None: one kernel reads and writes each element."""
        return 0
