"""Bytes of weights, gradients and optimizer state: of the units of a model, and of an optimizer before and after it steps."""

import functools
import itertools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hf_offload.plan.footprint import Footprint, Segment, UnitWeights
from hf_offload.state.optimizer import state_per_weight, streaming_of
from hf_offload.state.registry import parked_of
from hf_offload.structure.units import find_units
from hf_offload.surgery import InertInCopies
from hf_offload.tensors import nbytes_of, parameter_count

_WITHOUT_A_LOOK = 0.5
"""Of the budget: what takes less with any optimizer is not looked at more closely."""
_MOST_STATE = 4
"""Bytes of state for each byte of a weight, of the optimizers that keep most."""


def unit_weights(
    model: nn.Module, units: Iterable[str], state_bytes: int, smallest_bytes: int = 0
) -> dict[str, UnitWeights]:
    """Those of the innermost of ``units`` around each weight, ``state_bytes`` of optimizer state in proportion. Weights of
    fewer than ``smallest_bytes`` are left out.
    """
    names = sorted(units, key=len, reverse=True)
    unit_of = _innermost(names)
    trained_bytes = dict.fromkeys(names, 0)
    sizes: dict[str, list[int]] = {name: [] for name in names}
    borrowed: dict[str, list[tuple[str, int]]] = {name: [] for name in names}
    places: dict[int, tuple[str, int]] = {}  # by id of the weight
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    trained = sum(nbytes_of(p) for p in model.parameters() if p.requires_grad)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if nbytes_of(parameter) < smallest_bytes:
            continue
        path = unit_of(name)
        place = places.setdefault(id(parameter), (path, len(sizes[path])))
        if place != (path, len(sizes[path])):
            if place[0] != path:  # it is tied
                borrowed[path].append(place)
            continue
        sizes[path].append(nbytes_of(parameter))
        trained_bytes[path] += nbytes_of(parameter) * parameter.requires_grad
    ratio = state_bytes / max(1, trained)
    return {
        name: UnitWeights(
            sum(each),
            trained_bytes[name],
            round(trained_bytes[name] * ratio),
            tuple(each),
            tuple(borrowed[name]),
            name in tables,
        )
        for name, each in sizes.items()
        if each or borrowed[name]
    }


def trained_in(model: nn.Module, units: Iterable[str], chosen: Container[str]) -> list[nn.Parameter]:
    """The trained weights whose innermost unit is one of ``chosen``, each once."""
    unit_of = _innermost(sorted(units, key=len, reverse=True))
    return [p for name, p in model.named_parameters() if p.requires_grad and unit_of(name) in chosen]


def _innermost(names: Sequence[str]) -> Callable[[str], str]:
    """What finds the unit that a weight belongs to, of these ``names``, the longest first."""
    known = set(names)

    def unit_of(weight: str) -> str:
        path, _, _ = weight.rpartition(".")
        while path and path not in known:
            path, _, _ = path.rpartition(".")
        return path if path in known else names[-1]  # the model itself, which has the shortest name

    return unit_of


def initial_estimate(
    model: nn.Module,
    *,
    state_bytes: int,
    state_is_there: bool,
    streams: bool,
    keeps_gradients: bool,
    activation_bytes: int,
    smallest_bytes: int,
    step_bytes: int = 0,
) -> Footprint:
    """A step estimated from the model alone: weights, gradients and ``state_bytes`` of optimizer state in forward and
    backward of every unit. All time is that of transfers.

    ``state_is_there`` during forward and backward, which it is not in the first step; ``streams``: it and, unless
    ``keeps_gradients``, the gradients are on a tier. ``activation_bytes`` is what else is in memory at any time,
    ``step_bytes`` what the optimizer's step needs for itself.
    """
    units = find_units(model)
    weights = unit_weights(model, units, state_bytes, smallest_bytes)
    trained = sum(nbytes_of(p) for p in model.parameters() if p.requires_grad)
    leaves = streams and not keeps_gradients
    gradient_bytes = 0 if leaves else trained
    forward = [Segment(name, False, activation_bytes, 0, 0.0) for name in units]
    last_first = list(reversed(list(units)))
    arrived = itertools.accumulate(weights[name].trained_bytes if name in weights else 0 for name in last_first)
    backward = [
        Segment(name, True, activation_bytes + (0 if leaves else so_far), 0 if leaves else so_far, 0.0)
        for name, so_far in zip(last_first, arrived, strict=True)
    ]
    there = state_bytes if state_is_there and not streams else 0
    return Footprint(
        segments=(*forward, *backward),
        saved=(),
        blocks=(),
        units={name: unit.block for name, unit in units.items()},
        classes={name: unit.kind for name, unit in units.items()},
        parameters=parameter_count(model),
        base_bytes=sum(nbytes_of(tensor) for tensor in {*model.parameters(), *model.buffers()}) + there,
        gradient_bytes=gradient_bytes,
        optimizer_step_bytes=step_bytes,
        optimizer_step_s=0.0,
        source="counted",
        state_bytes=there,
        weights=weights,
    )


class OptimizerState:
    """The state that optimizers keep of weights of ``model``, on its device, as far as they step while they are watched,
    until :meth:`close`. ``on_step`` is called after each of their steps.

    Momenta come with an optimizer's first step, which may be later than the first step of a run: a gradient scaler leaves
    steps out, a second optimizer begins later.
    """

    def __init__(self, model: nn.Module, on_step: Callable[[], None]):
        self._model = weakref.ref(model)
        self._on_step = on_step
        self._device = next((one.device for one in model.parameters()), torch.device("cpu"))
        # No callbacks: Ctrl-C would get lost in one that is not of C (see interrupts.py).
        self._stepped: dict[int, weakref.ref[Optimizer]] = {}
        # An optimizer keeps its hooks, and may outlive the session.
        self._hook = InertInCopies(functools.partial(_note, weakref.ref(self)))
        self._handles: list[RemovableHandle] = []

    def watch(self, optimizer: Optimizer) -> None:
        """:meth:`note` the steps of ``optimizer`` from now on. Idempotent. One that calls no hooks, such as another library's
        wrapper, is passed over: the optimizer in it is seen in a step that is measured.
        """
        hooks = getattr(optimizer, "_optimizer_step_post_hooks", None)
        if hooks is not None and all(hook is not self._hook for hook in hooks.values()):
            self._handles.append(optimizer.register_step_post_hook(self._hook))

    def close(self) -> None:
        """Look at no more steps. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def nbytes(self) -> int:
        """Bytes that they hold now. Step counters are left out."""
        # By storage, whose object lives as long as it does: an optimizer inside of another one has the same state.
        found: dict[int, int] = {}
        model = self._model()
        own = frozenset() if model is None else own_ids(model)
        for key, reference in list(self._stepped.items()):
            optimizer = reference()
            if optimizer is None:
                del self._stepped[key]
                continue
            for tensor in state_of(optimizer, own):
                if tensor.dim() > 0 and tensor.device == self._device:
                    found[id(tensor.untyped_storage())] = nbytes_of(tensor)
        return sum(found.values())

    def note(self, optimizer: Optimizer) -> None:
        """``optimizer`` has stepped."""
        self.watch(optimizer)
        self._stepped[id(optimizer)] = weakref.ref(optimizer)
        model = self._model()
        if model is not None and trains_any(optimizer, own_ids(model)):
            self._on_step()


def _note(reference: "weakref.ref[OptimizerState]", optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    state = reference()
    if state is not None:
        state.note(optimizer)


def own_ids(model: nn.Module) -> frozenset[int]:
    """The ids of its weights: an optimizer may train those of several models."""
    return frozenset(map(id, model.parameters()))


def trains_any(optimizer: Optimizer, own: Container[int]) -> bool:
    """Whether any of its weights has an id in ``own``."""
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def state_of(optimizer: Optimizer, own: Container[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors of its state, also those in lists: of weights with an id in ``own``, or of all. Not among them: what is on
    a tier, and sparse ones.
    """
    for key, value in list(vars(optimizer).get("state", optimizer.state).items()):
        if own is None or id(key) in own:
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and parked_of(leaf) is None:
                    yield leaf


def missing_state(optimizer: Optimizer, own: Container[int]) -> int:
    """Bytes of state that weights which have had no gradient yet will have, by what the others have of it, among those with
    an id in ``own``.
    """
    if streaming_of(optimizer) is not None:
        return 0  # it goes to the tier as it comes
    with_state = without = state = 0
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if id(parameter) not in own:
            continue
        found = optimizer.state.get(parameter)
        if found:
            with_state += nbytes_of(parameter)
            state += sum(nbytes_of(leaf) for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
        elif parameter.requires_grad and parameter.grad is None:
            without += nbytes_of(parameter)
    return without * state // max(1, with_state)


def gradient_and_state_bytes(model: nn.Module, optimizers: Sequence[Optimizer], limit_bytes: int) -> int:
    """Bytes of gradients and optimizer state that are in memory if nothing is streamed. What fits into ``limit_bytes`` with
    any optimizer is not looked at more closely.
    """
    trained = {id(p): nbytes_of(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    trained |= {id(p): nbytes_of(p) for p in model.parameters() if p.requires_grad}
    gradients = sum(trained.values())
    most = (1 + _MOST_STATE) * gradients
    if sum(nbytes_of(p) for p in model.parameters()) + most <= _WITHOUT_A_LOOK * limit_bytes:
        return most
    state = 0
    for one in optimizers:
        mine = sum(nbytes_of(p) for group in one.param_groups for p in group["params"])
        state += int(mine * (0 if streaming_of(one) is not None else state_per_weight(one)))
    return gradients + state


def step_bytes(optimizers: Sequence[Optimizer]) -> int:
    """Memory that a step of these takes for itself, one after the other: AdamW's, of which others need no more."""
    most = 0
    for group in (group for one in optimizers for group in one.param_groups):
        sizes = [nbytes_of(p) for p in group["params"] if p.requires_grad]
        on_host = all(p.device.type == "cpu" for p in group["params"])
        if group.get("fused") or not sizes:
            continue
        at_once = group.get("foreach") or (group.get("foreach", False) is None and not on_host)
        most = max(most, sum(sizes) if at_once else 2 * max(sizes))
    return most
