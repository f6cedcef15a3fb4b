"""The user's own optimizer class on some of the parameters: a shadow of the optimizer that steps one at a time.

Note: why not an optimizer of our own
    A run in memory and one that streams its state are to have the same bits. Two implementations of AdamW do not even agree
    within PyTorch: the fused kernel and the loop over tensors differ in some 5 % of float32 weights. So whatever class the
    user has chosen computes the update, as it does for a model that has one parameter.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hf_offload.errors import OffloadError
from hf_offload.optimizers.streamed.contents import RandomNumbers, copied, told
from hf_offload.optimizers.streamed.surroundings import Surroundings

CUT_ELEMENTS = 4096
"""Parameters are cut at multiples of this: no kernel's vectors, and no page of any dtype, then lie across a cut."""
_NOT_OPTIONS = ("params", "param_names")


class OwnValuesError(OffloadError):
    """A step has changed what belongs to the steps of all parameters."""


class Shadow:
    """Steps of ``optimizer`` with other parameters, options and state. It does not keep the optimizer.

    Hooks on the optimizer's steps are not the shadow's: they belong to a step as a whole.

    Attributes:
        reads_outside: Whether its class names values that are not the optimizer's, and may change between steps.
    """

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer]):
        self._optimizer = make_shadow(optimizer, kind)
        self._is_checked = kind.__module__.partition(".")[0] != "torch"
        self.reads_outside = self._is_checked and Surroundings(kind).may_change
        self._hooks = _without_hooks(optimizer)
        self._step: Callable[[Optimizer], Any] = getattr(kind.step, "__wrapped__", kind.step)

    def step(
        self,
        groups: list[dict[str, Any]],
        state: Mapping[Tensor, dict[str, Any]],
        attributes: Mapping[str, Any],
    ) -> dict[Tensor, dict[str, Any]]:
        """One step of the parameters in ``groups``, from ``state``, with these attributes; returns the new state."""
        if not self._is_checked:
            return self._step_of(groups, state, attributes)
        device = next(p.device for group in groups for p in group["params"])
        drawn_from, before = RandomNumbers(device), self._numbers(groups, attributes)
        found = self._step_of(groups, state, attributes)
        what = "has drawn random numbers" if drawn_from.were_drawn else ""
        if self._numbers(groups, self.attributes) != before:
            what = "has changed values of its own in its parameter groups or attributes"
        if what:
            raise OwnValuesError(
                f"{type(self._optimizer).__name__} {what} in a step of one parameter. It did not when it was tried on small "
                "parameters, and its state was streamed; in memory, that comes once a step, and weights would be others. Go "
                "on from the last checkpoint with optimizer='none'."
            )
        return found

    def _numbers(self, groups: list[dict[str, Any]], attributes: Mapping[str, Any]) -> list[Any]:
        # Switches, such as that of a check that is done once, and tables that a first step makes, do not count.
        numbers = {name: value for name, value in attributes.items() if type(value) in (int, float, Tensor)}
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        return told([numbers, options], self._optimizer)

    def _step_of(
        self, groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]], attributes: Mapping[str, Any]
    ) -> dict[Tensor, dict[str, Any]]:
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

    def copied(self, values: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Attributes or options of ``optimizer`` as they are now, whatever becomes of these.

        Raises :class:`~hf_offload.optimizers.streamed.contents.NotCopied`.
        """
        return copied(values, optimizer, self._optimizer)

    @property
    def stand_in(self) -> Optimizer:
        """What the steps are those of."""
        return self._optimizer

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
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in vars(optimizer).items()
        if name not in ("step", "param_groups", "state") and not _holds_hooks(name)
    }


def _without_hooks(optimizer: Optimizer) -> dict[str, Any]:
    return {name: collections.OrderedDict() for name in vars(optimizer) if _holds_hooks(name)}


def _holds_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, as they are now."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name not in _NOT_OPTIONS
    }


def pieces(tensor: Tensor, elements: int) -> list[Tensor]:
    """Views of a contiguous ``tensor``, of so many elements each but for the last one."""
    flat = tensor.detach().view(-1)
    return [flat[start : start + elements] for start in range(0, max(1, flat.numel()), elements)]
