"""The strategies that are measured, ours and others', each configured as its authors recommend."""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_offload.errors import OffloadConfigError
from hf_offload.reports.formats import REFERENCE
from hf_offload.settings.load import collect_errors, nearest
from hf_offload.settings.recipes import Recipe, load_recipe
from hf_offload.settings.schema import DRIVE_SETTINGS, TIER_ALIASES
from hf_offload.settings.sizes import parse_bytes
from hf_offload.training.run import AroundStep

ALL = "all"
SPILL_RAM_BUDGET = "512MiB"
"""Of ``ours:spill`` where the recipe names no ``ram_budget``."""

_NO_OFFLOAD = "offload={tier: none}"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to spend memory: changes to a recipe, and what every training step runs inside of."""

    name: str
    overrides: tuple[str, ...]
    source: str
    """Where the settings come from: what is run, and where it is described."""
    must_match: str | None = None
    """The strategy whose losses and weights it has to repeat bit by bit; ``None`` for those of others, who may differ."""
    differs_by: str | None = None
    """Why losses are not meant to equal the baseline's: ``"other rounding"`` or ``"estimates"``; ``None``: they are."""
    around_step: AroundStep | None = None
    package: str | None = None
    """What has to be installed."""
    open_settings: tuple[str, ...] = ()
    """Changes to settings of the section offload that apply only where the recipe leaves them open."""

    @property
    def is_ours(self) -> bool:
        """Whether a failure is a defect of this package."""
        return self.must_match is not None or self.differs_by is not None

    @property
    def is_installed(self) -> bool:
        """Whether the package it needs can be imported."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def load(self, recipe: str, overrides: Sequence[str]) -> Recipe:
        """The recipe as this strategy runs it."""
        everything = (*overrides, *self.overrides)
        loaded = load_recipe(recipe, everything)
        still_open = [
            change
            for change in self.open_settings
            if getattr(loaded.offload, change.partition("=")[0].removeprefix("offload.")) is None
        ]
        return load_recipe(recipe, (*everything, *still_open)) if still_open else loaded


# ------------------------------------------------------------------------------------------------------- others' ways


def _recompute(kwargs: str | None = None, on: bool = True) -> tuple[str, ...]:
    """Overrides for activation checkpointing."""
    from transformers import TrainingArguments

    # transformers 5.23 renamed the argument, and warns about the old name.
    renamed = hasattr(TrainingArguments, "activation_checkpointing")
    name = f"training.{'activation' if renamed else 'gradient'}_checkpointing"
    return (f"{name}={'true' if on else 'false'}", f"{name}_kwargs={kwargs or 'null'}")


def _save_on_cpu(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    # Pinned memory is an accelerator's: without one there is nothing to pin for.
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.accelerator.is_available())


def _trl(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    return get_act_offloading_ctx_manager(model=model)


# Peers run with their defaults, and each source names those that matter: they are what its authors advise.
_RECOMPUTE_SOURCE = (
    "transformers Trainer(activation_checkpointing=True): PreTrainedModel.activation_checkpointing_enable, "
    "torch.utils.checkpoint with use_reentrant=False, every layer"
)
_TRL_SOURCE = (
    "trl.models.activation_offloading.get_act_offloading_ctx_manager round training_step, as trl.SFTTrainer has it with "
    "activation_offloading=True: use_pin_memory=True, use_streams=True, min_offload_size=1024, max_fwd_stash_size=5, the "
    "output head left out"
)


def _others() -> list[Strategy]:
    plain = (_NO_OFFLOAD, *_recompute(on=False))
    return [
        Strategy(REFERENCE, plain, "no offloading: autograd keeps what it saves", must_match=REFERENCE),
        Strategy("recompute", (_NO_OFFLOAD, *_recompute()), _RECOMPUTE_SOURCE),
        Strategy(
            "recompute+offload",
            (_NO_OFFLOAD, *_recompute("{offload: true}")),
            "transformers Trainer(activation_checkpointing=True, activation_checkpointing_kwargs={'offload': True}): "
            "torch.autograd.graph.save_on_cpu(pin_memory=True) round each checkpointed layer",
        ),
        Strategy(
            "save_on_cpu",
            plain,
            "torch.autograd.graph.save_on_cpu(pin_memory=True) round the step, without pinning where there is no "
            "accelerator: https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu",
            around_step=_save_on_cpu,
        ),
        Strategy("trl", plain, _TRL_SOURCE, around_step=_trl, package="trl"),
        Strategy(
            "trl+recompute",
            (_NO_OFFLOAD, *_recompute()),
            f"{_TRL_SOURCE}; with gradient_checkpointing=True, SFTConfig's default",
            around_step=_trl,
            package="trl",
        ),
    ]


# ------------------------------------------------------------------------------------------------------------ our ways

_NO_BUDGET = "offload.memory_budget=null"  # tiers that move everything have none
# A recipe's directory and its limits are for files, which the RAM tier has none of.
_NO_FILES = (
    _NO_BUDGET,
    *(f"offload.{name}=null" for name in DRIVE_SETTINGS),
)
_AUTO = ("offload.tier=auto", "offload.keep_last_count=0", "offload.read_ahead_bytes=null")
_ONLY_DISK = ("offload.tier=ssd", "offload.ram_budget=null", _NO_BUDGET)


def _ours() -> list[Strategy]:
    plain = _recompute(on=False)
    ssd, nothing = (*_ONLY_DISK, *plain), (_NO_OFFLOAD, *plain)
    return [
        Strategy("ours:ram", (*_NO_FILES, "offload.tier=ram", *plain), "OffloadConfig(tier='ram')", REFERENCE),
        Strategy("ours:ssd", ssd, "OffloadConfig(tier='ssd')", REFERENCE),
        Strategy(
            "ours:spill",
            ("offload.tier=ssd", _NO_BUDGET, *plain),
            f"OffloadConfig(tier='ssd', ram_budget=that of the recipe, otherwise {SPILL_RAM_BUDGET})",
            REFERENCE,
            open_settings=(f"offload.ram_budget={SPILL_RAM_BUDGET}",),
        ),
        Strategy(
            "ours:auto",
            (*_AUTO, *plain),
            "OffloadConfig(tier='auto'): within the recipe's memory_budget, otherwise 90 % of what the device can give",
            REFERENCE,
        ),
        Strategy(
            "ours:ssd+tiled",
            (*ssd, "offload.tiled_loss=auto"),
            "OffloadConfig(tier='ssd', tiled_loss='auto'): output head and loss a few tokens at a time, besides",
            differs_by="other rounding",
        ),
        Strategy(
            "ours:elementwise",
            (*nothing, "offload.recompute_elementwise=exact"),
            "OffloadConfig(tier='none', recompute_elementwise='exact'): elementwise results are recomputed, masks are bits",
            REFERENCE,
        ),
        Strategy(
            "ours:ssd+elementwise",
            (*ssd, "offload.recompute_elementwise=exact"),
            "OffloadConfig(tier='ssd', recompute_elementwise='exact')",
            REFERENCE,
        ),
        Strategy(
            "ours:sampled",
            (*nothing, "offload.sampled_linear=0.3"),
            "OffloadConfig(tier='none', sampled_linear=0.3): weight gradients from 30 % of the inputs' rows",
            differs_by="estimates",
        ),
        Strategy(
            "ours:ssd+sampled",
            (*ssd, "offload.sampled_linear=0.3"),
            "OffloadConfig(tier='ssd', sampled_linear=0.3)",
            differs_by="estimates",
        ),
        # Whether checkpointing repeats the baseline's bits is not up to us.
        Strategy(
            "ours+recompute",
            (*_ONLY_DISK, *_recompute()),
            "OffloadConfig(tier='ssd') and activation checkpointing: what is left, the layers' inputs, is offloaded",
            "recompute",
        ),
    ]


_SIZES = {"ours:ssd": "read_ahead_bytes", "ours:auto": "memory_budget"}
"""Strategies that take a size after an @ -> the setting that it is."""


# --------------------------------------------------------------------------------------------------------------- choice


def strategy_names() -> list[str]:
    """All names, in the order of tables."""
    return [strategy.name for strategy in (*_others(), *_ours())]


def find_strategy(name: str) -> Strategy:
    """The strategy of that name; ``ours:ssd@64MiB`` fixes the read-ahead, ``ours:auto@20GiB`` the budget.

    Raises :class:`~hf_offload.errors.OffloadConfigError` with the nearest name if there is none.
    """
    family, at, window = name.partition("@")
    kind, colon, tier = family.partition(":")
    family = f"ours:{TIER_ALIASES.get(tier, tier)}" if kind == "ours" and colon else family
    known = {strategy.name: strategy for strategy in (*_others(), *_ours())}
    if family not in known or (at and family not in _SIZES):
        raise OffloadConfigError(
            f"strategy {name!r} is unknown: choose from {', '.join(known)}, or {ALL}.{nearest(name, known)}"
        )
    found = known[family]
    if not at:
        return found
    setting = _SIZES[family]
    return dataclasses.replace(
        found,
        name=f"{family}@{window}",
        overrides=(*found.overrides, f"offload.{setting}={parse_bytes(window, setting)}"),
        source=f"OffloadConfig(tier={family.partition(':')[2]!r}, {setting}={window!r})",
    )


def parse_strategies(names: str, read_ahead: str | None = None, reference: bool = True) -> list[Strategy]:
    """``"baseline,recompute,ours:ssd"`` to strategies, or ``"all"``.

    With ``reference``, ``baseline`` must be among them: the others are compared with it. ``read_ahead`` such as
    ``"64MiB,128MiB"`` adds ``ours:ssd`` once for each window.
    """
    asked = strategy_names() if names.strip() == ALL else [part.strip() for part in names.split(",")]
    asked += [f"ours:ssd@{window.strip()}" for window in read_ahead.split(",")] if read_ahead else []
    strategies: list[Strategy] = []
    with collect_errors("strategies") as check:
        for name in asked:
            with check:
                strategy = find_strategy(name)
                if strategy.name in [other.name for other in strategies]:
                    raise OffloadConfigError(f"strategy {strategy.name!r} is given twice: use --rounds to repeat.")
                strategies.append(strategy)
        with check:
            if reference and REFERENCE not in [strategy.name for strategy in strategies]:
                raise OffloadConfigError(
                    f"strategies={names!r} leaves out {REFERENCE!r}, which the others are compared with."
                )
    return strategies
