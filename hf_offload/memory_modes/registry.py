"""Memory modes by their names: what each takes, what it does to a model, and which optimizer trains it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from hf_offload.errors import OffloadConfigError
from hf_offload.memory_modes.adapters import AdapterConfig, DoraConfig, LoraFaConfig, QloraConfig
from hf_offload.memory_modes.quantised import AdamW4bitConfig, AdamW8bitConfig
from hf_offload.optimizers.blockwise import BlockwiseConfig, BlockwiseOptimizer, peak_bytes, release
from hf_offload.optimizers.param_groups import decay_groups, param_groups
from hf_offload.optimizers.projected import ApolloConfig, FrugalConfig, GaLoreConfig, ProjectedAdamW, ProjectedConfig
from hf_offload.optimizers.projected import state_bytes as count_state
from hf_offload.optimizers.projected.checks import check_parameters
from hf_offload.optimizers.projected.projections import Projection, projection_of
from hf_offload.settings.load import choose, collect_errors, from_mapping
from hf_offload.settings.schema import Directory
from hf_offload.settings.shown import shown
from hf_offload.settings.text_files import parse_json
from hf_offload.settings.values import flag, mapping, names

NONE = "none"


class MemoryMode(Protocol):
    """What is trained, and with which optimizer.

    ``takes_fused``: whether the optimizer has the option ``fused`` of ``torch.optim.AdamW``.
    """

    takes_fused: ClassVar[bool]

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model that is trained. Raises :class:`~hf_offload.errors.OffloadConfigError` where it cannot be."""
        ...

    def optimizer(self, model: nn.Module, *, weight_decay: float, **adam: Any) -> torch.optim.Optimizer:
        """Its optimizer; ``adam`` is ``lr``, ``betas``, ``eps`` and perhaps ``fused``. Raises likewise."""
        ...

    def state_bytes(self, model: nn.Module) -> int:
        """Most bytes of that optimizer's state, from the shapes of a prepared ``model``. Raises likewise."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projected:
    """All weights, with the state of chosen matrices in a small space.

    Args:
        method: :class:`GaLoreConfig`, :class:`ApolloConfig` or :class:`FrugalConfig`.
        targets: Which matrices (:func:`~hf_offload.optimizers.param_groups.param_groups`).
        update_in_backward: Whether each weight is updated as soon as its gradient is there, so that gradients never add up.
    """

    takes_fused: ClassVar[bool] = False

    method: ProjectedConfig
    targets: str | Sequence[str] = "auto"
    update_in_backward: bool = False

    def prepare(self, model: nn.Module) -> nn.Module:
        """Nothing changes."""
        return model

    def optimizer(self, model: nn.Module, *, weight_decay: float, **adam: Any) -> torch.optim.Optimizer:
        """:class:`ProjectedAdamW` over all trainable parameters."""
        groups = param_groups(model, targets=self.targets, weight_decay=weight_decay)
        return ProjectedAdamW(groups, self.method, weight_decay=weight_decay, **adam)

    def state_bytes(self, model: nn.Module) -> int:
        """The closed form, for each dtype of parameters there is."""
        shapes: dict[torch.dtype, tuple[list[tuple[int, int]], list[torch.Size]]] = {}
        checked: list[tuple[str, torch.Tensor, bool, Projection | None]] = []
        for group in param_groups(model, targets=self.targets):
            for name, parameter in group["params"]:
                projected, plain = shapes.setdefault(parameter.dtype, ([], []))
                if group["projected"]:
                    rows, columns = reversed(parameter.shape) if group["transposed"] else parameter.shape
                    projected.append((rows, columns))
                    checked.append((name, parameter, True, projection_of(self.method, (rows, columns))))
                else:
                    plain.append(parameter.shape)
        check_parameters(checked, self.method)
        return sum(count_state(*both, self.method, dtype).total for dtype, both in shapes.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blockwise:
    """A few blocks at a time, each with AdamW."""

    takes_fused: ClassVar[bool] = True

    config: BlockwiseConfig

    def prepare(self, model: nn.Module) -> nn.Module:
        """What an earlier training left frozen is free again."""
        release(model)
        return model

    def optimizer(self, model: nn.Module, *, weight_decay: float, **adam: Any) -> torch.optim.Optimizer:
        """:class:`BlockwiseOptimizer` over all trainable parameters."""
        return BlockwiseOptimizer(decay_groups(model, weight_decay), model, self.config, **adam)

    def state_bytes(self, model: nn.Module) -> int:
        """Moments, counters and float32 copies of the weights, of the turn that needs most."""
        most = peak_bytes(model, self.config)
        return most.state + most.masters


_EIGHT_BIT = dict.fromkeys(("state_dtype", "plain_state_dtype", "projector_dtype"), "8bit")
_MINI = {"rank": 1, "scale": 128**0.5, "scale_by": "tensor"}
_LISA = {"blocks_active": 2, "switch_every": 20, "order": "draw"}

# Name -> class of its settings, and what differs from that class's defaults.
_SETTINGS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "lora": (AdapterConfig, {}),
    "qlora": (QloraConfig, {}),
    "lora_fa": (LoraFaConfig, {}),
    "dora": (DoraConfig, {}),
    "adamw_8bit": (AdamW8bitConfig, {}),
    "adamw_4bit": (AdamW4bitConfig, {}),
    "galore": (GaLoreConfig, {}),
    "galore_8bit": (GaLoreConfig, _EIGHT_BIT),
    "apollo": (ApolloConfig, {}),
    "apollo_mini": (ApolloConfig, _MINI),
    "frugal": (FrugalConfig, {}),
    "lisa": (BlockwiseConfig, _LISA),
    "badam": (BlockwiseConfig, {"outside": "turns"}),
}
MODES = (NONE, *_SETTINGS)


def memory_mode(name: str, settings: Any = None, directories: Sequence[Directory] = ()) -> MemoryMode | None:
    """The mode ``name`` with ``settings``, a mapping or its JSON text; None for ``"none"``. State that goes to disk goes to
    ``directories``, if the settings name none.

    Example, for a loop of your own::

        mode = memory_mode("galore", {"rank": 128})
        model = mode.prepare(model)
        optimizer = mode.optimizer(model, lr=1e-4, weight_decay=0.01)

    Raises :class:`~hf_offload.errors.OffloadConfigError` that lists all mistakes.
    """
    choose("memory_mode", name, MODES)
    values = read_settings(settings)
    if name == NONE:
        if values:
            raise OffloadConfigError(
                f"memory_mode_kwargs={shown(settings)} is given, but memory_mode is 'none': choose one of "
                f"{', '.join(_SETTINGS)}."
            )
        return None
    kind, defaults = _SETTINGS[name]
    known_names = _names(name)
    outer: dict[str, Any] = {}
    with collect_errors(f"settings of memory_mode={name!r}") as check:
        for key in values:
            with check:
                if key not in known_names:
                    others = [other for other in _SETTINGS if key in _names(other)]
                    raise OffloadConfigError(
                        f"memory_mode={name!r} has no setting {shown(key)}"
                        + (f" (it is one of {', '.join(others)})" if others else "")
                        + f". It has: {', '.join(known_names) or 'none'}."
                    )
        of_projected = _OF_PROJECTED if issubclass(kind, ProjectedConfig) else {}
        for key in values.keys() & of_projected.keys():
            with check:
                outer[key] = of_projected[key](key, values[key])
        with check:
            known = {key: value for key, value in values.items() if key in known_names and key not in of_projected}
            found = from_mapping(kind, defaults | known, f"memory_mode={name!r}")
    if isinstance(found, ProjectedConfig):
        return Projected(method=found, **outer)
    if isinstance(found, BlockwiseConfig):
        if found.inactive_state == "ssd" and not found.directories and directories:
            found = dataclasses.replace(found, directory=directories)
        return Blockwise(config=found)
    return found


_OF_PROJECTED = {"targets": names("ends of module names", alone=("auto", "all")), "update_in_backward": flag()}


def _names(mode: str) -> list[str]:
    kind, _ = _SETTINGS[mode]
    own = [field.name for field in dataclasses.fields(kind)]
    return [*own, *_OF_PROJECTED] if issubclass(kind, ProjectedConfig) else own


def read_settings(settings: Any) -> Mapping[str, Any]:
    """A mapping as it is, or from its JSON text; an empty one for None.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for anything else.
    """
    if isinstance(settings, str):
        settings = parse_json(settings, f"memory_mode_kwargs={shown(settings)}")
    if settings is None:
        return {}
    found: Mapping[str, Any] = mapping("such as {'rank': 128}")("memory_mode_kwargs", settings)
    return found
