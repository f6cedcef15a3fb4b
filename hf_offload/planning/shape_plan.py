"""The plan for a batch shape, and what it was predicted to do: from a measured micro-batch, a machine and a budget."""

import dataclasses
import logging

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.choosing import Choice, everything_stays, least_memory, problem_of
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.plan import Placement, Plan
from hf_offload.plan.problem import Problem, Solution, plan_of
from hf_offload.plan.refusal import find_choice
from hf_offload.plan.simulate import likely_peak
from hf_offload.plan.state_placement import IN_MEMORY, Allowed, StatePlacement
from hf_offload.plan.timeline import Windows
from hf_offload.planning.batch_shape import BatchShape
from hf_offload.ranks import Ranks
from hf_offload.settings.sizes import format_bytes

logger = logging.getLogger(__name__)

_MOST_CORRECTIONS = 3
# What is no faster than this is not worth another plan, and another look at it.
_GAIN = 1.05


def say(ranks: Ranks, level: int, message: str, *values: object) -> None:
    """What all processes have decided, said by one of them."""
    if ranks.is_first:
        logger.log(level, message, *values)


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the plans of a run are made for.

    Attributes:
        ranks: The processes that run under one plan.
    """

    budget_bytes: int
    hardware: Hardware
    allowed: Allowed
    ranks: Ranks


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
class ShapePlan:
    """The plan for one batch shape.

    Attributes:
        footprint: The measured micro-batch that it was made of.
        state_placement: Where weights, gradients and state are to be.
        correction_bytes: How much less than the budget it was made for.
        corrections: How many plans of the same micro-batch came before it.
        steps: How many ran under it.
        pace: Time of compute as a ratio to what was measured at first.
        exceeds: Whether it does not fit the budget, which no plan does.
    """

    shape: BatchShape
    footprint: Footprint
    problem: Problem
    solution: Solution
    state_placement: StatePlacement
    prediction: Prediction
    correction_bytes: int = 0
    corrections: int = 0
    steps: int = 0
    pace: float = 1.0
    exceeds: bool = False

    @classmethod
    def made_of(cls, shape: BatchShape, footprint: Footprint, choice: Choice, peak_bytes: int) -> "ShapePlan":
        """The plan that ``choice`` is, with this predicted peak."""
        prediction = Prediction(peak_bytes, 0.0, footprint.base_bytes)
        found = cls(shape, footprint, choice.problem, choice.solution, choice.state_placement, prediction)
        prediction.step_s = found.micro_batch_s + footprint.optimizer_step_s
        return found

    def is_for(self, shape: BatchShape) -> bool:
        """Whether it was made for ``shape``, and not for a larger one."""
        return shape.begins(self.shape)

    @property
    def compute_s(self) -> float:
        """Predicted time of a micro-batch without the optimizer's, and without waiting."""
        return self.footprint.step_s - self.footprint.optimizer_step_s + self.solution.timeline.recompute_s

    @property
    def micro_batch_s(self) -> float:
        """Predicted time of a micro-batch without the optimizer's."""
        return self.solution.timeline.step_s - self.footprint.optimizer_step_s

    @property
    def reason(self) -> str:
        """What is placed where, in words, and what that is predicted to need."""
        counts: dict[Placement, int] = {}
        for unit, placement in self.solution.placements.items():
            if self.footprint.saved_bytes[unit]:
                counts[placement] = counts.get(placement, 0) + 1
        placed = ", ".join(f"{count} units {placement.value}" for placement, count in counts.items())
        if self.footprint.is_reduced:
            placed += ", elementwise operations recomputed"
        prediction = self.prediction
        return f"{placed}; predicted {format_bytes(prediction.peak_bytes)} and {prediction.step_s:.2f} s a step"

    def plan_like(self, safest: Plan) -> Plan:
        """The engine's plan; what this does not say is as in ``safest``."""
        return plan_of(self.problem, self.solution, safest, self.reason)

    # -- corrections --------------------------------------------------------------------------------------------------

    def corrected(self, peak_bytes: int, terms: Terms) -> "ShapePlan | None":
        """Another plan for the same micro-batch, if its step broke the budget, or if another is faster by what was measured.
        Where this one stays, since no other fits or is faster, its prediction is corrected.
        """
        if self.exceeds:
            self._stay(*self._present(terms))
            return None
        # The first step was a cold one: caches, the allocator's heap and page tables have been filled since.
        # And what is looked at is slowed down by looking, so the pace is that of steps that were not.
        footprint, present, peak = self._present(terms)
        step_s = present.timeline.step_s
        more, needed = peak_bytes - terms.budget_bytes, format_bytes(peak_bytes)
        may_correct = self.corrections < _MOST_CORRECTIONS
        if more > 0 and not may_correct:
            text = "A step still needs %s after %d corrections of its plan."
            say(terms.ranks, logging.INFO, text, needed, self.corrections)
        elif more > 0:
            say(terms.ranks, logging.INFO, "The step needed %s, more than the budget: planning again.", needed)
        elif not may_correct or step_s <= _GAIN * footprint.step_s:
            self._stay(footprint, present, peak)  # no plan takes less than all of its compute
            return None
        less = self.correction_bytes + (more if more > 0 and may_correct else 0)
        try:
            other = planned(self.shape, footprint, terms, less=less, corrections=self.corrections + 1)
        except OffloadPlanError as error:
            say(terms.ranks, logging.INFO, "The step needed %s, and no other plan needs less. %s", needed, error)
            self.corrections = _MOST_CORRECTIONS
            return None
        if may_correct and (more > 0 or step_s > _GAIN * other.solution.timeline.step_s):
            return other
        self._stay(footprint, present, peak)
        return None

    def _present(self, terms: Terms) -> tuple[Footprint, Solution, int]:
        """The measured micro-batch at the present pace, and the plan at that pace and at present rates, with its peak."""
        footprint = self.footprint.at_pace(self.pace)
        self.pace = 1.0

        def play() -> tuple[Solution, int]:
            problem = problem_of(footprint, terms.hardware, terms.budget_bytes, self.state_placement, terms.allowed)
            solution = problem.play(self.solution.placements, self.solution.windows)
            return solution, _peak_of(problem, solution)

        # Each process has rates of its own: the first one's count, or they would not decide alike.
        return footprint, *terms.ranks.first(play)

    def _stay(self, footprint: Footprint, solution: Solution, peak_bytes: int) -> None:
        self.prediction.step_s += solution.timeline.step_s - self.solution.timeline.step_s
        self.footprint, self.solution = footprint, solution
        # What is on its way at the rates that were reached: faster tiers have less of it, and slower ones more.
        peak = self.correction_bytes + peak_bytes
        self.prediction.peak_bytes = max(peak, self.prediction.measured_peak_bytes or 0)


def planned(shape: BatchShape, footprint: Footprint, terms: Terms, *, less: int = 0, corrections: int = 0) -> ShapePlan:
    """The plan for a measured micro-batch, with ``less`` bytes less than the budget, over all that is allowed.

    Raises :class:`~hf_offload.errors.OffloadPlanError` if the budget is too small.
    """
    choice = terms.ranks.first(lambda: find_choice(footprint, terms.hardware, terms.budget_bytes, terms.allowed, less))
    found = ShapePlan.made_of(shape, footprint, choice, _peak_of(choice.problem, choice.solution) + less)
    found.correction_bytes, found.corrections = less, corrections
    return found


def planned_over_budget(shape: BatchShape, footprint: Footprint, terms: Terms) -> ShapePlan:
    """The plan that needs the least memory, for a budget that none fits into. Weights and state stay where they are."""
    allowed = dataclasses.replace(terms.allowed, must_stay=True)
    choice = terms.ranks.first(lambda: least_memory(footprint, terms.hardware, terms.budget_bytes, allowed))
    found = ShapePlan.made_of(shape, footprint, choice, _peak_of(choice.problem, choice.solution))
    found.exceeds = True
    return found


def _peak_of(problem: Problem, solution: Solution) -> int:
    """What a step is predicted to need; what has to be there for it may be more."""
    return likely_peak(problem.footprint, solution.placements, problem.channels, solution.windows)


# -- steps that are measured: all that can be moved is moved, within the budget if that is possible -----------------------


def windows_to_move_all(
    problem: Problem, safest: Plan, more_bytes: int = 0, *, within_room: bool = True
) -> Windows | None:
    """The widest with which everything can be moved, ``more_bytes`` of the budget stay free, and, ``within_room``, no tier is
    filled; None if there are none. Where those let any number of bytes wait to be written, no more may wait than in a first
    step: how fast a drive is at the moment is not known.
    """
    moved = dict.fromkeys(problem.footprint.units, safest.default)
    for windows in problem.windows:
        solution = problem.play(moved, windows)
        fits = solution.timeline.must_fit_bytes + more_bytes <= problem.limit_bytes
        if fits and (not within_room or problem.has_room(solution)):
            return windows if windows.write_behind_bytes < problem.limit_bytes else not_behind(windows, safest)
    return None


def not_behind(windows: Windows, safest: Plan) -> Windows:
    """``windows`` in which no more waits to be written than ``safest`` lets wait."""
    behind = min(windows.write_behind_bytes, safest.write_behind_bytes)
    return dataclasses.replace(windows, write_behind_bytes=behind)


def moving_all(safest: Plan, windows: Windows) -> Plan:
    """``safest`` with other windows."""
    return dataclasses.replace(
        safest, read_ahead_bytes=windows.read_ahead_bytes, write_behind_bytes=windows.write_behind_bytes
    )


# -- steps that are measured once more, with recompute of elementwise operations ------------------------------------------


def repeats_elementwise(footprint: Footprint, terms: Terms) -> bool:
    """Whether a plan of this step has it by rule, and it was not measured so: something has to leave memory that is fast."""
    return terms.ranks.first(
        lambda: (
            not footprint.is_reduced
            and terms.hardware.repeats_elementwise
            and not everything_stays(footprint, terms.hardware, terms.budget_bytes, terms.allowed)
        )
    )


def windows_to_reduce(usual: Footprint, terms: Terms, safest: Plan, *, within_room: bool) -> Windows | None:
    """Those to measure such a step with, of which ``usual`` was measured without. None if everything that moves, and what one
    unit recomputes, is not within the budget, and of tiers if it is to be ``within_room``.
    """
    placement = terms.allowed.now or IN_MEMORY
    problem = problem_of(usual, terms.hardware, terms.budget_bytes, placement, terms.allowed)
    # What is recomputed of a unit is what it would have saved.
    recomputed = (usual.saved_bytes[unit] for unit, block in usual.units.items() if block is not None)
    return windows_to_move_all(problem, safest, max(recomputed, default=0), within_room=within_room)
