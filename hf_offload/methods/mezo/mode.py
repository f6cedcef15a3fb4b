"""The memory mode mezo: forward passes alone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from hf_offload.errors import OffloadError
from hf_offload.methods.mezo import LOG_FILE, MeZO
from hf_offload.methods.mezo.directions import direction_bytes
from hf_offload.methods.mezo.log import STAGES
from hf_offload.methods.mezo.optimizer import HOW
from hf_offload.methods.param_groups import WeightDecay, decay_groups
from hf_offload.methods.protocol import MemoryMode, OptimizerBytes, trained_parameters
from hf_offload.settings.classes import settings
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.values import Number, Whole

if TYPE_CHECKING:
    from transformers import TrainingArguments


@settings(frozen=True, kw_only=True)
class Mezo(MemoryMode):
    """MeZO (Malladi et al., NeurIPS 2023, arXiv 2305.17333): two forward passes a step, no graph, no gradients, no state.
    Trains all weights that require gradients. In the Trainer, a batch without labels (all -100) does what it does with other
    optimizers: training goes on, and weight decay alone changes weights. In a loop of your own its loss, NaN, is an error.

    Args:
        eps: How far weights go in a random direction, and in the opposite one.
        seed: The seeds of all steps depend on it.
    """

    uses_gradients: ClassVar[bool] = False
    replaces: ClassVar[tuple[type[torch.optim.Optimizer], ...]] = (
        torch.optim.AdamW,
        torch.optim.Adam,
        torch.optim.SGD,
    )

    eps: Annotated[Number, Field(gt=0)] = 1e-3
    seed: Annotated[Whole, Field(ge=-(2**63))] = 0

    def optimizer(self, model: nn.Module, *, weight_decay: WeightDecay, **adam: Any) -> torch.optim.Optimizer:
        """:class:`MeZO` over all trainable parameters; of ``adam``, it has ``lr`` alone."""
        return MeZO(decay_groups(model, weight_decay), model, eps=self.eps, seed=self.seed, lr=adam["lr"])

    def conflicts(self, args: "TrainingArguments") -> Iterator[str]:
        """What works on gradients, and what shards or copies weights."""
        if args.max_grad_norm:
            yield (
                f"max_grad_norm={args.max_grad_norm} clips gradients, and memory_mode='mezo' has none: set max_grad_norm=0, "
                "and a lower learning rate if training is unstable."
            )
        if args.fp16:
            yield (
                "fp16=True scales the loss for gradients, which memory_mode='mezo' has not: set bf16=True, or neither, or "
                "load the model in the dtype it is to have."
            )
        if args.n_gpu > 1:
            yield (
                f"memory_mode='mezo' trains on one device in each process, and this one has {args.n_gpu}: start a process "
                "for each, as `torchrun` and `accelerate launch` do, or set CUDA_VISIBLE_DEVICES to one GPU."
            )
        if args.fsdp:
            yield (
                f"fsdp={args.fsdp} shards weights, and memory_mode='mezo' draws directions for whole ones: leave it out. "
                "With several processes, each has all weights, or takes them from a tier (offload_params)."
            )

    def conflicts_with(self, config: OffloadConfig) -> Iterator[str]:
        """What is for backward or for state."""
        refused = {
            f"tier={config.tier!r}": config.tier not in ("none", "auto"),
            f"optimizer={config.optimizer!r}": config.optimizer not in (None, "none"),
            "tiled_loss or tiled_mlp": bool(config.tiles),
            "sampled_linear": config.sampling is not None,
            "recompute_elementwise": config.elementwise is not None,
        }
        for name, is_set in refused.items():
            if is_set:
                yield f"{name} needs a backward pass, and memory_mode='mezo' has none: leave it out, or set it to 'none'."

    def begin_training(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """A backward that comes from now on is an error."""
        handles = [
            parameter.register_post_accumulate_grad_hook(_refuse_gradient)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]

        assert isinstance(optimizer, MeZO)

        def end() -> None:
            for handle in handles:
                handle.remove()
            optimizer.end_training()

        return end

    def save_beside(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """The log, with checksums of the weights."""
        assert isinstance(optimizer, MeZO)
        optimizer.save_log(folder / LOG_FILE)

    def state_bytes(self, model: nn.Module) -> int:
        """None."""
        return 0

    def optimizer_bytes(self, model: nn.Module, *, on_cpu: bool, fused: bool) -> OptimizerBytes:
        """A direction of the largest weight, of which a CPU draws a piece at a time. Weights and directions are read and
        written each time that weights move.
        """
        weights = trained_parameters(model)
        drawn = max((direction_bytes(one, on_cpu=on_cpu) for one in weights), default=0)
        return OptimizerBytes(state=0, step=0, moved=4 * STAGES * sum(one.nbytes for one in weights), buffers=drawn)


def _refuse_gradient(parameter: torch.Tensor) -> None:
    raise OffloadError(f"memory_mode='mezo' has no gradients, and backward has computed one: {HOW}.")
