"""Lets the schedulers of a replaced optimizer set the options of the memory mode's.

Note: schedulers
    A learning-rate scheduler keeps the optimizer it was made with, and reads and writes that one's groups. These become views
    of the new optimizer's groups, so that there is one learning rate to be scheduled, saved and loaded.
"""

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from hf_offload.errors import OffloadError

SHARED = ("lr", "betas", "eps")
"""What the optimizer of a memory mode has once for all parameters."""

_UNUSABLE = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
_MEMBERS = {"params", "param_names"}
_ABSENT = object()


def replace_optimizer(given: torch.optim.Optimizer, made: torch.optim.Optimizer) -> None:
    """Let the schedulers of ``given`` set the learning rate of ``made``, and all methods of ``given`` raise.

    What schedulers keep in the groups of ``given``, such as ``initial_lr``, moves to those of ``made``. Neither of the two
    optimizers keeps the other.
    """
    given.param_groups = _views(given, made)  # type: ignore[assignment]
    given_ref = weakref.ref(given)

    def note_step(*_: Any) -> None:
        found = given_ref()
        if found is not None:
            found._opt_called = True  # type: ignore[attr-defined]  # which schedulers look at

    made.register_step_post_hook(note_step)
    for name in _UNUSABLE:
        setattr(given, name, _refusal(name))


def _views(given: torch.optim.Optimizer, made: torch.optim.Optimizer) -> "list[_GroupView]":
    groups, options = given.param_groups, made.param_groups[0].keys()
    common = _CommonOptions(made, len(groups))
    new = groups[0].keys() - given.defaults.keys() - options - _MEMBERS
    common_keys = {key for key in new if all(key in group and group[key] == groups[0][key] for group in groups)}
    taken_over = common_keys | (options & {*SHARED}) | _MEMBERS
    views = []
    for number, group in enumerate(groups):
        own = {key: value for key, value in group.items() if key not in taken_over}
        # Without its parameters: weights that a mode has replaced would stay.
        views.append(_GroupView(own | {"params": []}, common, number))
        for key in common_keys:
            common.write(number, key, group[key])
    made.register_step_pre_hook(common.check)
    return views


def _refusal(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise OffloadError(
            f"{name}() of an optimizer that was replaced by that of a memory mode: use what session.prepare_optimizer() or "
            "Accelerator.prepare() has returned."
        )

    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or schedulers would warn of a step they do not see
    return refuse


class _CommonOptions:
    """Options that all groups of the new optimizer share with those of the replaced one.

    A scheduler writes to one group after the other, and may read the next one only then. So what it has written reaches the
    new optimizer as soon as it is the same in all groups. Until then it is pending, and each group has a value of its own.
    """

    def __init__(self, made: torch.optim.Optimizer, count: int):
        self._made = weakref.ref(made)
        self._count = count
        self._pending: dict[str, list[Any]] = {}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Those of the new optimizer."""
        made = self._made()
        if made is None:
            raise OffloadError(
                "The optimizer of a memory mode has gone, and a scheduler of it is still in use: keep both."
            )
        return made.param_groups

    def read(self, number: int, key: str) -> Any:
        """The option of group ``number`` of the replaced optimizer."""
        value = self._pending[key][number] if key in self._pending else self.groups[0].get(key, _ABSENT)
        if value is _ABSENT:
            raise KeyError(key)
        return value

    def write(self, number: int, key: str, value: Any) -> None:
        """Set it."""
        values = self._pending.setdefault(key, [self.groups[0].get(key, _ABSENT)] * self._count)
        values[number] = value
        if all(one == value for one in values):
            del self._pending[key]
            for group in self.groups:
                group[key] = value

    def check(self, *_: Any) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` before a step that has no single value of an option."""
        for key, values in self._pending.items():
            raise OffloadError(
                f"The optimizer of a memory mode has one {key} for all parameters, and a scheduler has set "
                f"{[value for value in values if value is not _ABSENT]}: use one schedule for all groups."
            )


class _GroupView(MutableMapping[str, Any]):
    """A group of the replaced optimizer: its ``own`` options do not change any more, all others are the new optimizer's."""

    def __init__(self, own: dict[str, Any], common: _CommonOptions, number: int):
        self._own = own
        self._common = common
        self._number = number

    def __getitem__(self, key: str) -> Any:
        return self._own[key] if key in self._own else self._common.read(self._number, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._own:
            self._common.write(self._number, key, value)
        elif self._own[key] != value:
            raise OffloadError(
                f"A schedule of {key} does not reach the optimizer of a memory mode: drop it, or pass cycle_momentum=False "
                "to a OneCycleLR or CyclicLR."
            )

    def __delitem__(self, key: str) -> None:
        raise OffloadError(f"{key} cannot be taken out of the optimizer of a memory mode.")

    def __iter__(self) -> Iterator[str]:
        return iter({**self._common.groups[0], **self._own})

    def __len__(self) -> int:
        return sum(1 for _ in self)
