"""Planning while training: measure a step, plan, look whether the plan holds, plan again when something changes."""

import dataclasses
import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from hf_offload.errors import OffloadPlanError
from hf_offload.interrupts import signals_deferred
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.measuring import StepMeter
from hf_offload.plan.plan import Placement, Plan
from hf_offload.plan.planner import find_plan, make_problem, plan_of
from hf_offload.plan.problem import Solution
from hf_offload.plan.ranks import Ranks
from hf_offload.plan.simulate import simulate
from hf_offload.settings.sizes import format_bytes

logger = logging.getLogger(__name__)

# A step that takes this much longer than predicted, several times in a row, is not noise.
_SLOWER = 1.25
_SLOW_STEPS = 3
# The first step under a new plan still learns which records need not leave: the second is looked at.
_SETTLED_STEPS = 1
# A smaller batch than one that was measured is measured itself when it has come so often in a row.
_LASTING_STEPS = 3
# Counting live tensors misses nothing but what was alive before; more than this over the budget is planned again.
_TOLERANCE = 0.01
_MOST_CORRECTIONS = 3
# What is no faster than this is not worth another plan, and another look at it.
_GAIN = 1.05

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class ObservedEngine(Protocol):
    """What feedback needs of the engine."""

    observer: Any

    def resident_bytes(self) -> int:
        """Bytes of saved tensors that it holds in memory now."""
        ...

    def waited_s(self) -> float:
        """Seconds it has kept the training waiting since the session began."""
        ...

    def bandwidth(self) -> tuple[float, float]:
        """Bytes a second that the tier stored and loaded so far; zero where unknown."""
        ...


@dataclasses.dataclass
class Prediction:
    """What a plan was predicted to do, and what it did.

    Attributes:
        peak_bytes: Most bytes of tensors alive at once, weights and optimizer state included.
        step_s: Time of a whole step.
        fixed_bytes: Weights, buffers and optimizer state: what no plan can move.
        measured_peak_bytes: The same, measured in one step under the plan; None before that step.
        measured_step_s: Times of the steps under the plan, the first one left out.
    """

    peak_bytes: int
    step_s: float
    fixed_bytes: int
    measured_peak_bytes: int | None = None
    measured_step_s: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Known:
    """What is known of one batch shape."""

    footprint: Footprint
    micro_batches: int
    solution: Solution
    prediction: Prediction
    correction_bytes: int = 0
    corrections: int = 0
    steps: int = 0
    compute_s: float | None = None  # of a step under the plan that nobody looked at, waiting left out


class Feedback:
    """Decides about the plan of a running training.

    The first step of a batch shape runs with everything moved, and is measured; a plan is made of what was measured. A
    smaller batch runs under the plan of a larger one, which it fits into, until it has come several times in a row and earns
    its own. The second step under each plan is measured, too: a peak over the budget is planned again with as much less, and
    a plan whose steps take longer than predicted is made from a new measurement. Where no plan fits, ``need_less`` is asked
    to change the model so that it needs less; if it has, the next step is measured as the first one was.

    Several processes decide together, about the largest batch and the largest peak that any of them has, and follow one plan.
    """

    def __init__(
        self,
        model: nn.Module,
        budget_bytes: int,
        hardware: Hardware,
        *,
        safest: Plan,
        apply: Callable[[Plan], None],
        engine: ObservedEngine,
        need_less: Callable[[], bool] = lambda: False,
        ranks: Ranks | None = None,
    ):
        self._model = weakref.ref(model)
        self._ranks = ranks or Ranks()
        self._budget = min(self._ranks.gather(budget_bytes))
        self._hardware = hardware
        self._safest = safest
        self._apply = apply
        self._engine = engine
        self._need_less = need_less
        self._meter: StepMeter | None = None
        self._known: dict[Shapes, _Known] = {}
        self._shapes: Shapes = ()  # of the running step
        self._current: _Known | None = None  # whose plan is in force
        self._repeated = 0
        self._slow = 0
        self._began_s: float | None = None
        self._waited_s = 0.0

    @property
    def prediction(self) -> Prediction | None:
        """Of the plan in force, or None before there is one."""
        return None if self._current is None else self._current.prediction

    # -- the run's events ---------------------------------------------------------------------------------------------

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward of the whole model begins, with these inputs."""
        if self._meter is not None and self._meter.is_over:
            self.end_step()  # nobody said that the last step had ended
        if self._meter is not None:
            self._meter.begin_forward()
            return
        if self._began_s is not None:
            return  # another micro-batch of a step that is under way
        named = {str(index): value for index, value in enumerate(args)} | dict(kwargs)
        shapes = tuple((name, tuple(value.shape)) for name, value in named.items() if isinstance(value, torch.Tensor))
        shapes = self._ranks.largest(shapes, _elements)
        self._repeated = self._repeated + 1 if shapes == self._shapes else 1
        self._shapes = shapes
        current = self._plan_for(shapes)
        if current is not self._current:
            self._current = current
            self._slow = 0
            self._apply(self._safest if current is None else plan_of(current.solution, self._safest, _reason(current)))
        with signals_deferred:  # a step that has begun without its meter would count as one more micro-batch
            self._began_s, self._waited_s = time.perf_counter(), self._engine.waited_s()
            if current is None or (current is self._known.get(shapes) and current.steps == _SETTLED_STEPS):
                model = self._model()
                assert model is not None, "a forward has a model"
                self._meter = StepMeter(model, self._engine.resident_bytes, self._engine.waited_s)
                self._engine.observer = self._meter
                self._meter.begin()
                self._meter.begin_forward()

    def end_step(self) -> None:
        """A training step has ended.

        Raises :class:`~hf_offload.errors.OffloadPlanError` after a measured step if the budget is too small.
        """
        began, self._began_s = self._began_s, None
        meter = self._stop_measuring()
        if began is None:
            return
        if self._current is None:
            assert meter is not None, "a step without a plan is measured"
            footprint = self._ranks.largest(meter.footprint(), lambda one: sum(one.saved_bytes.values()))
            micro_batches = max(1, meter.micro_batches)
            try:
                known = self._find(footprint, micro_batches, 0, 0)
            except OffloadPlanError as error:
                if not self._need_less():
                    raise
                self._log(logging.INFO, "Measuring again, with modules cut by tokens. %s", error)
                return
            self._adopt(known)
        elif self._current is self._known.get(self._shapes):
            self._current.steps += 1
            if meter is not None:
                self._check_step(self._current, meter)
                return
            seconds = time.perf_counter() - began
            if self._current.steps > 1:
                self._check_time(self._current, max(self._ranks.gather(seconds)))
            else:
                self._current.compute_s = max(self._ranks.gather(seconds - (self._engine.waited_s() - self._waited_s)))

    def close(self) -> None:
        """Stop observing, whatever happened."""
        self._stop_measuring()

    def leave_thread(self) -> None:
        """The model has gone in the middle of whatever this thread does: stop looking at it. Takes no lock."""
        meter = self._meter
        if meter is not None:
            meter.leave()

    def _stop_measuring(self) -> StepMeter | None:
        with signals_deferred:
            meter, self._meter = self._meter, None
            if meter is not None:
                meter.end()
                self._engine.observer = None
            return meter

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _plan_for(self, shapes: Shapes) -> _Known | None:
        """What to run these shapes under; None: measure them."""
        known = self._known.get(shapes)
        if known is not None:
            return known
        larger = [other for other in self._known if _fits_into(shapes, other)]
        if not larger or self._repeated >= _LASTING_STEPS:
            return None
        return self._known[min(larger, key=_elements)]

    def _check_step(self, known: _Known, meter: StepMeter) -> None:
        """Look at a step under the plan: was it within the budget, and was compute as fast as in the first step?"""
        peak = max(self._ranks.gather(meter.peak_bytes))
        known.prediction.measured_peak_bytes = peak
        excess = peak - self._budget
        too_much = excess > _TOLERANCE * self._budget
        # The first step was a cold one: caches, the allocator's heap and page tables have been filled since.
        # And what is looked at is slowed down by looking, so the pace is that of the step before.
        once, timeline = known.footprint.optimizer_step_s, known.solution.timeline
        predicted = (known.footprint.step_s - once + timeline.recompute_s) * known.micro_batches + once
        pace = 1.0 if known.compute_s is None else known.compute_s / max(predicted, 1e-9)
        footprint = known.footprint.at_pace(pace)
        needed = format_bytes(peak)
        may_correct = known.corrections < _MOST_CORRECTIONS
        if too_much and not may_correct:
            self._log(
                logging.WARNING, "A step still needs %s after %d corrections of its plan.", needed, known.corrections
            )
        elif too_much:
            self._log(logging.INFO, "The step needed %s, more than the budget: planning again.", needed)
        less = known.correction_bytes + (excess if too_much and may_correct else 0)
        try:
            other = self._find(footprint, known.micro_batches, less, known.corrections + 1)
        except OffloadPlanError as error:
            self._log(logging.WARNING, "The step needed %s, and no other plan needs less. %s", needed, error)
            known.corrections = _MOST_CORRECTIONS
            return
        channels = self._ranks.first(self._with_measured_bandwidth).channels
        timeline = simulate(footprint, known.solution.placements, channels, known.solution.windows)
        gain = timeline.step_s / other.solution.timeline.step_s
        if may_correct and (too_much or gain > _GAIN):
            self._adopt(other)
        else:
            known.footprint = footprint
            known.solution = dataclasses.replace(known.solution, timeline=timeline)
            known.prediction.step_s = _step_s(known)

    def _check_time(self, known: _Known, seconds: float) -> None:
        predicted = known.prediction.step_s
        known.prediction.measured_step_s.append(seconds)
        self._slow = self._slow + 1 if seconds > _SLOWER * predicted else 0
        if self._slow >= _SLOW_STEPS:
            self._log(
                logging.INFO, "Steps take %.2f s instead of the predicted %.2f s: measuring again.", seconds, predicted
            )
            del self._known[self._shapes]
            self._repeated = _LASTING_STEPS

    def _find(self, footprint: Footprint, micro_batches: int, correction_bytes: int, corrections: int) -> _Known:
        """The plan for a footprint, with ``correction_bytes`` less than the budget."""

        def solve() -> Solution:
            return find_plan(make_problem(footprint, self._with_measured_bandwidth(), self._budget - correction_bytes))

        solution = self._ranks.first(solve)
        prediction = Prediction(solution.timeline.peak_bytes + correction_bytes, 0.0, footprint.base_bytes)
        known = _Known(footprint, micro_batches, solution, prediction, correction_bytes, corrections)
        prediction.step_s = _step_s(known)
        return known

    def _adopt(self, known: _Known) -> None:
        """Let the plan be that of the running shapes, from the next forward on."""
        self._known[self._shapes] = self._current = known
        self._slow = 0
        kind = "Corrected plan" if known.corrections else "Plan"
        self._log(logging.INFO, "%s for %s of memory: %s.", kind, format_bytes(self._budget), _reason(known))
        self._apply(plan_of(known.solution, self._safest, _reason(known)))

    def _log(self, level: int, message: str, *values: object) -> None:
        """What all processes have decided, said by one of them."""
        if self._ranks.is_first:
            logger.log(level, message, *values)

    def _with_measured_bandwidth(self) -> Hardware:
        hardware = self._hardware
        tier = self._safest.default.tier
        assert tier is not None
        store, load = dict(hardware.store_bytes_per_s), dict(hardware.load_bytes_per_s)
        for rates, reached in zip((store, load), self._engine.bandwidth(), strict=True):
            if reached > 0:
                rates[tier] = dataclasses.replace(rates[tier], value=reached, source="measured")
        return dataclasses.replace(hardware, store_bytes_per_s=store, load_bytes_per_s=load)


def _step_s(known: _Known) -> float:
    """A step of as many micro-batches as were measured, and the optimizer's once."""
    once = known.footprint.optimizer_step_s
    return (known.solution.timeline.step_s - once) * known.micro_batches + once


def _reason(known: _Known) -> str:
    counts: dict[Placement, int] = {}
    for unit, placement in known.solution.placements.items():
        if known.footprint.saved_bytes[unit]:
            counts[placement] = counts.get(placement, 0) + 1
    placed = ", ".join(f"{count} units {placement.value}" for placement, count in counts.items())
    prediction = known.prediction
    return f"{placed}; predicted {format_bytes(prediction.peak_bytes)} and {prediction.step_s:.2f} s a step"


def _fits_into(shapes: Shapes, other: Shapes) -> bool:
    """Whether every tensor is there in ``other``, and no smaller in any dimension."""
    sizes = dict(other)
    return [name for name, _ in shapes] == [name for name, _ in other] and all(
        len(shape) == len(sizes[name]) and all(one <= two for one, two in zip(shape, sizes[name], strict=True))
        for name, shape in shapes
    )


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for _, shape in shapes)
