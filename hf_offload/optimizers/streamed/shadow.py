"""The user's own optimizer class on some of the parameters: a shadow of the optimizer that steps one at a time.

Note: why not an optimizer of our own
    A run in memory and one that streams its state are to have the same bits. Two implementations of AdamW do not even agree
    within PyTorch: the fused kernel and the loop over tensors differ in some 5 % of float32 weights. So whatever class the
    user has chosen computes the update, as it does for a model that has one parameter.
"""

import collections
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_offload.errors import OffloadConfigError

CUT_ELEMENTS = 4096
"""Parameters are cut at multiples of this: no kernel's vectors, and no page of any dtype, then lie across a cut."""
_STEPS = 3
_NOT_OPTIONS = ("params", "param_names")
_NOT_COMPARED = (*_NOT_OPTIONS, "lr", "initial_lr", "weight_decay")


class Shadow:
    """Steps of ``optimizer`` with other parameters, options and state. It does not keep the optimizer.

    Hooks on the optimizer's steps are not the shadow's: they belong to a step as a whole.
    """

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer]):
        self._optimizer = make_shadow(optimizer, kind)
        self._step: Callable[[Optimizer], Any] = getattr(kind.step, "__wrapped__", kind.step)

    def step(
        self, groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]]
    ) -> dict[Tensor, dict[str, Any]]:
        """One step of the parameters in ``groups``, from ``state``; returns the new state."""
        inner = self._optimizer
        inner.param_groups = groups
        inner.state = collections.defaultdict(dict, state)
        try:
            self._step(inner)
            return inner.state
        finally:
            inner.param_groups = []
            inner.state = collections.defaultdict(dict)

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
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name != "step"
        and not (name.startswith("_optimizer_") and name.endswith("_hooks"))  # a scheduler's, and hooks
    }
    hooks: dict[str, Any] = {
        name: collections.OrderedDict()
        for name in vars(optimizer)
        if name.startswith("_optimizer_") and name.endswith("_hooks")
    }
    made.__dict__ = attributes | hooks | {"param_groups": [], "state": collections.defaultdict(dict)}
    return made


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, as they are now."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name not in _NOT_OPTIONS
    }


def can_be_cut(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Whether parameters may also step in pieces, from a trial with small ones.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for an optimizer whose update of one parameter depends on others, or
    on anything but options, gradient and state.
    """
    if issubclass(kind, torch.optim.LBFGS):
        raise OffloadConfigError(
            "LBFGS evaluates the loss several times in a step, over all parameters at once: it cannot be streamed. Use "
            "another optimizer, or optimizer='none'."
        )
    cuts = True
    for group in _different(optimizer.param_groups):
        examples = [p for p in group["params"] if p.dim() > 1] or group["params"]
        dtype, device = examples[0].dtype, examples[0].device
        shapes: list[tuple[int, ...]] = [(96, 100), (70, 130)]
        if any(p.dim() == 1 for p in group["params"]):
            shapes.append((9000,))
        try:
            with torch.random.fork_rng(devices=[]):
                whole = _trial(optimizer, kind, group, shapes, dtype, device, apart=False, cut=False)
                apart = _trial(optimizer, kind, group, shapes, dtype, device, apart=True, cut=False)
        except OffloadConfigError:
            raise
        except Exception as error:
            raise OffloadConfigError(
                f"{kind.__name__} could not be tried on small parameters, which decides whether its state can be streamed: "
                f"{type(error).__name__}: {error}. Use another optimizer, or optimizer='none'."
            ) from error
        if not _same(whole, apart):
            raise OffloadConfigError(
                f"{kind.__name__} updates a parameter in another way if the others step at another time: its updates depend "
                "on several parameters, on random numbers, or on what it counts for all of them. Its state cannot be "
                "streamed: use another optimizer, or optimizer='none'."
            )
        try:
            with torch.random.fork_rng(devices=[]):
                cuts = cuts and _same(
                    whole, _trial(optimizer, kind, group, shapes, dtype, device, apart=True, cut=True)
                )
        except Exception:  # it needs the shape
            cuts = False
    return cuts


def _different(groups: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        if group["params"]:
            kinds = {(p.dtype, p.dim() > 1) for p in group["params"]}
            options = {name: value for name, value in sorted(group.items()) if name not in _NOT_COMPARED}
            found.setdefault(repr((options, sorted(map(str, kinds)))), group)
    return found.values()


def _trial(
    optimizer: Optimizer,
    kind: type[Optimizer],
    group: Mapping[str, Any],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    apart: bool,
    cut: bool,
) -> list[Tensor]:
    """Weights and state after some steps of small parameters, all at once or one ``apart`` from the other."""
    random = torch.Generator().manual_seed(0)
    shadow = Shadow(optimizer, kind)
    options = options_of(group)
    parameters = [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]
    targets = [pieces(one, CUT_ELEMENTS) if cut else [one] for one in parameters]
    flat = list(itertools.chain.from_iterable(targets))
    turns = [[one] for one in flat] if apart else [flat]
    state: dict[Tensor, dict[str, Any]] = {}
    for _ in range(_STEPS):
        for parameter, its_targets in zip(parameters, targets, strict=True):
            gradient = torch.randn(parameter.shape, generator=random).to(device, dtype)
            for target, part in zip(its_targets, pieces(gradient, CUT_ELEMENTS) if cut else [gradient], strict=True):
                target.grad = part.clone()
        with torch.no_grad():
            for turn in turns:
                its_group = {**options, "params": turn}
                state |= shadow.step([its_group], {one: state[one] for one in turn if one in state})
                if repr(options_of(its_group)) != repr(options):
                    raise OffloadConfigError(
                        f"{kind.__name__} keeps numbers of its own in its parameter groups, for all parameters together: its "
                        "state cannot be streamed. Use another optimizer, or optimizer='none'."
                    )
    found = list(parameters)
    for its_targets in targets:
        found += merged(state, its_targets)
    return found


def merged(state: Mapping[Tensor, dict[str, Any]], targets: list[Tensor]) -> list[Tensor]:
    """The tensors in the state of ``targets``, the pieces of one parameter."""
    first = state.get(targets[0]) or {}
    found = []
    for name in sorted(first, key=str):
        values = [state[target][name] for target in targets]
        if not isinstance(values[0], Tensor):
            found.append(torch.tensor([float(values[0])]) if isinstance(values[0], (int, float)) else torch.empty(0))
        elif all(value.shape == target.shape for value, target in zip(values, targets, strict=True)):
            found.append(torch.cat([value.reshape(-1) for value in values]))
        else:
            found.append(values[0].reshape(-1))
    return found


def pieces(tensor: Tensor, elements: int) -> list[Tensor]:
    """Views of a contiguous ``tensor``, of so many elements each but for the last one."""
    flat = tensor.detach().view(-1)
    return [flat[start : start + elements] for start in range(0, max(1, flat.numel()), elements)]


def _same(ones: list[Tensor], others: list[Tensor]) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    return len(ones) == len(others) and all(
        one.dtype == other.dtype and torch.equal(bits(one), bits(other))
        for one, other in zip(ones, others, strict=True)
    )
