"""What becomes of a plan once a step under it has been measured."""

import logging

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.places import problem_of
from hf_offload.plan.problem import Solution
from hf_offload.planning.known import Known, Terms, known_by_simulating, peak_of
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


def corrected_plan(known: Known, peak_bytes: int, terms: Terms) -> Known | None:
    """Another plan for the same micro-batch, if its step broke the budget, or if another is faster by what was measured.

    Where ``known`` stays, its prediction is corrected. Where no plan fits, it stays.
    """
    if known.exceeds:
        follow_pace(known, terms)
        return None
    # The first step was a cold one: caches, the allocator's heap and page tables have been filled since.
    # And what is looked at is slowed down by looking, so the pace is that of steps that were not.
    footprint = known.footprint.at_pace(known.pace)
    known.pace = 1.0
    # Each process has rates of its own: the first one's count, or they would not decide alike.
    present = terms.ranks.first(lambda: _present(known, footprint, terms))
    step_s = present[0].timeline.step_s
    excess, needed = peak_bytes - terms.budget_bytes, format_bytes(peak_bytes)
    may_correct = known.corrections < _MOST_CORRECTIONS
    if excess > 0 and not may_correct:
        say(
            terms.ranks,
            logging.INFO,
            "A step still needs %s after %d corrections of its plan.",
            needed,
            known.corrections,
        )
    elif excess > 0:
        say(terms.ranks, logging.INFO, "The step needed %s, more than the budget: planning again.", needed)
    elif not may_correct or step_s <= _GAIN * footprint.step_s:
        _stay(known, footprint, *present)  # no plan takes less than all of its compute
        return None
    less = known.correction_bytes + (excess if excess > 0 and may_correct else 0)
    try:
        corrections = known.corrections + 1
        other = known_by_simulating(known.situation, footprint, terms, less=less, corrections=corrections)
    except OffloadPlanError as error:
        say(terms.ranks, logging.INFO, "The step needed %s, and no other plan needs less. %s", needed, error)
        known.corrections = _MOST_CORRECTIONS
        return None
    if may_correct and (excess > 0 or step_s > _GAIN * other.solution.timeline.step_s):
        return other
    _stay(known, footprint, *present)
    return None


def follow_pace(known: Known, terms: Terms) -> None:
    """Correct the prediction of ``known``, whose plan stays, by the pace of its steps and the rates that were reached."""
    footprint = known.footprint.at_pace(known.pace)
    known.pace = 1.0
    before_s = known.solution.timeline.step_s
    _stay(known, footprint, *terms.ranks.first(lambda: _present(known, footprint, terms)))
    known.followed *= known.solution.timeline.step_s / before_s


def _present(known: Known, footprint: Footprint, terms: Terms) -> tuple[Solution, int]:
    """The plan as it is, at the present pace and rates, and its peak."""
    step = footprint if known.problem.footprint.usual is None else footprint.reduced
    assert step is not None, "the plan was made of it"
    problem = problem_of(step, terms.hardware, terms.budget_bytes, known.held, terms.allowed)
    solution = problem.play(known.solution.placements, known.solution.windows)
    return solution, peak_of(problem, solution)


def _stay(known: Known, footprint: Footprint, solution: Solution, peak_bytes: int) -> None:
    """Correct the prediction of a plan that stays."""
    known.prediction.step_s += solution.timeline.step_s - known.solution.timeline.step_s
    known.footprint, known.solution = footprint, solution
    # What is on its way at the rates that were reached: faster tiers have less of it, and slower ones more.
    peak = known.correction_bytes + peak_bytes
    known.prediction.peak_bytes = max(peak, known.prediction.measured_peak_bytes or 0)
