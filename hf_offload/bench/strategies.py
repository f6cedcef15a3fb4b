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
        return load_recipe(recipe, (*overrides, *self.overrides))


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
    plain, recompute = (_NO_OFFLOAD, *_recompute(on=False)), (_NO_OFFLOAD, *_recompute())
    return [
        Strategy(REFERENCE, plain, "no offloading: autograd keeps what it saves", must_match=REFERENCE),
        Strategy("recompute", recompute, _RECOMPUTE_SOURCE),
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
            recompute,
            f"{_TRL_SOURCE}; with gradient_checkpointing=True, SFTConfig's default",
            around_step=_trl,
            package="trl",
        ),
    ]


# ------------------------------------------------------------------------------------------------------------ our ways

_OURS = (
    "ours:ram", "ours:ssd", "ours:spill", "ours:auto", "ours:ssd+tiled", "ours:elementwise", "ours:ssd+elementwise",
    "ours:sampled", "ours:ssd+sampled", "ours+recompute",
)  # fmt: skip
"""A tier, and what is done in addition; without a tier, nothing moves, except that checkpointed inputs go to a drive."""

_NO_BUDGET = "offload.memory_budget=null"  # tiers that move everything have none
_TIERS = {
    "none": (_NO_OFFLOAD,),
    # A recipe's directory and its limits are for files, which the RAM tier has none of.
    "ram": (_NO_BUDGET, *(f"offload.{name}=null" for name in DRIVE_SETTINGS), "offload.tier=ram"),
    "ssd": ("offload.tier=ssd", "offload.ram_budget=null", _NO_BUDGET),
    "spill": ("offload.tier=ssd", _NO_BUDGET),
    "auto": ("offload.tier=auto", "offload.keep_last_count=0", "offload.read_ahead_bytes=null"),
}
# What is done in addition -> the setting, and why losses are not meant to be the baseline's.
_ADDITIONS = {
    "tiled": ("tiled_loss=auto", "other rounding"),
    "elementwise": ("recompute_elementwise=exact", None),
    "sampled": ("sampled_linear=0.3", "estimates"),
}
_SIZES = {"ssd": "read_ahead_bytes", "spill": "ram_budget", "auto": "memory_budget"}
"""Tiers that take a size after an @ -> the setting that it is."""
_SPILL_RAM_BUDGET = "512MiB"
"""Of ``ours:spill`` without a size."""


def _ours(name: str) -> Strategy:
    known, at, size = name.partition("@")
    tier, _, addition = known.removeprefix("ours").removeprefix(":").partition("+")
    if tier in _ADDITIONS:
        tier, addition = "none", tier
    tier = tier or "ssd"
    overrides, settings, differs_by = _TIERS[tier], [], None
    if addition in _ADDITIONS:
        setting, differs_by = _ADDITIONS[addition]
        settings.append(setting)
    if tier == "spill" and not at:
        at, size = "@", _SPILL_RAM_BUDGET
    if at:
        settings.append(f"{_SIZES[tier]}={parse_bytes(size, _SIZES[tier])}")
    recomputes = addition == "recompute"
    asked = ", ".join([f"tier={'ssd' if tier == 'spill' else tier}", *settings])
    return Strategy(
        name,
        (*overrides, *(f"offload.{setting}" for setting in settings), *_recompute(on=recomputes)),
        f"OffloadConfig({asked}){' and activation checkpointing' if recomputes else ''}",
        # Whether checkpointing repeats the baseline's bits is not up to us.
        None if differs_by else "recompute" if recomputes else REFERENCE,
        differs_by,
    )


# --------------------------------------------------------------------------------------------------------------- choice


def strategy_names() -> list[str]:
    """All names, in the order of tables."""
    return [*(strategy.name for strategy in _others()), *_OURS]


def find_strategy(name: str) -> Strategy:
    """The strategy of that name; ``ours:ssd@64MiB`` fixes the read-ahead, ``ours:spill@1GiB`` the RAM, and
    ``ours:auto@20GiB`` the budget.

    Raises :class:`~hf_offload.errors.OffloadConfigError` with the nearest name if there is none.
    """
    family, at, size = name.partition("@")
    kind, colon, tier = family.partition(":")
    if kind == "ours" and colon:
        tier = TIER_ALIASES.get(tier, tier)
        family = f"ours:{tier}"
    known = strategy_names()
    if family not in known or (at and not (colon and tier in _SIZES)):
        raise OffloadConfigError(
            f"strategy {name!r} is unknown: choose from {', '.join(known)}, or {ALL}.{nearest(name, known)}"
        )
    if family in _OURS:
        return _ours(f"{family}{at}{size}")
    return next(strategy for strategy in _others() if strategy.name == family)


def parse_strategies(names: str, reference: bool = True) -> list[Strategy]:
    """``"baseline,recompute,ours:ssd"`` to strategies, or ``"all"``.

    With ``reference``, ``baseline`` must be among them: the others are compared with it.
    """
    asked = strategy_names() if names.strip() == ALL else [part.strip() for part in names.split(",")]
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
