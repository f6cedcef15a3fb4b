"""The user's own optimizer class on some of the parameters: a shadow of the optimizer that steps one at a time.

Note: why not an optimizer of our own
    A run in memory and one that streams its state are to have the same bits. Two implementations of AdamW do not even agree
    within PyTorch: the fused kernel and the loop over tensors differ in some 5 % of float32 weights. So whatever class the
    user has chosen computes the update, as it does for a model that has one parameter.
"""

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

CUT_ELEMENTS = 4096
"""Parameters are cut at multiples of this: no kernel's vectors, and no page of any dtype, then lie across a cut."""
_WITH_HOOKS = Optimizer.profile_hook_step(Optimizer.step).__code__
"""Of the function that PyTorch wraps around the step of each class when one of it is first made."""
_NOT_OPTIONS = ("params", "param_names")
_NOT_ATTRIBUTES = ("step", "param_groups", "state")


class Shadow:
    """Steps of ``optimizer`` with other parameters, options and state. It does not keep the optimizer.

    Hooks on the optimizer's steps are not the shadow's: they belong to a step as a whole.
    """

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer]):
        self._optimizer = make_shadow(optimizer, kind)
        self._hooks = _without_hooks(optimizer)
        self._step = step_of(kind)

    def step(
        self,
        groups: list[dict[str, Any]],
        state: Mapping[Tensor, dict[str, Any]],
        attributes: Mapping[str, Any],
    ) -> dict[Tensor, dict[str, Any]]:
        """One step of the parameters in ``groups``, from ``state``, with these attributes; returns the new state."""
        inner = self._optimizer
        inner.__dict__ = {**self._hooks, **attributes}
        inner.param_groups = groups
        inner.state = collections.defaultdict(dict, state)
        try:
            self._step(inner)
            return inner.state
        finally:
            inner.param_groups = []
            inner.state = collections.defaultdict(dict)

    @property
    def attributes(self) -> dict[str, Any]:
        """Those after the last step."""
        return attributes_of(self._optimizer)

    def loaded(self, parameter: Tensor, options: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """``state`` as the class's own ``load_state_dict`` makes it: cast and moved to where the parameter needs it."""
        inner = self._optimizer
        inner.param_groups = [{**options, "params": [parameter]}]
        inner.state = collections.defaultdict(dict)
        try:
            inner.load_state_dict({"state": {0: state}, "param_groups": [{**options, "params": [0]}]})
            return inner.state[parameter]
        finally:
            inner.param_groups = []
            inner.state = collections.defaultdict(dict)


def step_of(kind: type[Optimizer]) -> Callable[..., Any]:
    """The step that ``kind`` defines, without the hooks that PyTorch wraps around it."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "__code__", None) is _WITH_HOOKS else step


def make_shadow(optimizer: Optimizer, kind: type[Optimizer]) -> Optimizer:
    """An optimizer of class ``kind`` with all attributes of ``optimizer`` but its parameters, state and hooks."""
    made = object.__new__(kind)
    made.__dict__ = {
        **_without_hooks(optimizer),
        **attributes_of(optimizer),
        "param_groups": [],
        "state": collections.defaultdict(dict),
    }
    return made


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """All attributes as they are now, but parameters, state, hooks, and the ``step`` that a scheduler puts there."""
    return {
        name: captured(value) if isinstance(value, Tensor) or name == "defaults" else value
        for name, value in vars(optimizer).items()
        if name not in _NOT_ATTRIBUTES and not _holds_hooks(name)
    }


def _without_hooks(optimizer: Optimizer) -> dict[str, Any]:
    return {name: collections.OrderedDict() for name in vars(optimizer) if _holds_hooks(name)}


def _holds_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, as they are now, but the names of its parameters."""
    return {name: captured(value) for name, value in group.items() if name not in _NOT_OPTIONS}


def names_of(group: Mapping[str, Any], chosen: Iterable[int]) -> dict[str, list[str]]:
    """The names of the ``chosen`` parameters of a group, by their numbers in it, as an option; none if it has no names."""
    names = group.get("param_names")
    return {} if names is None else {"param_names": [names[number] for number in chosen]}


def captured(value: Any) -> Any:
    """A copy of an option, as deep as lists, tuples and dictionaries go; tensors are cloned."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(captured, value))
    return {name: captured(each) for name, each in value.items()} if type(value) is dict else value
