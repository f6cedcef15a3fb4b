"""All weights trained, with AdamW's moments in few bits: from bitsandbytes and torchao."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn

from hf_offload.errors import OffloadConfigError
from hf_offload.memory_modes.adapters import bitsandbytes_for
from hf_offload.optimizers.param_groups import decay_groups
from hf_offload.settings.values import flag, read_fields, setting

_SINGLE_BYTES = 4
# Both packages leave smaller tensors alone.
_LEAST_ELEMENTS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW8bitConfig:
    """AdamW with moments in 8 bits (Dettmers et al., ICLR 2022, arXiv 2110.02861), from bitsandbytes. Small tensors and
    embeddings keep theirs in 32 bits.

    Args:
        paged: Moments lie in memory that CUDA moves to RAM where it runs short.
    """

    name: ClassVar[str] = "adamw_8bit"
    takes_fused: ClassVar[bool] = False

    paged: bool = setting(False, flag())

    def __post_init__(self) -> None:
        with read_fields(self, f"settings of {self.name}"):
            pass

    def prepare(self, model: nn.Module) -> nn.Module:
        """Nothing changes."""
        return model

    def optimizer(self, model: nn.Module, *, weight_decay: float, **adam: Any) -> torch.optim.Optimizer:
        """The package's."""
        bitsandbytes = bitsandbytes_for(self.name)
        kind = bitsandbytes.optim.PagedAdamW8bit if self.paged else bitsandbytes.optim.AdamW8bit
        groups = decay_groups(model, weight_decay)
        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})
        return kind(groups, **adam)

    def state_bytes(self, model: nn.Module) -> int:
        """Of that optimizer after a step, wherever it lies if it is paged."""
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        trained = [one for one in model.parameters() if one.requires_grad]
        narrow = [one.numel() for one in trained if one.numel() >= _LEAST_ELEMENTS and id(one) not in embeddings]
        wide = sum(one.numel() for one in trained) - sum(narrow)
        # What codes stand for is stored once for all: 256 numbers for each of the moments.
        shared = 2 * 256 * _SINGLE_BYTES if narrow else 0
        return 2 * _SINGLE_BYTES * wide + sum(2 * (n + _SINGLE_BYTES * -(-n // 256)) for n in narrow) + shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW4bitConfig:
    """AdamW with moments in 4 bits (Li et al., NeurIPS 2023, arXiv 2309.01507), from torchao."""

    name: ClassVar[str] = "adamw_4bit"
    takes_fused: ClassVar[bool] = False

    def prepare(self, model: nn.Module) -> nn.Module:
        """Nothing changes."""
        return model

    def optimizer(self, model: nn.Module, *, weight_decay: float, **adam: Any) -> torch.optim.Optimizer:
        """The package's."""
        try:
            from torchao.optim import AdamW4bit
        except ImportError as error:
            raise OffloadConfigError("memory_mode='adamw_4bit' needs torchao: pip install torchao.") from error
        return AdamW4bit(decay_groups(model, weight_decay), **adam)

    def state_bytes(self, model: nn.Module) -> int:
        """Of that optimizer after a step: 4 bits, a float32 scale for each 128, and the 16 numbers that codes stand for, for
        each moment. Tensors that are small, or no multiple of 128, keep moments in their own dtype.
        """
        total = 0
        for one in model.parameters():
            if one.requires_grad:
                n = one.numel()
                narrow = n >= _LEAST_ELEMENTS and n % 128 == 0
                moment = n // 2 + _SINGLE_BYTES * (n // 128 + 16) if narrow else one.nbytes
                total += 2 * moment + _SINGLE_BYTES
        return total
