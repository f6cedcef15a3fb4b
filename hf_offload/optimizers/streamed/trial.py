"""What an optimizer's class can do without: steps of small parameters, tried before anything is streamed."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hf_offload.errors import OffloadConfigError
from hf_offload.optimizers.streamed.contents import NotCopied, RandomNumbers, copied, told
from hf_offload.optimizers.streamed.shadow import (
    CUT_ELEMENTS,
    OwnValuesError,
    Shadow,
    attributes_of,
    options_of,
    pieces,
)
from hf_offload.optimizers.streamed.surroundings import Surroundings

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
        try:
            trial = _Trial(optimizer, kind, group)
            whole, apart = trial.run(apart=False, cut=False), trial.run(apart=True, cut=False)
            sets_gradients = sets_gradients or trial.sets_gradients()
        except OffloadConfigError:
            raise
        except NotCopied as error:
            raise OffloadConfigError(
                f"{kind.__name__} cannot be tried on small parameters, which decides whether its state can be streamed: "
                f"{error}. Use another optimizer, or optimizer='none'."
            ) from error
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
        try:
            most = max(most, _Trial(optimizer, type(optimizer), group).state_per_weight())
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
    """Steps with the options of ``group``, of parameters like those in it. Nothing that the optimizer has is changed: the
    steps are those of copies, and what random numbers are drawn from is put back.
    """

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer], group: Mapping[str, Any]):
        self._shadow = Shadow(optimizer, kind)
        self._name = kind.__name__
        self._optimizer = optimizer
        self._surroundings = Surroundings(kind)
        self._attributes = attributes_of(optimizer)
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

    def run(self, apart: bool, cut: bool) -> tuple[list[Tensor], list[Any]]:
        """Weights and state after some steps of small parameters, all at once or one ``apart`` from the other, and what there
        is in attributes then.
        """
        random = torch.Generator().manual_seed(0)
        parameters = [self._random(shape, random) for shape in self._shapes]
        targets = [pieces(one, CUT_ELEMENTS) if cut else [one] for one in parameters]
        flat = list(itertools.chain.from_iterable(targets))
        turns = [[one] for one in flat] if apart else [flat]
        state: dict[Tensor, dict[str, Any]] = {}
        with self._copies() as attributes:
            for number in range(_STEPS):
                for parameter, its_targets in zip(parameters, targets, strict=True):
                    gradient = self._random(parameter.shape, random)
                    parts = pieces(gradient, CUT_ELEMENTS) if cut else [gradient]
                    for target, part in zip(its_targets, parts, strict=True):
                        target.grad = part.clone()
                before = [] if number == 0 else self._own_values(attributes)
                for turn in turns:
                    state |= self._step(turn, {one: state[one] for one in turn if one in state}, attributes)
                    attributes = self._shadow.attributes
                after = self._own_values(attributes)
                if number and before != after:
                    raise self._error_of_own_values()
        found = list(parameters)
        for its_targets in targets:
            found += _merged(state, its_targets)
        return found, [] if cut else after

    def state_per_weight(self) -> float:
        """Bytes of state for each byte of the largest matrix."""
        random = torch.Generator().manual_seed(0)
        parameter = self._random(_MATRICES[-1], random)
        parameter.grad = self._random(_MATRICES[-1], random)
        with self._copies() as attributes:
            state = self._step([parameter], {}, attributes).get(parameter) or {}
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and leaf.dim()]
        return sum(tensor.nbytes for tensor in tensors) / parameter.nbytes

    def sets_gradients(self) -> bool:
        """Whether a parameter without a gradient is updated, or gets one, or one with a gradient gets another."""
        random = torch.Generator().manual_seed(0)
        parameter, gradient = (self._random(_MATRICES[0], random) for _ in range(2))
        before = parameter.clone()
        with self._copies() as attributes:
            try:
                state = self._step([parameter], {}, attributes)
            except Exception:  # it is not to be without one
                state = {}
        if any(state.values()) or parameter.grad is not None or not torch.equal(parameter, before):
            return True
        parameter.grad = gradient
        with self._copies() as attributes:
            self._step([parameter], {}, attributes)
        return parameter.grad is not gradient

    @contextlib.contextmanager
    def _copies(self) -> Iterator[Mapping[str, Any]]:
        """Copies of the attributes, for steps inside.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if these drew random numbers.
        """
        drawn_from = RandomNumbers(self._device)
        attributes = self._copied(self._attributes)
        try:
            with self._surroundings.copied(self._optimizer, self._shadow.stand_in):
                yield attributes
            if drawn_from.were_drawn:
                raise OffloadConfigError(
                    f"{self._name} draws random numbers, for one parameter after the other: its state cannot be streamed. "
                    "Use another optimizer, or optimizer='none'."
                )
        finally:
            drawn_from.restore()

    def _own_values(self, attributes: Mapping[str, Any]) -> list[Any]:
        return self._told({**attributes, **self._surroundings.present()})

    def _random(self, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=random).to(self._device, self._dtype)

    def _step(
        self, turn: list[Tensor], state: Mapping[Tensor, dict[str, Any]], attributes: Mapping[str, Any]
    ) -> dict[Tensor, dict[str, Any]]:
        options = self._copied(self._options)
        group = {**options, "params": turn}
        numbers, before = self._numbers(attributes), self._told(options)
        try:
            with torch.no_grad():
                after = self._shadow.step([group], state, attributes)
        except OwnValuesError as error:
            raise self._error_of_own_values() from error
        if self._told(_options_in(group)) != before or self._numbers(self._shadow.attributes) != numbers:
            raise self._error_of_own_values()
        return after

    def _error_of_own_values(self) -> OffloadConfigError:
        return OffloadConfigError(
            f"{self._name} draws random numbers, or keeps values of its own in its parameter groups or attributes, for all "
            "parameters together, and its steps change them: its state cannot be streamed. Use another optimizer, or "
            "optimizer='none'."
        )

    def _numbers(self, attributes: Mapping[str, Any]) -> list[Any]:
        # Switches, such as that of a check that is done once, and tables that a first step makes, do not count.
        values = {**attributes, **self._surroundings.present()}
        return told({name: value for name, value in values.items() if type(value) in (int, float, Tensor)})

    def _told(self, values: Mapping[str, Any]) -> list[Any]:
        return told(values, self._shadow.stand_in)

    def _copied(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return copied(values, self._optimizer, self._shadow.stand_in)


def _options_in(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


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


def _same(one: tuple[list[Tensor], list[Any]], other: tuple[list[Tensor], list[Any]]) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    (tensors, values), (other_tensors, other_values) = one, other
    return (
        len(tensors) == len(other_tensors)
        and (not other_values or values == other_values)
        and all(
            each.dtype == its_other.dtype and torch.equal(bits(each), bits(its_other))
            for each, its_other in zip(tensors, other_tensors, strict=True)
        )
    )
