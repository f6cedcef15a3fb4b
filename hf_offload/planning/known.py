"""The plan for a situation, and what it was predicted to do: from a measured micro-batch, a machine and a budget."""

import dataclasses
from collections.abc import Mapping

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.choosing import least_memory
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.holding import IN_MEMORY, Held, moved_bytes
from hf_offload.plan.places import Allowed
from hf_offload.plan.plan import Placement, Plan
from hf_offload.plan.problem import Problem, Solution, make_problem, plan_of, smallest_budget
from hf_offload.plan.refusal import find_choice
from hf_offload.plan.simulate import likely_peak
from hf_offload.planning.situation import Situation
from hf_offload.ranks import Ranks
from hf_offload.settings.sizes import format_bytes

# Of what a measured step would take with everything kept: what is named as enough for it.
_NAMED = 1.02


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the plans of a run are made for.

    Attributes:
        ranks: The processes that follow one plan.
    """

    budget_bytes: int
    hardware: Hardware
    allowed: Allowed
    ranks: Ranks

    def problem(self, footprint: Footprint) -> Problem:
        """What is to be placed where everything but activations stays as it was measured."""
        return make_problem(footprint, self.hardware, self.budget_bytes)


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
class Known:
    """The plan for one situation.

    Attributes:
        plan: The plan that keeps everything of a step that cannot be simulated; None where it was found by simulating.
        correction_bytes: How much less than the budget it was made for.
        steps: How many ran under it.
        pace: Time of compute as a ratio to what was measured at first.
        followed: Predicted time as a ratio to what it was when another plan was looked for last.
        held: Where weights, gradients and state are to be.
        exceeds: Whether it does not fit the budget, which no plan does.
    """

    situation: Situation
    footprint: Footprint
    problem: Problem
    solution: Solution
    prediction: Prediction
    correction_bytes: int = 0
    corrections: int = 0
    steps: int = 0
    pace: float = 1.0
    followed: float = 1.0
    plan: Plan | None = None
    held: Held = IN_MEMORY
    exceeds: bool = False

    def is_for(self, situation: Situation) -> bool:
        """Whether it was made for ``situation``, and not for a larger one."""
        return situation.begins(self.situation)

    @property
    def step(self) -> Footprint:
        """The step with everything in memory, with recompute of elementwise operations if the plan has that."""
        reduced = self.footprint.reduced if self.problem.footprint.usual is not None else None
        return reduced or self.footprint.plain

    @property
    def compute_s(self) -> float:
        """Predicted time of a micro-batch without the optimizer's, and without waiting."""
        return self.step.step_s - self.step.optimizer_step_s + self.solution.timeline.recompute_s

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
        prediction = self.prediction
        return f"{placed}; predicted {format_bytes(prediction.peak_bytes)} and {prediction.step_s:.2f} s a step"

    def plan_like(self, safest: Plan) -> Plan:
        """The engine's plan; what this does not say is as in ``safest``."""
        if self.plan is not None:
            return dataclasses.replace(self.plan, reason=self.reason)
        return plan_of(self.problem, self.solution, safest, self.reason)


def known_by_simulating(
    situation: Situation, footprint: Footprint, terms: Terms, *, less: int = 0, corrections: int = 0
) -> Known:
    """The plan for a footprint, with ``less`` bytes less than the budget, over all that is allowed.

    Raises :class:`~hf_offload.errors.OffloadPlanError` if the budget is too small.
    """
    choice = terms.ranks.first(
        lambda: find_choice(footprint, terms.hardware, terms.budget_bytes, terms.allowed, less)
    )
    problem, solution = choice.problem, choice.solution
    known = _known(situation, footprint, problem, solution, peak_of(problem, solution) + less, less, corrections)
    known.held = choice.held
    return known


def known_exceeding(situation: Situation, footprint: Footprint, terms: Terms) -> Known:
    """The plan that needs the least memory, for a budget that none fits into. Weights and state stay where they are."""
    allowed = dataclasses.replace(terms.allowed, must_stay=True)
    choice = terms.ranks.first(lambda: least_memory(footprint, terms.hardware, terms.budget_bytes, allowed))
    problem, solution = choice.problem, choice.solution
    known = _known(situation, footprint, problem, solution, peak_of(problem, solution), 0, 0)
    known.held, known.exceeds = choice.held, True
    return known


def peak_of(problem: Problem, solution: Solution) -> int:
    """What a step is predicted to need; what has to be there for it may be more."""
    return likely_peak(problem.footprint, solution.placements, problem.channels, solution.windows)


def known_if_kept(situation: Situation, footprint: Footprint, terms: Terms, plan: Plan) -> Known | None:
    """The plan that keeps everything of a micro-batch whose graph backward walks more than once; None if that may not fit.

    How long a tensor is needed then is not known. Everything that is saved fits next to all else, which is enough.
    """
    problem, kept = terms.problem(footprint), most_if_kept(footprint)
    if kept > problem.limit_bytes:
        return None
    placements = dict.fromkeys(footprint.units, Placement.KEEP)
    solution = problem.play(placements, problem.windows[0])
    timeline = dataclasses.replace(solution.timeline, peak_bytes=kept, must_fit_bytes=kept)
    known = _known(situation, footprint, problem, dataclasses.replace(solution, timeline=timeline), kept, 0, 0)
    known.plan = dataclasses.replace(plan, default=Placement.KEEP, placements={})
    return known


def most_if_kept(footprint: Footprint) -> int:
    """A step takes no more, however often backward walks its graph: whatever the windows were that it was measured with."""
    alive = max(one.live_bytes + one.measured_bytes for one in footprint.segments)
    return max(footprint.base_bytes + alive + sum(footprint.saved_bytes.values()), footprint.optimizer_peak_bytes)


def check_writes(footprint: Footprint, terms: Terms, plan: Plan) -> None:
    """Raise :class:`~hf_offload.errors.OffloadPlanError` if a micro-batch of which ``plan`` moves everything writes more to
    drives than a step may.
    """
    limit = terms.allowed.written_bytes
    activations = sum(footprint.saved_bytes.values()) if plan.default.tier == "ssd" else 0
    written = activations + moved_bytes(footprint)[0].get("ssd", 0)
    if limit is None or written <= limit:
        return
    # What is on its way when most is alive differs from step to step.
    needed = smallest_budget(int(_NAMED * most_if_kept(footprint)))
    raise OffloadPlanError(
        f"max_step_write_bytes of {format_bytes(limit)} is too small: steps like this one are not planned, and everything "
        f"moves, {format_bytes(written)} for each micro-batch. Set max_step_write_bytes to no less, or memory_budget to "
        f"{needed >> 20} MiB, with which nothing moves where one thread trains; or have one backward for all losses of a "
        "graph.",
        needed,
    )


def known_with_more_state(known: Known, nbytes: int, terms: Terms) -> Known:
    """The plan for the same micro-batch, with ``nbytes`` more of optimizer state.

    Raises :class:`~hf_offload.errors.OffloadPlanError` if the budget is too small.
    """
    before = known.footprint
    footprint = dataclasses.replace(
        before, base_bytes=before.base_bytes + nbytes, state_bytes=before.state_bytes + nbytes
    )
    return known_by_simulating(
        known.situation, footprint, terms, less=known.correction_bytes, corrections=known.corrections
    )


def _known(
    situation: Situation,
    footprint: Footprint,
    problem: Problem,
    solution: Solution,
    peak: int,
    less: int,
    corrections: int,
) -> Known:
    known = Known(
        situation, footprint, problem, solution, Prediction(peak, 0.0, footprint.base_bytes), less, corrections
    )
    known.prediction.step_s = known.micro_batch_s + footprint.optimizer_step_s
    return known


def find_known(plans: Mapping[Situation, Known], situation: Situation) -> Known | None:
    """A plan that ``situation`` can run under: that of the same micro-batch, or of a larger one."""
    larger = [other for other in plans if situation.fits_into(other)]
    if not larger:
        return None
    same = [other for other in larger if situation.begins(other)]
    # How many forwards follow is not known: the plan for most of them suits fewer.
    if same:
        return plans[max(same, key=lambda one: (len(one.forwards), one.gradient_bytes))]
    return plans[min(larger, key=lambda other: other.elements)]
