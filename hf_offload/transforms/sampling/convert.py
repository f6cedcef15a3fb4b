"""Making linear layers sampled ones, and back.

A layer's class is swapped, and nothing else of it changes: its parameters, its place in the state dict, what adapters and
tied heads hold of it. So checkpoints know nothing of sampling, and LoRA finds an ``nn.Linear``.
"""

import dataclasses
import logging
import re
import weakref
from collections.abc import Iterator

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from hf_offload.errors import OffloadConfigError
from hf_offload.optimizers.blockwise.freezing import is_waiting
from hf_offload.settings.load import nearest
from hf_offload.settings.sampling import GRADIENT_CACHE, SampledLinearConfig
from hf_offload.structure.units import find_blocks
from hf_offload.transforms.sampling.gradient_cache import GradientCache, TakeSampleIds
from hf_offload.transforms.sampling.linear import Draws, NoteMask, SampledConv1D, SampledLinear

logger = logging.getLogger(__name__)

# Subclasses (quantised layers, parallel ones) have forwards of their own and are left alone.
_SAMPLED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: SampledLinear, Conv1D: SampledConv1D}
_USUAL = {sampled: usual for usual, sampled in _SAMPLED.items()}
# The projection of attention's output: its input is what attention itself saves.
_ATTENTION_OUTPUT = re.compile(
    r"(attn|attention|self_attn|SelfAttention|EncDecAttention|crossattention)(\.self)?\.(o_proj|out_proj|c_proj|o|dense)$"
    r"|attention\.output\.dense$|attention\.dense$"
)


class Sampling:
    """The sampled layers of one model, which it does not keep: made by :meth:`apply`, taken off by :meth:`remove`."""

    def __init__(self, model: nn.Module, config: SampledLinearConfig | None):
        self._model = weakref.ref(model)
        self._config = config
        self._handles: list[RemovableHandle] = []
        self.names: tuple[str, ...] = ()
        self.cache: GradientCache | None = None

    def apply(self) -> None:
        """Convert what was asked for.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if there is nothing to convert.
        """
        model = self._model()
        if self._config is None or not self._config.samples or model is None:
            return
        self.names = convert_linears(model, self._config).converted
        draws = model.get_submodule(self.names[0]).draws
        assert isinstance(draws, Draws)
        self._handles.append(model.register_forward_pre_hook(NoteMask(draws), prepend=True, with_kwargs=True))
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            logger.warning(
                "Activation checkpointing keeps nothing of a block but its input, so sampling its linear layers saves no "
                "memory: drop one of them."
            )

    @property
    def caches_gradients(self) -> bool:
        """Whether it has to be told which samples there are."""
        return bool(self.names) and self._config is not None and self._config.probabilities == GRADIENT_CACHE

    def start_cache(self, samples: int) -> GradientCache:
        """Remember from now on how large the gradients of each of ``samples`` are. Idempotent."""
        model = self._model()
        if self.cache is None:
            assert model is not None, "a model is being trained"
            layers = [model.get_submodule(name) for name in self.names]
            self.cache = GradientCache(samples, self.names, layers[0].weight.device)  # type: ignore[arg-type]
            for layer in layers:
                layer.draws.cache = self.cache  # type: ignore[union-attr]
            hook = TakeSampleIds(self.cache)
            self._handles.append(model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        return self.cache

    def remove(self) -> None:
        """Make every layer a usual one again. Idempotent."""
        while self._handles:
            self._handles.pop().remove()
        self.cache = None
        model = self._model()
        if model is not None:
            for name in self.names:
                _restore(model.get_submodule(name))
        self.names = ()


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What was converted, and why the rest was not: by the name of the module."""

    converted: tuple[str, ...]
    left: dict[str, str]


def convert_linears(model: nn.Module, config: SampledLinearConfig) -> ConversionReport:
    """Let the linear layers that ``config.targets`` names estimate the gradient of their weight.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if targets match nothing; the model is unchanged then.
    """
    chosen, left = chosen_linears(model, config)
    draws = Draws(config)
    for name, module in chosen.items():
        module.__class__ = _SAMPLED[type(module)]
        # Neither parameters nor buffers: plain attributes.
        module.draws, module.sampled_as = draws, name  # type: ignore[assignment]
    logger.info(
        "%d linear layers estimate the gradient of their weight (%s, %g of the input): right on average, not each time.",
        len(chosen),
        config.estimator,
        config.ratio,
    )
    return ConversionReport(tuple(chosen), left)


def chosen_linears(model: nn.Module, config: SampledLinearConfig) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The layers that ``config.targets`` names, by name, and why each of the others is left alone.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if targets match nothing.
    """
    chosen: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for name, module in _linears(model):
        why = _why_not(name, module, model, config)
        if why is None:
            chosen[name] = module
        else:
            left[name] = why
    if not chosen:
        raise OffloadConfigError(_nothing_matches(config, left))
    return chosen, left


def restore_linears(model: nn.Module) -> int:
    """Make all sampled layers usual ones again; how many there were."""
    found = [module for module in model.modules() if type(module) in _USUAL]
    for module in found:
        _restore(module)
    return len(found)


def _restore(module: nn.Module) -> None:
    module.__class__ = _USUAL.get(type(module), type(module))
    for attribute in ("draws", "sampled_as"):
        vars(module).pop(attribute, None)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            yield name, module


def _why_not(name: str, module: nn.Module, model: nn.Module, config: SampledLinearConfig) -> str | None:
    if type(module) in _USUAL:
        return "it is sampled already"
    if type(module) not in _SAMPLED:
        return f"a {type(module).__name__} has a forward of its own"
    if not module.weight.requires_grad and not is_waiting(module.weight):  # type: ignore[union-attr, arg-type]
        return "its weight is frozen, so its input is not saved"
    if isinstance(config.targets, str):
        if config.targets == "all":
            return None
        if not any(name == block or name.startswith(f"{block}.") for block in find_blocks(model)):
            return "it is outside of the repeated blocks"
        if ".lora_B." in name:
            return "its input has only the rank of the adapter"
        plain = name.removesuffix(".default").removesuffix(".lora_A").removesuffix(".base_layer")
        if _ATTENTION_OUTPUT.search(plain):
            return "its input is what attention saves anyway"
        return None
    if not any(name == target or name.endswith(f".{target}") for target in config.targets):
        return "no target names it"
    return None


def _nothing_matches(config: SampledLinearConfig, left: dict[str, str]) -> str:
    kinds = sorted({re.sub(r"\.\d+\.", ".N.", name) for name in left})
    wanted = config.targets if isinstance(config.targets, str) else ", ".join(config.targets)
    reasons = "; ".join(sorted(set(left.values()))) or "there is none"
    hint = nearest(wanted, {name.rpartition(".")[2] for name in left}) if not isinstance(config.targets, str) else ""
    return (
        f"targets={wanted!r} matches no linear layer that can be sampled ({reasons}).{hint} "
        f"Linear layers of this model: {', '.join(kinds) or 'none'}."
    )
