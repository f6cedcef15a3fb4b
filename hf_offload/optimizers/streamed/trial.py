"""What an optimizer's class can do without: steps of small parameters, tried before anything is streamed."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hf_offload.errors import OffloadConfigError
from hf_offload.optimizers.streamed.shadow import CUT_ELEMENTS, Shadow, options_of, pieces

_STEPS = 3
_LR = 0.05
"""A schedule may begin with 0, where all updates are the same."""
_MATRICES = [(96, 100), (70, 130), (264, 260)]
"""The last one is large enough for classes that factor their state, or quantise it, from 128 or 256 elements on."""
_USUAL_STATE = 2.0
_NOT_COMPARED = ("params", "param_names", "lr", "initial_lr", "weight_decay")


@dataclasses.dataclass(frozen=True)
class Traits:
    """Of a class of optimizers: whether it ``cuts``, that is, parameters may step in parts, and whether it ``sets_gradients``
    itself, also where there is none.
    """

    cuts: bool
    sets_gradients: bool


def traits_of(optimizer: Optimizer, kind: type[Optimizer]) -> Traits:
    """Those of ``kind``, the class of ``optimizer``, with the options of its groups.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for an optimizer whose update of one parameter depends on others, or
    on anything but options, gradient and state.
    """
    if issubclass(kind, torch.optim.LBFGS):
        raise OffloadConfigError(
            "LBFGS evaluates the loss several times in a step, over all parameters at once: it cannot be streamed. Use "
            "another optimizer, or optimizer='none'."
        )
    cuts, sets_gradients = True, False
    for group in _different(optimizer.param_groups):
        for name, value in group.items():
            if name not in _NOT_COMPARED and isinstance(value, list) and len(value) == len(group["params"]):
                raise OffloadConfigError(
                    f"{kind.__name__} keeps {name!r} in its parameter groups, an entry for each parameter, and updates "
                    "several together: its state cannot be streamed. Use another optimizer, or optimizer='none'."
                )
        trial = _Trial(optimizer, kind, group)
        try:
            with torch.random.fork_rng(devices=[]):
                whole, apart = trial.run(apart=False, cut=False), trial.run(apart=True, cut=False)
                sets_gradients = sets_gradients or trial.sets_gradients()
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
                cuts = cuts and _same(whole, trial.run(apart=True, cut=True))
        except Exception:  # it needs the shape
            cuts = False
    return Traits(cuts and not sets_gradients, sets_gradients)


def state_per_weight(optimizer: Optimizer) -> float:
    """Bytes of state that ``optimizer`` keeps for each byte of a large weight: the most of its groups.

    What cannot be tried on small parameters counts as AdamW in the weights' type.
    """
    most = 0.0
    for group in _different(optimizer.param_groups):
        trial = _Trial(optimizer, type(optimizer), group)
        with torch.random.fork_rng(devices=[]):
            try:
                most = max(most, trial.state_per_weight())
            except Exception:
                most = max(most, _USUAL_STATE)
    return most


def _different(groups: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        if any(_has_gradients(p) for p in group["params"]):
            kinds = {(p.dtype, p.dim()) for p in group["params"]}
            options = {name: value for name, value in sorted(group.items()) if name not in _NOT_COMPARED}
            found.setdefault(repr((options, sorted(map(str, kinds)))), group)
    return found.values()


def _has_gradients(parameter: Tensor) -> bool:
    """Whether it may have one: optimizers pass integers by."""
    return parameter.is_floating_point() or parameter.is_complex()


class _Trial:
    """Steps with the options of ``group``, of parameters like those in it."""

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer], group: Mapping[str, Any]):
        self._shadow = Shadow(optimizer, kind)
        self._name = kind.__name__
        self._attributes = self._shadow.attributes
        self._options = options_of(group)
        lr = self._options.get("lr")
        if isinstance(lr, Tensor):
            self._options["lr"] = torch.full_like(lr, _LR)
        elif isinstance(lr, float | int):
            self._options["lr"] = _LR
        parameters = [p for p in group["params"] if _has_gradients(p)]
        dims = {p.dim() for p in parameters}
        examples = [p for p in parameters if p.dim() > 1] or parameters
        self._dtype, self._device = examples[0].dtype, examples[0].device
        self._shapes: list[tuple[int, ...]] = [*_MATRICES, *((40, 36, *[3] * (dim - 2)) for dim in dims if dim > 2)]
        if min(dims) < 2:
            self._shapes.append((9000,))

    def run(self, apart: bool, cut: bool) -> list[Tensor]:
        """Weights and state after some steps of small parameters, all at once or one ``apart`` from the other."""
        random = torch.Generator().manual_seed(0)
        parameters = [self._random(shape, random) for shape in self._shapes]
        targets = [pieces(one, CUT_ELEMENTS) if cut else [one] for one in parameters]
        flat = list(itertools.chain.from_iterable(targets))
        turns = [[one] for one in flat] if apart else [flat]
        state: dict[Tensor, dict[str, Any]] = {}
        attributes: Mapping[str, Any] = self._attributes
        for _ in range(_STEPS):
            for parameter, its_targets in zip(parameters, targets, strict=True):
                gradient = self._random(parameter.shape, random)
                parts = pieces(gradient, CUT_ELEMENTS) if cut else [gradient]
                for target, part in zip(its_targets, parts, strict=True):
                    target.grad = part.clone()
            for turn in turns:
                state |= self._step(turn, {one: state[one] for one in turn if one in state}, attributes)
                attributes = self._shadow.attributes
        found = list(parameters)
        for its_targets in targets:
            found += _merged(state, its_targets)
        return found

    def state_per_weight(self) -> float:
        """Bytes of state for each byte of the largest matrix."""
        random = torch.Generator().manual_seed(0)
        parameter = self._random(_MATRICES[-1], random)
        parameter.grad = self._random(_MATRICES[-1], random)
        state = self._step([parameter], {}, self._attributes).get(parameter) or {}
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and leaf.dim()]
        return sum(tensor.nbytes for tensor in tensors) / parameter.nbytes

    def sets_gradients(self) -> bool:
        """Whether a parameter without a gradient is updated, or gets one, or one with a gradient gets another."""
        random = torch.Generator().manual_seed(0)
        parameter, gradient = (self._random(_MATRICES[0], random) for _ in range(2))
        before = parameter.clone()
        try:
            state = self._step([parameter], {}, self._attributes)
        except Exception:  # it is not to be without one
            state = {}
        if any(state.values()) or parameter.grad is not None or not torch.equal(parameter, before):
            return True
        parameter.grad = gradient
        self._step([parameter], {}, self._attributes)
        return parameter.grad is not gradient

    def _random(self, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=random).to(self._device, self._dtype)

    def _step(
        self, turn: list[Tensor], state: Mapping[Tensor, dict[str, Any]], attributes: Mapping[str, Any]
    ) -> dict[Tensor, dict[str, Any]]:
        group = {**self._options, "params": turn}
        with torch.no_grad():
            after = self._shadow.step([group], state, attributes)
        if repr(options_of(group)) != repr(self._options) or _numbers(attributes) != _numbers(self._shadow.attributes):
            raise OffloadConfigError(
                f"{self._name} keeps numbers of its own in its parameter groups or attributes, for all parameters together: "
                "its state cannot be streamed. Use another optimizer, or optimizer='none'."
            )
        return after


def _numbers(attributes: Mapping[str, Any]) -> str:
    # Switches, such as that of a check that is done once, do not count.
    return repr([(name, value) for name, value in attributes.items() if type(value) in (int, float, Tensor)])


def _merged(state: Mapping[Tensor, dict[str, Any]], targets: list[Tensor]) -> list[Tensor]:
    """The tensors in the state of ``targets``, the pieces of one parameter."""
    first = state.get(targets[0]) or {}
    found = []
    for name in sorted(first, key=str):
        values = [state[target][name] for target in targets]
        if not isinstance(values[0], Tensor):
            found.append(torch.tensor([float(values[0])]) if isinstance(values[0], int | float) else torch.empty(0))
        elif all(value.shape == target.shape for value, target in zip(values, targets, strict=True)):
            found.append(torch.cat([value.reshape(-1) for value in values]))
        else:
            found.append(values[0].reshape(-1))
    return found


def _same(ones: list[Tensor], others: list[Tensor]) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    return len(ones) == len(others) and all(
        one.dtype == other.dtype and torch.equal(bits(one), bits(other))
        for one, other in zip(ones, others, strict=True)
    )
