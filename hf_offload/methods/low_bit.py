"""AdamW with moments in 8 and 4 bits: the memory modes adamw_8bit and adamw_4bit."""

from typing import Any

import torch
from torch import nn

from hf_offload.methods.param_groups import WeightDecay, decay_groups
from hf_offload.methods.protocol import MemoryMode, load_library, trained_parameters
from hf_offload.settings.classes import settings
from hf_offload.settings.values import Flag

_SINGLE_BYTES = 4
_LEAST_ELEMENTS = 4096
"""bitsandbytes and torchao leave the moments of smaller tensors alone."""


@settings(frozen=True, kw_only=True)
class AdamW8bit(MemoryMode):
    """AdamW with moments in 8 bits (Dettmers et al., ICLR 2022, arXiv 2110.02861), from bitsandbytes. Small tensors and
    embeddings keep theirs in 32 bits.

    Args:
        paged: Moments lie in memory that CUDA moves to RAM where it runs short.
    """

    paged: Flag = False

    def optimizer(self, model: nn.Module, *, weight_decay: WeightDecay, **adam: Any) -> torch.optim.Optimizer:
        """The package's."""
        library = load_library("bitsandbytes", "adamw_8bit", "'hf-offload[low-bit]'").optim
        kind = library.PagedAdamW8bit if self.paged else library.AdamW8bit
        groups = decay_groups(model, weight_decay)
        manager = library.GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})
        made: torch.optim.Optimizer = kind(groups, **adam)
        return made

    def state_bytes(self, model: nn.Module) -> int:
        """After a step, wherever it lies if it is paged."""
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        trained = trained_parameters(model)
        narrow = [one.numel() for one in trained if one.numel() >= _LEAST_ELEMENTS and id(one) not in embeddings]
        wide = sum(one.numel() for one in trained) - sum(narrow)
        # What codes stand for is stored once for all: 256 numbers for each of the moments.
        shared = 2 * 256 * _SINGLE_BYTES if narrow else 0
        return 2 * _SINGLE_BYTES * wide + sum(2 * (n + _SINGLE_BYTES * -(-n // 256)) for n in narrow) + shared

    def step_bytes(self, model: nn.Module, *, on_cpu: bool, fused: bool) -> int:
        """None: one kernel reads and writes each element."""
        return 0


class AdamW4bit(MemoryMode):
    """AdamW with moments in 4 bits (Li et al., NeurIPS 2023, arXiv 2309.01507), from torchao."""

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
