"""Applies a memory mode to the model of a script, and puts the mode's optimizer in place of the script's."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.methods.protocol import MemoryMode
from hf_offload.methods.replaced import SHARED, replace_optimizer
from hf_offload.settings.load import refuse
from hf_offload.settings.schema import OffloadConfig

_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable", "momentum", "dampening", "nesterov")

_applied: "weakref.WeakKeyDictionary[nn.Module, AppliedMode]" = weakref.WeakKeyDictionary()


def apply_mode(model: nn.Module, config: OffloadConfig) -> "AppliedMode | None":
    """Change ``model`` in place as ``config.memory_mode`` says, unless that has been done; None without a mode.

    From here until :meth:`AppliedMode.close`, the model trains with the mode's optimizer or not at all.

    Raises :class:`~hf_offload.errors.OffloadConfigError` where the mode cannot have this model.
    """
    mode = config.mode()
    if mode is None:
        return None
    check_settings(mode, config)
    present = _applied.get(model)
    if present is None:
        present = _applied[model] = AppliedMode(mode, config.memory_mode, model)
    elif present.mode != mode:
        raise OffloadConfigError(
            f"memory_mode={config.memory_mode!r}: this model was prepared before, for memory_mode={present.name!r} with "
            "other settings: load it again."
        )
    present.open(model)
    return present


def check_settings(mode: MemoryMode, config: OffloadConfig) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` with all settings that exclude ``mode``."""
    refuse(f"settings with memory_mode={config.memory_mode!r}", mode.conflicts_with(config))


class AppliedMode:
    """A mode whose model has been prepared. It keeps neither the model nor its optimizer."""

    def __init__(self, mode: MemoryMode, name: str, model: nn.Module):
        if isinstance(model, DistributedDataParallel):
            raise OffloadConfigError(
                f"memory_mode={name!r} may add parameters, which DistributedDataParallel would not know of: attach to the "
                "model before it is wrapped."
            )
        self.mode = mode
        self.name = name
        before = list(model.parameters())
        self._before = WeakTensorKeyDictionary(dict.fromkeys(before, True))
        mode.prepare_in_place(model)
        known = {id(one) for one in before}
        self._added = {name for name, one in model.named_parameters() if id(one) not in known}
        self._end: Callable[[], None] | None = None
        self._given: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._made: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._guards: list[RemovableHandle] = []

    @property
    def uses_gradients(self) -> bool:
        """Whether there is a backward."""
        return self.mode.uses_gradients

    def check_gradients(self, method: str) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` if there are no gradients, which ``method`` works on."""
        if not self.uses_gradients:
            raise OffloadError(f"memory_mode={self.name!r} has no gradients, which {method}() works on: leave it out.")

    def open(self, model: nn.Module) -> None:
        """Go on with the optimizer of an earlier session, or refuse gradients where there is none. Idempotent."""
        made = self._made()
        if made is not None:
            self._begin(made)
        if not self._guards:
            # A loop that never prepares its optimizer would train something else than what was asked for. What it cannot do
            # without is gradients: it may call parts of the model, and leave it in eval mode.
            self._guards = [
                one.register_post_accumulate_grad_hook(self._refuse_gradient)
                for one in model.parameters()
                if one.requires_grad
            ]

    def prepare_optimizer(self, model: nn.Module, given: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """See :meth:`hf_offload.session.OffloadSession.prepare_optimizer`."""
        made = self._made()
        if made is None or given not in (made, self._given()):
            made = self._replace(model, given)
        self._begin(made)
        self._remove_guards()
        return made

    def _replace(self, model: nn.Module, given: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.end()
        groups_of = {parameter: group for group in given.param_groups for parameter in group["params"]}
        refuse(f"optimizer of memory_mode={self.name!r}", self._problems(model, given, groups_of))
        made = self._make(model, given, groups_of)
        self._given, self._made = weakref.ref(given), weakref.ref(made)
        return made

    def _make(self, model: nn.Module, given: torch.optim.Optimizer, groups_of: dict[Any, Any]) -> torch.optim.Optimizer:
        decays = [group["weight_decay"] for group in given.param_groups]

        def weight_decay(parameter: nn.Parameter, usual: bool) -> float:
            # Parameters that the mode has added are in no group.
            group = groups_of.get(parameter)
            rate: float = max(decays) * usual if group is None else group["weight_decay"]
            return rate

        first = given.param_groups[0]
        options: dict[str, Any] = {key: first[key] for key in SHARED if key in first}
        if self.mode.takes_fused and all(group.get("fused") for group in given.param_groups):
            options["fused"] = True
        made = self.mode.optimizer(model, weight_decay=weight_decay, **options)
        replace_optimizer(given, made)
        return made

    def _begin(self, made: torch.optim.Optimizer) -> None:
        if self._end is None:
            self._end = self.mode.begin_training(made)

    def end(self) -> None:
        """The training is over, or until :meth:`open`. Idempotent."""
        if self._end is not None:
            self._end()
            self._end = None

    def close(self) -> None:
        """:meth:`end`, and let the model be used without the mode's optimizer. Idempotent."""
        self.end()
        self._remove_guards()

    def _remove_guards(self) -> None:
        for handle in self._guards:
            handle.remove()
        self._guards.clear()

    def _problems(self, model: nn.Module, given: torch.optim.Optimizer, groups_of: dict[Any, Any]) -> Iterator[str]:
        kind, groups, mode = type(given), given.param_groups, f"memory_mode={self.name!r}"
        decoupled = kind is not torch.optim.Adam or all(group.get("weight_decay") == 0 for group in groups)
        if kind not in self.mode.replaces or not decoupled:
            yield (
                f"{mode} replaces {_any_of(self.mode.replaces)}, and this optimizer is "
                f"{kind.__name__}{'' if decoupled else ' with weight_decay'}: use an AdamW, or drop memory_mode."
            )
        if given.state:
            yield (
                f"{mode}: the optimizer has stepped or was loaded before, and its state would be lost: prepare it before the "
                "first step, and load into what is returned."
            )
        for key in _UNSUPPORTED:
            if any(group.get(key) for group in groups):
                yield f"{mode}: its optimizer has no {key}: leave it out."
        for key in SHARED:
            if any(group.get(key) != groups[0].get(key) for group in groups):
                yield (
                    f"{mode} has one {key} for all parameters, and the optimizer's groups differ: give all groups the same."
                )
        if self.mode.updates_in_backward():
            yield (
                f"{mode}: update_in_backward excludes clipping, accumulation and loss scaling, which cannot be checked in a "
                "loop of your own: leave it out, or use the Trainer."
            )
        known = {id(one) for one in model.parameters()}
        foreign = sum(id(one) not in known and one not in self._before for one in groups_of)
        if foreign:
            yield (f"{mode}: the optimizer has {foreign} parameters that are not the model's: make one for each model.")
        missing = [
            name
            for name, one in model.named_parameters()
            if one.requires_grad and one not in groups_of and name not in self._added
        ]
        if missing:
            yield (
                f"{mode}: {len(missing)} parameters that require gradients, such as {missing[0]}, are not in the optimizer: "
                "freeze them with requires_grad_(False), or add them."
            )

    def _refuse_gradient(self, parameter: torch.Tensor) -> None:
        if self._made() is None:
            raise OffloadError(
                f"memory_mode={self.name!r} has an optimizer of its own, which is not in use: pass yours to "
                "session.prepare_optimizer or Accelerator.prepare, and use what is returned."
            )


def _any_of(kinds: tuple[type[torch.optim.Optimizer], ...]) -> str:
    names = [f"torch.optim.{kind.__name__}" for kind in kinds]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
