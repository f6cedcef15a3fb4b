"""The memory modes there are, by name. A new one is a class in ``hf_offload/methods`` and a line here; other defaults of
an existing class are a line alone.
"""

import dataclasses
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.classes import from_mapping
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.shown import shown
from hf_offload.settings.text_files import parse_json
from hf_offload.settings.values import mapping

if TYPE_CHECKING:
    from hf_offload.methods.protocol import MemoryMode

NONE = "none"
"""All weights, with the optimizer that the training arguments name."""
OF_ADAPTERS = ("lora", "qlora")
"""Those whose checkpoints and snapshots hold what is trained alone."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A memory mode: ``module:class`` of its :class:`~hf_offload.methods.protocol.MemoryMode`, loaded when it is first
    used, and the settings whose defaults are not those of the class.
    """

    path: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def load(self) -> "type[MemoryMode]":
        """The class."""
        found: type[MemoryMode] = pkgutil.resolve_name(self.path)
        return found


_MODES = "hf_offload.methods"
_OF_PEFT = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets"}
"""What ``peft.LoraConfig`` calls a setting of adapters -> the setting."""
_EIGHT_BIT = dict.fromkeys(("state_dtype", "plain_state_dtype", "projector_dtype"), "8bit")

MODES = {
    "lora": Entry(f"{_MODES}.lora.lora:Lora"),
    "qlora": Entry(f"{_MODES}.lora.qlora:Qlora"),
    "lora_fa": Entry(f"{_MODES}.lora.lora:LoraFa"),
    "dora": Entry(f"{_MODES}.lora.lora:Dora"),
    "adamw_8bit": Entry(f"{_MODES}.low_bit:AdamW8bit"),
    "adamw_4bit": Entry(f"{_MODES}.low_bit:AdamW4bit"),
    "galore": Entry(f"{_MODES}.projected.mode:Galore"),
    "galore_8bit": Entry(f"{_MODES}.projected.mode:Galore", _EIGHT_BIT),
    "apollo": Entry(f"{_MODES}.projected.mode:Apollo"),
    "apollo_mini": Entry(f"{_MODES}.projected.mode:Apollo", {"rank": 1, "scale": 128**0.5, "scale_by": "tensor"}),
    "frugal": Entry(f"{_MODES}.projected.mode:Frugal"),
    "lisa": Entry(f"{_MODES}.blockwise.mode:Blockwise", {"blocks_active": 2, "switch_every": 20, "order": "draw"}),
    "badam": Entry(f"{_MODES}.blockwise.mode:Blockwise", {"outside": "turns"}),
    "mezo": Entry(f"{_MODES}.mezo.mode:Mezo"),
}


def mode_names() -> tuple[str, ...]:
    """All that ``memory_mode`` may be."""
    return (NONE, *MODES)


def mode_class(name: str) -> "type[MemoryMode]":
    """The class of the mode ``name``, which is not ``"none"``.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for an unknown name.
    """
    choose("memory_mode", name, mode_names())
    return MODES[name].load()


def memory_mode(name: str, settings: Any = None) -> "MemoryMode | None":
    """The mode ``name`` with ``settings``, a mapping or its JSON text; None for ``"none"``.

    Example, for a loop of your own::

        mode = memory_mode("galore", {"rank": 128})
        model = mode.prepare(model)
        optimizer = mode.optimizer(model, lr=1e-4, weight_decay=0.01)

    Raises :class:`~hf_offload.errors.OffloadConfigError` that lists all errors.
    """
    choose("memory_mode", name, mode_names())
    values = read_mode_settings(settings)
    if name == NONE:
        if values:
            raise OffloadConfigError(
                f"memory_mode_kwargs={shown(settings)} is given, but memory_mode is 'none': choose one of "
                f"{', '.join(MODES)}."
            )
        return None
    mode = mode_class(name)
    known = mode.setting_names()
    if "alpha" in known:
        values = _named_as_here(values)
    with collect_errors(f"settings of memory_mode={name!r}") as check:
        for key in [key for key in values if key not in known]:
            with check:
                others = [other for other in MODES if key in mode_class(other).setting_names()]
                raise OffloadConfigError(
                    f"memory_mode={name!r} has no setting {shown(key)}"
                    + (f" (it is one of {', '.join(others)})" if others else "")
                    + f". It has: {', '.join(known) or 'none'}."
                )
        with check:
            given = {key: value for key, value in values.items() if key in known}
            found = from_mapping(mode, {**MODES[name].defaults, **given}, f"memory_mode={name!r}")
    return found


def _named_as_here(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of adapters, which may be called as in peft."""
    twice = [f"{theirs} and {ours}" for theirs, ours in _OF_PEFT.items() if theirs in values and ours in values]
    if twice:
        raise OffloadConfigError(f"memory_mode_kwargs: {', '.join(twice)} are the same setting: drop one.")
    everywhere = {key: "all" for key, value in values.items() if isinstance(value, str) and value == "all-linear"}
    return {_OF_PEFT.get(key, key): value for key, value in {**values, **everywhere}.items()}


def read_mode_settings(settings: Any, name: str = "memory_mode_kwargs") -> Mapping[str, Any]:
    """A mapping as it is, or from its JSON text; an empty one for None.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for anything else.
    """
    if isinstance(settings, str):
        settings = parse_json(settings, f"{name}={shown(settings)}")
    if settings is None:
        return {}
    found: Mapping[str, Any] = mapping("such as {'rank': 128}")(name, settings)
    return found
