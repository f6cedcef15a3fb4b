"""What an optimizer's class can do without: steps of small parameters, tried before anything is streamed."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hf_offload.errors import OffloadConfigError
from hf_offload.optimizers.streamed.own_step import ChangedByStep, OwnStep, captured, check_overrides, is_known
from hf_offload.optimizers.streamed.shadow import CUT_ELEMENTS, Shadow, options_of, pieces

_STEPS = 3
_LR = 0.05
"""A schedule may begin with 0, where all updates are the same."""
_MATRICES = [(96, 100), (70, 130), (264, 260)]
"""The last one is large enough for classes that factor their state, or quantise it, from 128 or 256 elements on."""
_USUAL_STATE = 2.0
_ALIKE = 2
"""So many groups of the same options are tried: a step may take those of another group."""
_NOT_COMPARED = ("params", "param_names", "lr", "initial_lr")


@dataclasses.dataclass(frozen=True)
class Traits:
    """Of a class of optimizers: whether it ``cuts``, that is, parameters may step in parts, and whether it ``sets_gradients``
    itself, also where there is none. ``own`` is its step if the class is not a known one.
    """

    cuts: bool
    sets_gradients: bool
    own: OwnStep | None


def traits_of(optimizer: Optimizer, kind: type[Optimizer]) -> Traits:
    """Those of ``kind``, the class of ``optimizer``, with the options of its groups.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for an optimizer whose update of one parameter depends on others, or
    on anything but options, gradient and state. Nothing that the optimizer has is changed.
    """
    if issubclass(kind, torch.optim.LBFGS):
        raise OffloadConfigError(
            "LBFGS evaluates the loss several times in a step, over all parameters at once: it cannot be streamed. Use "
            "another optimizer, or optimizer='none'."
        )
    own = _own_step(optimizer, kind)
    cuts, sets_gradients = own is None, False
    groups = [group for group in optimizer.param_groups if any(_has_gradients(p) for p in group["params"])]
    for group in groups:
        for name, value in group.items():
            if name in _NOT_COMPARED or not isinstance(value, list) or len(value) != len(group["params"]):
                continue
            if own is not None or not all(isinstance(each, int | float) for each in value):
                raise OffloadConfigError(
                    f"{kind.__name__} keeps {name!r} in its parameter groups, an entry for each parameter, and updates "
                    "several together: its state cannot be streamed. Use another optimizer, or optimizer='none'."
                )
    for trial in _trials(optimizer, kind, own):
        try:
            whole, apart = trial.run(apart=False, cut=False), trial.run(apart=True, cut=False)
            sets_gradients = sets_gradients or trial.sets_gradients()
        except OffloadConfigError:
            raise
        except ChangedByStep as error:
            raise _keeps_its_own(kind) from error
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
        if own is not None:
            own.check_state(optimizer, trial.made)
            own.takes_closure = trial.takes_closure()
        try:
            cuts = cuts and _same(whole, trial.run(apart=True, cut=True))
        except Exception:  # it needs the shape
            cuts = False
    return Traits(cuts and not sets_gradients, sets_gradients, own)


def state_per_weight(optimizer: Optimizer) -> float:
    """Bytes of state that ``optimizer`` keeps for each byte of a large weight: the most of its groups.

    What cannot be tried on small parameters counts as AdamW in the weights' type.
    """
    try:
        trials = _trials(optimizer, type(optimizer), _own_step(optimizer, type(optimizer)))
        return max((trial.state_per_weight() for trial in trials), default=0.0)
    except Exception:
        return _USUAL_STATE


def _own_step(optimizer: Optimizer, kind: type[Optimizer]) -> OwnStep | None:
    if is_known(optimizer, kind):
        check_overrides(optimizer)
        return None
    return OwnStep(optimizer, kind)


def _trials(optimizer: Optimizer, kind: type[Optimizer], own: OwnStep | None) -> "list[_Trial]":
    """One for each of the groups that differ; all of them in one, for a class that is not known: it may look at others."""
    found: dict[str, list[dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        if any(_has_gradients(p) for p in group["params"]):
            kinds = {(p.dtype, p.dim()) for p in group["params"]}
            options = {name: value for name, value in sorted(group.items()) if name not in _NOT_COMPARED}
            found.setdefault(repr((options, sorted(map(str, kinds)))), []).append(group)
    if own is None:
        return [_Trial(optimizer, kind, alike[:1]) for alike in found.values()]
    groups = [group for alike in found.values() for group in alike[:_ALIKE]]
    return [_Trial(optimizer, kind, groups, own)] if groups else []


def _keeps_its_own(kind: type[Optimizer]) -> OffloadConfigError:
    return OffloadConfigError(
        f"{kind.__name__} keeps numbers of its own in its parameter groups or attributes, for all parameters together: "
        "its state cannot be streamed. Use another optimizer, or optimizer='none'."
    )


def _has_gradients(parameter: Tensor) -> bool:
    """Whether it may have one: optimizers pass integers by."""
    return parameter.is_floating_point() or parameter.is_complex()


def _like(dim: int) -> list[tuple[int, ...]]:
    """Two shapes of so many dimensions, where matrices are not enough: updates may depend on others of the same number."""
    if dim < 2:
        return [(9000,), (5000,)]
    return [] if dim == 2 else [(rows, 36, *[3] * (dim - 2)) for rows in (40, 24)]


class _Group:
    """Options of a group, and what small parameters like those in it are like."""

    def __init__(self, group: Mapping[str, Any], number: int):
        self.options = options_of(group)
        lr = self.options.get("lr")
        step_size = _LR * (1 + number / 8)
        if isinstance(lr, Tensor):
            self.options["lr"] = torch.full_like(lr, step_size)
        elif isinstance(lr, float | int):
            self.options["lr"] = step_size
        self._names: list[str] | None = group.get("param_names")
        self._called: dict[Tensor, str] = {}
        parameters = [p for p in group["params"] if _has_gradients(p)]
        dims = {p.dim() for p in parameters}
        examples = [p for p in parameters if p.dim() > 1] or parameters
        self.dtype, self.device = examples[0].dtype, examples[0].device
        self.shapes: list[tuple[int, ...]] = [*_MATRICES, *(shape for dim in sorted(dims) for shape in _like(dim))]

    def random(self, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=random).to(self.device, self.dtype)

    def call(self, parameters: list[Tensor]) -> None:
        """Give names to these parameters, those of the real ones, in turn."""
        if self._names is not None:
            self._called = {one: self._names[number % len(self._names)] for number, one in enumerate(parameters)}

    def of(self, parameters: list[Tensor]) -> dict[str, Any]:
        """A group with these parameters."""
        names = {}
        if self._names is not None:
            names["param_names"] = [self._called.get(one, self._names[0]) for one in parameters]
        return {**{name: captured(value) for name, value in self.options.items()}, "params": parameters, **names}


class _Trial:
    """Steps with the options of ``groups``, of parameters like those in them."""

    def __init__(
        self, optimizer: Optimizer, kind: type[Optimizer], groups: list[dict[str, Any]], own: OwnStep | None = None
    ):
        self.made: dict[
            str, set[Any]
        ] = {}  # in the state of parameters, with the values that are not numbers or tensors
        self._shadow = Shadow(optimizer, kind, own)
        self._kind = kind
        self._own = own
        self._attributes = self._shadow.attributes
        self._groups = [_Group(group, number) for number, group in enumerate(groups)]

    def run(self, apart: bool, cut: bool) -> list[Tensor]:
        """Weights and state after some steps of small parameters, all at once or one ``apart`` from the other."""
        with self._without_traces():
            return self._run(apart, cut)

    def _run(self, apart: bool, cut: bool) -> list[Tensor]:
        random = torch.Generator().manual_seed(0)
        like = [(number, shape) for number, group in enumerate(self._groups) for shape in group.shapes]
        parameters = [self._groups[number].random(shape, random) for number, shape in like]
        targets = [pieces(one, CUT_ELEMENTS) if cut else [one] for one in parameters]
        flat = [(number, one) for (number, _), its in zip(like, targets, strict=True) for one in its]
        for each, group in enumerate(self._groups):
            group.call([one for number, one in flat if number == each])
        turns = [[one] for one in flat] if apart else [flat]
        state: dict[Tensor, dict[str, Any]] = {}
        attributes: Mapping[str, Any] = self._attributes
        for _ in range(_STEPS):
            for (number, shape), its_targets in zip(like, targets, strict=True):
                gradient = self._groups[number].random(shape, random)
                parts = pieces(gradient, CUT_ELEMENTS) if cut else [gradient]
                for target, part in zip(its_targets, parts, strict=True):
                    target.grad = part.clone()
            for turn in turns:
                state |= self._step(turn, {one: state[one] for _, one in turn if one in state}, attributes)
                attributes = self._shadow.attributes
        for its in state.values():
            for name, value in its.items():
                made = self.made.setdefault(name, set())
                if isinstance(value, (bool, str, type(None))):
                    made.add(value)
        found = list(parameters)
        for its_targets in targets:
            found += _merged(state, its_targets)
        return found

    def state_per_weight(self) -> float:
        """Bytes of state for each byte of the largest matrix."""
        most = 0.0
        for number, group in enumerate(self._groups):
            random = torch.Generator().manual_seed(0)
            parameter = group.random(_MATRICES[-1], random)
            parameter.grad = group.random(_MATRICES[-1], random)
            with self._without_traces():
                state = self._step([(number, parameter)], {}, self._attributes).get(parameter) or {}
            tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and leaf.dim()]
            most = max(most, sum(tensor.nbytes for tensor in tensors) / parameter.nbytes)
        return most

    def sets_gradients(self) -> bool:
        """Whether a parameter without a gradient is updated, or gets one, or one with a gradient gets another."""
        with self._without_traces():
            return any(self._sets_gradients(number) for number in range(len(self._groups)))

    def _sets_gradients(self, number: int) -> bool:
        random = torch.Generator().manual_seed(0)
        parameter, gradient = (self._groups[number].random(_MATRICES[0], random) for _ in range(2))
        before = parameter.clone()
        try:
            state = self._step([(number, parameter)], {}, self._attributes)
        except (OffloadConfigError, ChangedByStep):
            raise
        except Exception:  # it is not to be without one
            state = {}
        if any(state.values()) or parameter.grad is not None or not torch.equal(parameter, before):
            return True
        parameter.grad = gradient
        self._step([(number, parameter)], {}, self._attributes)
        return parameter.grad is not gradient

    def takes_closure(self) -> bool:
        """Whether a step calls a closure once, before anything else."""
        results = []
        for called in (False, True):
            random = torch.Generator().manual_seed(0)
            parameter, gradient = (self._groups[0].random(_MATRICES[0], random) for _ in range(2))
            before = parameter.clone()
            calls: list[bool] = []

            def closure(parameter: Tensor = parameter, gradient: Tensor = gradient, calls: list[bool] = calls) -> float:
                calls.append(torch.equal(parameter, before) and torch.is_grad_enabled())  # noqa: B023 -- called in this turn
                parameter.grad = gradient
                return 1.0

            if not called:
                parameter.grad = gradient
            try:
                with self._without_traces():
                    self._step([(0, parameter)], {}, self._attributes, *([closure] if called else []))
            except (TypeError, ChangedByStep):
                return False
            if calls != [True] * called:
                return False
            results.append(parameter)
        return _same(results[:1], results[1:])

    @contextlib.contextmanager
    def _without_traces(self) -> Iterator[None]:
        """Restores what random numbers are drawn from, and what the code of a class that is not known finds elsewhere.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if such a class has changed it.
        """
        devices = [group.device for group in self._groups if group.device.type not in ("cpu", "meta")]
        their_type = {"device_type": devices[0].type} if devices else {}
        before = None if self._own is None else self._own.present()
        try:
            with torch.random.fork_rng(devices[:1], **their_type):
                drawn_from = torch.get_rng_state()
                yield
                drawn = not torch.equal(drawn_from, torch.get_rng_state())
        finally:
            changed = None
            if self._own is not None and before is not None:
                changed = self._own.unlike(before)
                self._own.restore(before)
        if self._own is not None and (drawn or changed is not None):
            what = "draws random numbers" if drawn else f"changes {changed!r}"
            raise OffloadConfigError(
                f"{self._kind.__name__} {what} for one parameter after the other: its state cannot be streamed. Use another "
                "optimizer, or optimizer='none'."
            )

    def _step(
        self,
        turn: list[tuple[int, Tensor]],
        state: Mapping[Tensor, dict[str, Any]],
        attributes: Mapping[str, Any],
        *arguments: Any,
    ) -> dict[Tensor, dict[str, Any]]:
        groups = [group.of([one for its, one in turn if its == number]) for number, group in enumerate(self._groups)]
        with torch.no_grad():
            after = self._shadow.step(groups, state, attributes, *arguments)
        changed = any(
            repr(options_of(group)) != repr(mine.options) for group, mine in zip(groups, self._groups, strict=True)
        )
        if changed or _numbers(attributes) != _numbers(self._shadow.attributes):
            raise _keeps_its_own(self._kind)
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
