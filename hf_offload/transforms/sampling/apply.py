"""Converting linear layers to sampled ones, and back.

A layer's class is swapped, and nothing else of it changes: its parameters, its place in the state dict, what adapters and
tied heads hold of it. So checkpoints do not depend on sampling, and LoRA finds an ``nn.Linear``.
"""

import dataclasses
import logging
import re
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_offload.optimizers.blockwise.freezing import is_waiting
from hf_offload.settings.sampling import SampledLinearConfig
from hf_offload.structure.linears import choose_linears, outside_of_blocks
from hf_offload.surgery import Undo, swap_class
from hf_offload.transforms.sampling.linear import Draws, NoteMask, SampledConv1D, SampledLinear
from hf_offload.transforms.transform import Transform

logger = logging.getLogger(__name__)

# Subclasses (quantised layers, parallel ones) have forwards of their own and are left alone.
_SAMPLED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: SampledLinear, Conv1D: SampledConv1D}
# The projection of attention's output: its input is what attention itself saves.
_ATTENTION_OUTPUT = re.compile(
    r"(attn|attention|self_attn|SelfAttention|EncDecAttention|crossattention)(\.self)?\.(o_proj|out_proj|c_proj|o|dense)$"
    r"|attention\.output\.dense$|attention\.dense$"
)


class Sampling(Transform):
    """Makes linear layers of a model estimate the gradient of their weight."""

    def __init__(self, model: nn.Module, config: SampledLinearConfig | None):
        super().__init__(model)
        self._config = config

    def apply(self) -> None:
        """Convert what was asked for.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if there is nothing to convert.
        """
        if self._config is None or not self._config.samples:
            return
        conversion = convert_linears(self.model, self._config)
        for name, change in conversion.changes.items():
            self.note(change, name)
        self.note(self.model.register_forward_pre_hook(NoteMask(conversion.draws), prepend=True, with_kwargs=True))
        self.warn_if_checkpointed("sampling its linear layers saves")


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What was converted, and why the rest was not: by the name of the module. ``draws`` is what the converted share."""

    changes: dict[str, Undo[nn.Module]]
    left: dict[str, str]
    draws: Draws

    def restore(self) -> None:
        """Make them usual layers again. Idempotent."""
        for change in self.changes.values():
            change.remove()


def convert_linears(model: nn.Module, config: SampledLinearConfig) -> Conversion:
    """Let the linear layers that ``config.targets`` names estimate the gradient of their weight.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if targets match nothing; the model is unchanged then.
    """
    chosen, left = sampled_linears(model, config)
    draws = Draws(config)
    logger.info(
        "%d linear layers estimate the gradient of their weight (%s, %g of the input): right on average, not each time.",
        len(chosen),
        config.estimator,
        config.ratio,
    )
    changes = {name: swap_class(module, _SAMPLED[type(module)], draws=draws) for name, module in chosen.items()}
    return Conversion(changes, left, draws)


def sampled_linears(model: nn.Module, config: SampledLinearConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """The layers that ``config.targets`` names, by name, and why each of the others is left alone.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if targets match nothing.
    """
    outside = outside_of_blocks(model)

    def saved_anyway(name: str, layer: Any) -> str | None:
        return None if config.targets == "all" else outside(name, layer) or _saved_anyway(name)

    return choose_linears(model, config.targets, _unfit, saved_anyway)


def _unfit(name: str, layer: Any) -> str | None:
    if type(layer) in _SAMPLED.values():
        return "it is sampled already"
    if type(layer) not in _SAMPLED:
        return f"a {type(layer).__name__} has a forward of its own"
    frozen = not layer.weight.requires_grad and not is_waiting(layer.weight)
    return "its weight is frozen, so its input is not saved" if frozen else None


def _saved_anyway(name: str) -> str | None:
    if ".lora_B." in name:
        return "its input has only the rank of the adapter"
    plain = name.removesuffix(".default").removesuffix(".lora_A").removesuffix(".base_layer")
    return "its input is what attention saves anyway" if _ATTENTION_OUTPUT.search(plain) else None
