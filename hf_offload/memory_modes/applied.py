"""A memory mode on a model that a script holds, and the mode's optimizer in place of the one that the script has made.

Note: schedulers
    A learning-rate scheduler keeps the optimizer that it was made with, and writes to its groups. That optimizer stays as the
    place it writes to: before each step the new one takes over the values that have changed there. Its own ``step`` raises.
"""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.settings.load import collect_errors
from hf_offload.settings.schema import OffloadConfig
from hf_offload.surgery import InertInCopies

if TYPE_CHECKING:
    from hf_offload.memory_modes.protocol import MemoryMode

_SHARED = ("lr", "betas", "eps")
_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")

_applied: "weakref.WeakKeyDictionary[nn.Module, AppliedMode]" = weakref.WeakKeyDictionary()


def apply_mode(model: nn.Module, config: OffloadConfig) -> "AppliedMode | None":
    """Change ``model`` in place as ``config.memory_mode`` says, unless that has been done; None without a mode.

    Raises :class:`~hf_offload.errors.OffloadConfigError` where the mode cannot have this model.
    """
    mode = config.mode()
    if mode is None:
        return None
    present = _applied.get(model)
    if present is None:
        present = _applied[model] = AppliedMode(mode, config.memory_mode, model)
    elif present.mode != mode:
        raise OffloadConfigError(
            f"memory_mode={config.memory_mode!r}: this model was prepared before, for memory_mode={present.name!r} with "
            "other settings: load it again."
        )
    return present


class AppliedMode:
    """A mode whose model has been prepared. It does not keep the model."""

    def __init__(self, mode: "MemoryMode", name: str, model: nn.Module):
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
        # A loop that never prepares its optimizer would train something else than what was asked for.
        self._waits = model.register_forward_pre_hook(InertInCopies(self._refuse_forward))

    def prepare_optimizer(self, model: nn.Module, given: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """See :meth:`hf_offload.session.OffloadSession.prepare_optimizer`."""
        self.end()
        groups_of = {parameter: group for group in given.param_groups for parameter in group["params"]}
        self._check(model, given, groups_of)
        decays = [group["weight_decay"] for group in given.param_groups]

        def weight_decay(parameter: nn.Parameter, usual: bool) -> float:
            # Parameters that the mode has added are in no group.
            group = groups_of.get(parameter)
            rate: float = max(decays) * usual if group is None else group["weight_decay"]
            return rate

        options: dict[str, Any] = {key: given.param_groups[0][key] for key in _SHARED}
        if self.mode.takes_fused and all(group.get("fused") for group in given.param_groups):
            options["fused"] = True
        made = self.mode.optimizer(model, weight_decay=weight_decay, **options)
        _take_the_place(made, given)
        self._end = self.mode.begin_training(made)
        self._waits.remove()
        return made

    def end(self) -> None:
        """The training is over, for now. Idempotent."""
        if self._end is not None:
            self._end()
            self._end = None

    def close(self) -> None:
        """:meth:`end`, and let the model be used without the mode's optimizer. Idempotent."""
        self.end()
        self._waits.remove()

    def _check(self, model: nn.Module, given: torch.optim.Optimizer, groups_of: dict[Any, Any]) -> None:
        kind, groups = type(given), given.param_groups
        with collect_errors(f"optimizer of memory_mode={self.name!r}") as check:
            with check:
                decoupled = kind is torch.optim.AdamW or all(group.get("weight_decay") == 0 for group in groups)
                if kind not in (torch.optim.AdamW, torch.optim.Adam) or not decoupled:
                    raise OffloadConfigError(
                        f"memory_mode={self.name!r} replaces torch.optim.AdamW, and this optimizer is {kind.__name__}"
                        f"{'' if decoupled else ' with weight_decay'}: use an AdamW, or drop memory_mode."
                    )
            with check:
                if given.state:
                    raise OffloadConfigError(
                        f"memory_mode={self.name!r}: the optimizer has stepped or was loaded before, and its state would be "
                        "lost: prepare it before the first step, and load into what is returned."
                    )
            for key in _UNSUPPORTED:
                with check:
                    if any(group.get(key) for group in groups):
                        raise OffloadConfigError(
                            f"memory_mode={self.name!r}: its optimizer has no {key}: leave it out."
                        )
            for key in _SHARED:
                with check:
                    if any(group.get(key) != groups[0].get(key) for group in groups):
                        raise OffloadConfigError(
                            f"memory_mode={self.name!r} has one {key} for all parameters, and the optimizer's groups differ: "
                            "give all groups the same."
                        )
            with check:
                if self.mode.updates_in_backward():
                    raise OffloadConfigError(
                        f"memory_mode={self.name!r}: update_in_backward excludes clipping, accumulation and loss scaling, "
                        "which cannot be checked in a loop of your own: leave it out, or use the Trainer."
                    )
            with check:
                _check_members(model, groups_of, self._added, self._before, self.name)

    def _refuse_forward(self, model: nn.Module, inputs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            raise OffloadError(
                f"memory_mode={self.name!r} has an optimizer of its own, which is not in use: pass yours to "
                "session.prepare_optimizer or Accelerator.prepare, and use what is returned."
            )


def _check_members(
    model: nn.Module, groups_of: dict[Any, Any], added: set[str], before: WeakTensorKeyDictionary, name: str
) -> None:
    known = {id(one) for one in model.parameters()}
    foreign = sum(id(one) not in known and one not in before for one in groups_of)
    missing = [
        each
        for each, one in model.named_parameters()
        if one.requires_grad and one not in groups_of and each not in added
    ]
    if foreign:
        raise OffloadConfigError(
            f"memory_mode={name!r}: the optimizer has {foreign} parameters that are not the model's: make one for each model."
        )
    if missing:
        raise OffloadConfigError(
            f"memory_mode={name!r}: {len(missing)} parameters that require gradients, such as {missing[0]}, are not in the "
            "optimizer: freeze them with requires_grad_(False), or add them."
        )


def _take_the_place(made: torch.optim.Optimizer, given: torch.optim.Optimizer) -> None:
    """See the note above."""
    groups = given.param_groups
    seen = [{key: group[key] for key in (*_SHARED, "weight_decay")} for group in groups]

    def take_over(*_: Any) -> None:
        for group, before in zip(groups, seen, strict=True):
            if group["weight_decay"] != before["weight_decay"]:
                raise OffloadError("A schedule of weight_decay does not reach the optimizer of a memory mode: drop it.")
        for key in _SHARED:
            values = [group[key] for group in groups]
            if any(value != values[0] for value in values):
                raise OffloadError(
                    f"The optimizer of a memory mode has one {key} for all parameters, and a scheduler has set {values}: use "
                    "one schedule for all groups."
                )
            if values[0] != seen[0][key]:
                seen[0][key] = values[0]
                for group in made.param_groups:
                    group[key] = values[0]

    def step(*_: Any, **__: Any) -> None:
        raise OffloadError(
            "This optimizer was replaced by that of a memory mode: use what session.prepare_optimizer() or "
            "Accelerator.prepare() has returned."
        )

    made.register_step_pre_hook(take_over)
    made.register_step_post_hook(lambda *_: setattr(given, "_opt_called", True))  # which schedulers look at
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # likewise
    given.step = step  # type: ignore[assignment, method-assign]
    for group in groups:
        group["params"] = []  # or weights that a mode has replaced would stay
