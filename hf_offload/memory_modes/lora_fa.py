"""The memory mode lora_fa."""

import dataclasses
import types
from typing import Any, ClassVar

import torch
from torch import nn

from hf_offload.errors import OffloadConfigError
from hf_offload.memory_modes.lora import Lora
from hf_offload.memory_modes.protocol import trained_parameters
from hf_offload.optimizers.param_groups import WeightDecay


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraFa(Lora):
    """LoRA-FA (Zhang et al. 2023, arXiv 2308.03303): first matrices stay frozen, so their inputs are not saved."""

    name: ClassVar[str] = "lora_fa"
    takes_fused: ClassVar[bool] = False

    def prepare(self, model: nn.Module, **options: Any) -> nn.Module:
        """As LoRA has it, with the first matrices frozen."""
        adapted = super().prepare(model, **options)
        for name, parameter in adapted.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad_(False)
        return adapted

    def optimizer(self, model: nn.Module, *, weight_decay: WeightDecay, **adam: Any) -> torch.optim.Optimizer:
        """The optimizer of peft, which corrects the gradients of the second matrices for the first."""
        from peft import PeftModel
        from peft.optimizers import create_lorafa_optimizer

        adapted: Any = model
        if not isinstance(model, PeftModel):  # its adapters are in a model that a script holds
            adapted = types.SimpleNamespace(
                active_adapters=list(adapted.peft_config),
                peft_config=adapted.peft_config,
                named_parameters=model.named_parameters,
                get_submodule=model.get_submodule,
            )
        if callable(weight_decay):
            rates = {weight_decay(one, True) for one in trained_parameters(model)}
            if len(rates) > 1:
                raise OffloadConfigError(
                    f"memory_mode='lora_fa' has one weight_decay for all parameters, and the optimizer has {rates}: "
                    "give all groups the same, or use memory_mode='lora'."
                )
            (weight_decay,) = rates
        alpha: Any = 2 * self.rank if self.alpha is None else self.alpha
        made = create_lorafa_optimizer(adapted, self.rank, alpha, lr=adam["lr"], weight_decay=weight_decay)
        for group in made.param_groups:
            group["betas"], group["eps"] = adam["betas"], adam["eps"]
        return made

    def state_bytes(self, model: nn.Module) -> int:
        """Two moments of each trained weight; steps are counted in Python."""
        return sum(2 * one.nbytes for one in trained_parameters(model))

    def step_bytes(self, model: nn.Module, *, on_cpu: bool, fused: bool) -> int:
        """One weight after the other, on every device."""
        return super().step_bytes(model, on_cpu=True, fused=fused)
