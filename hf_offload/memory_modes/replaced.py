"""The optimizer that a script has made, after the one of a memory mode has taken its place.

Note: schedulers
    A learning-rate scheduler keeps the optimizer it was made with, and reads and writes that one's groups. There may be more
    or fewer of them than in the new optimizer. They become views of the new optimizer's groups, so that there is one
    learning rate to be scheduled, saved and loaded.
"""

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from hf_offload.errors import OffloadError

SHARED = ("lr", "betas", "eps")
"""What the optimizer of a memory mode has once for all parameters."""

_UNUSABLE = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
_ABSENT = object()


def replace_optimizer(
    given: torch.optim.Optimizer, made: torch.optim.Optimizer, *, group_by_group: bool = False
) -> None:
    """Let the schedulers of ``given`` set the learning rate of ``made``, and all methods of ``given`` raise.

    What schedulers keep in the groups of ``given``, such as ``initial_lr``, moves to those of ``made``. Neither of the two
    optimizers keeps the other. ``group_by_group``: ``made`` has the same groups, and each its own rate.
    """
    made_ref, given_ref = weakref.ref(made), weakref.ref(given)
    if group_by_group:
        given.param_groups = _paired_views(given, made, made_ref)  # type: ignore[assignment]
    else:
        given.param_groups = _shared_views(given, made, made_ref)  # type: ignore[assignment]

    def note_step(*_: Any) -> None:
        found = given_ref()
        if found is not None:
            found._opt_called = True  # type: ignore[attr-defined]  # which schedulers look at

    made.register_step_post_hook(note_step)
    for name in _UNUSABLE:
        setattr(given, name, _refusal(name))


def _paired_views(
    given: torch.optim.Optimizer, made: torch.optim.Optimizer, made_ref: "weakref.ref[torch.optim.Optimizer]"
) -> list["_PairedView"]:
    views = []
    for place, (theirs, mine) in enumerate(zip(given.param_groups, made.param_groups, strict=True)):
        for key in theirs.keys() - given.defaults.keys() - mine.keys() - {"param_names"}:
            mine[key] = theirs[key]
        own = {key: value for key, value in theirs.items() if key not in mine}
        views.append(_PairedView(own | {"params": []}, made_ref, place))
    return views


def _shared_views(
    given: torch.optim.Optimizer, made: torch.optim.Optimizer, made_ref: "weakref.ref[torch.optim.Optimizer]"
) -> list["_GroupView"]:
    first, *others = given.param_groups
    for key in first.keys() - given.defaults.keys() - made.param_groups[0].keys():
        if all(key in group and group[key] == first[key] for group in others):
            for group in made.param_groups:
                group[key] = first[key]
    written: list[dict[str, Any]] = [{} for _ in given.param_groups]
    common = (made.param_groups[0].keys() - given.defaults.keys()) | set(SHARED)
    views = []
    for place, group in enumerate(given.param_groups):
        own = {key: value for key, value in group.items() if key not in common}
        # Without its parameters: weights that a mode has replaced would stay.
        views.append(_GroupView(own | {"params": []}, made_ref, written, place))

    def check(*_: Any) -> None:
        for key in set().union(*written):
            if _differs(written, key):
                raise OffloadError(
                    f"The optimizer of a memory mode has one {key} for all parameters, and a scheduler has set "
                    f"{[values.get(key) for values in written]}: use one schedule for all groups."
                )

    made.register_step_pre_hook(check)
    return views


def _refusal(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise OffloadError(
            f"{name}() of an optimizer that was replaced by that of a memory mode: use what session.prepare_optimizer() or "
            "Accelerator.prepare() has returned."
        )

    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or schedulers would warn of a step they do not see
    return refuse


def _differs(written: list[dict[str, Any]], key: str) -> bool:
    first, *others = (values.get(key, _ABSENT) for values in written)
    return any(value != first for value in others)


class _GroupView(MutableMapping[str, Any]):
    """A group of the replaced optimizer.

    A scheduler writes to one group after the other, and may read the next one only then. So what it has written reaches the
    new optimizer as soon as it is the same in all groups, and until then each group has a value of its own.
    """

    def __init__(
        self,
        own: dict[str, Any],
        made: "weakref.ref[torch.optim.Optimizer]",
        written: list[dict[str, Any]],
        place: int,
    ):
        self._own = own
        self._made = made
        self._written = written
        self._place = place

    def __getitem__(self, key: str) -> Any:
        if key in self._own:
            return self._own[key]
        return self._written[self._place][key] if _differs(self._written, key) else self._groups()[0][key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._own:
            _refuse_change(key, self._own[key], value)
            return
        groups = self._groups()
        if not _differs(self._written, key):
            # A state may have been loaded since the last write.
            for values in self._written:
                values.pop(key, None)
                if key in groups[0]:
                    values[key] = groups[0][key]
        self._written[self._place][key] = value
        if not _differs(self._written, key):
            for group in groups:
                group[key] = value

    def __delitem__(self, key: str) -> None:
        _refuse_removal(key)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._groups()[0], **self._written[self._place], **self._own})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _groups(self) -> list[dict[str, Any]]:
        return _groups_of(self._made)


class _PairedView(MutableMapping[str, Any]):
    """A group of the replaced optimizer, where the new one has the same groups."""

    def __init__(self, own: dict[str, Any], made: "weakref.ref[torch.optim.Optimizer]", place: int):
        self._own = own
        self._made = made
        self._place = place

    def __getitem__(self, key: str) -> Any:
        return self._own[key] if key in self._own else self._group()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._own:
            _refuse_change(key, self._own[key], value)
        else:
            self._group()[key] = value

    def __delitem__(self, key: str) -> None:
        _refuse_removal(key)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._group(), **self._own})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _group(self) -> dict[str, Any]:
        return _groups_of(self._made)[self._place]


def _refuse_change(key: str, present: Any, value: Any) -> None:
    if present != value:
        raise OffloadError(
            f"A schedule of {key} does not reach the optimizer of a memory mode: drop it, or pass cycle_momentum=False to a "
            "OneCycleLR or CyclicLR."
        )


def _refuse_removal(key: str) -> None:
    raise OffloadError(f"{key} cannot be taken out of the optimizer of a memory mode.")


def _groups_of(made_ref: "weakref.ref[torch.optim.Optimizer]") -> list[dict[str, Any]]:
    made = made_ref()
    if made is None:
        raise OffloadError("The optimizer of a memory mode has gone, and a scheduler of it is still in use: keep both.")
    return made.param_groups
