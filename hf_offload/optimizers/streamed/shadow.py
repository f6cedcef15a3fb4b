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

from hf_offload.optimizers.streamed.own_step import ChangedByStep, OwnStep, captured, values_in

CUT_ELEMENTS = 4096
"""Parameters are cut at multiples of this: no kernel's vectors, and no page of any dtype, then lie across a cut."""
_NOT_OPTIONS = ("params", "param_names")
_NOT_ATTRIBUTES = ("step", "param_groups", "state")


class Shadow:
    """Steps of ``optimizer`` with other parameters, options and state. It does not keep the optimizer.

    Hooks on the optimizer's steps are not the shadow's: they belong to a step as a whole. ``own`` is the step of a class that
    is not known: what it changes beyond weights and their state is an error then.
    """

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer], own: OwnStep | None = None):
        self._own = own
        self._optimizer = make_shadow(optimizer, kind)
        self._hooks = _without_hooks(optimizer)
        self._step: Callable[..., Any] = getattr(kind.step, "__wrapped__", kind.step)

    def step(
        self,
        groups: list[dict[str, Any]],
        state: Mapping[Tensor, dict[str, Any]],
        attributes: Mapping[str, Any],
        *arguments: Any,
    ) -> dict[Tensor, dict[str, Any]]:
        """One step of the parameters in ``groups``, from ``state``, with these attributes; returns the new state.

        Raises :class:`~hf_offload.optimizers.streamed.own_step.ChangedByStep`.
        """
        inner = self._optimizer
        outside = None if self._own is None else self._own.present()
        before = None if self._own is None else (sorted(values_in(attributes)), list(map(_options_in, groups)))
        inner.__dict__ = {**self._hooks, **attributes}
        inner.param_groups = groups
        inner.state = collections.defaultdict(dict, state)
        try:
            self._step(inner, *arguments)
            if self._own is not None and before is not None and outside is not None:
                self._check_unchanged(before, groups, self._own.unlike(outside))
            return inner.state
        finally:
            inner.param_groups = []
            inner.state = collections.defaultdict(dict)

    def _check_unchanged(self, before: Any, groups: list[dict[str, Any]], outside: str | None) -> None:
        inner = self._optimizer
        now = {
            name: value for name, value in vars(inner).items() if name not in _NOT_ATTRIBUTES and not _holds_hooks(name)
        }
        attributes, options = before
        parameters = {id(p) for group in groups for p in group["params"]}
        what = outside
        if attributes != sorted(values_in(now)):
            what = "an attribute of its own"
        if inner.param_groups is not groups or options != list(map(_options_in, groups)):
            what = "its parameter groups"
        if any(id(key) not in parameters for key in inner.state):
            what = "state that is not a parameter's"
        if what is not None:
            raise ChangedByStep(
                f"The step of {type(inner).__name__} has changed {what}, which counts for all parameters together, and is "
                "streamed, one parameter after the other: go on from the last checkpoint with optimizer='none'."
            )

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


def _options_in(group: Mapping[str, Any]) -> Any:
    return [*map(id, group["params"])], values_in({name: value for name, value in group.items() if name != "params"})


def pieces(tensor: Tensor, elements: int) -> list[Tensor]:
    """Views of a contiguous ``tensor``, of so many elements each but for the last one."""
    flat = tensor.detach().view(-1)
    return [flat[start : start + elements] for start in range(0, max(1, flat.numel()), elements)]
