"""From a footprint, a machine and a budget to a placement, and what it is compared with."""

import dataclasses
import sys
from collections.abc import Callable, Sequence

from hf_offload.errors import OffloadPlanError
from hf_offload.plan import rules
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.holding import GRADIENTS, STATE, WEIGHTS
from hf_offload.plan.plan import Keeping, Placement, Plan
from hf_offload.plan.problem import Problem, Solution, smallest_budget
from hf_offload.plan.search import smallest, solve, uniform
from hf_offload.plan.timeline import Windows
from hf_offload.settings.sizes import format_bytes

# Windows to try, widest first: records of average size that backward may have ahead, and that may be on their way out.
_WINDOWS: tuple[tuple[int, int | None], ...] = (
    (rules.WINDOW_RECORDS, None),
    (rules.WINDOW_RECORDS, 16),
    (3, 4),
    (1, 2),
    (1, 0),
)

# What a lower min_bytes would let leave memory is named from this share of the peak on.
_MUCH = 0.1

BASELINE = "baseline"
"""Name of the simple way that keeps everything: no offloading."""


@dataclasses.dataclass(frozen=True)
class Alternative:
    """What one simple way (``placement`` for all), or ``auto`` (None), is predicted to do; no solution where nothing fits."""

    name: str
    placement: Placement | None
    solution: Solution | None
    fits: bool


def windows_for(footprint: Footprint) -> tuple[Windows, ...]:
    """Windows to try, widest first."""
    saved_bytes, most = sum(one.nbytes for one in footprint.saved), rules.WRITE_BEHIND_BYTES

    def bytes_of(records: int | None) -> int:
        return most if records is None else rules.window_bytes(saved_bytes, len(footprint.saved), records)

    return tuple(dict.fromkeys(Windows(bytes_of(ahead), min(bytes_of(behind), most)) for ahead, behind in _WINDOWS))


def make_problem(footprint: Footprint, hardware: Hardware, budget_bytes: int, *, may_recompute: bool = True) -> Problem:
    """What :func:`~hf_offload.plan.search.solve` takes."""
    reduced = footprint.reduced
    return Problem(
        footprint=footprint.plain,
        channels=hardware.channels,
        room_bytes=hardware.room,
        budget_bytes=budget_bytes,
        windows=windows_for(footprint),
        may_recompute=may_recompute,
        reduced=None if reduced is None else make_problem(reduced, hardware, budget_bytes, may_recompute=may_recompute),
    )


def find_plan(problem: Problem) -> Solution:
    """The fastest placement within the budget.

    Raises :class:`~hf_offload.errors.OffloadPlanError` with the smallest budget that would do, and what would lower it.
    """
    solution = solve(problem)
    if solution is None:
        raise refusal(problem, smallest(problem))
    return solution


def refusal(
    problem: Problem,
    least: Solution,
    about_room: Sequence[str] | None = None,
    *,
    state_may_leave: bool = False,
    weights_may_leave: bool = False,
) -> OffloadPlanError:
    """What is to be said of a budget that ``least``, which needs the least, does not fit into. ``about_room``: which limits
    of tiers keep it from needing less; default: as far as activations are concerned. ``state_may_leave``,
    ``weights_may_leave``: whether settings let gradients and state, and weights, leave memory.
    """
    needed = smallest_budget(least.timeline.must_fit_bytes)
    limits = _about_room(problem, least) if about_room is None else about_room
    if needed <= problem.budget_bytes and limits:
        budget = format_bytes(problem.budget_bytes)
        text = (
            f"A memory budget of {budget} would do, but not within the limits of tiers: it takes {'; '.join(limits)}."
        )
        return OffloadPlanError(text, needed)
    return OffloadPlanError(too_small(problem, least, limits, state_may_leave, weights_may_leave), needed)


def plan_of(problem: Problem, solution: Solution, like: Plan, reason: str) -> Plan:
    """The engine's plan for a solution. What it does not set is as in ``like``, and so is the placement of units that saved
    nothing when the footprint was taken: a layer may be skipped in one step and run in the next.
    """
    saved = problem.footprint.saved_bytes
    return dataclasses.replace(
        like,
        placements={unit: one for unit, one in solution.placements.items() if saved[unit] or one.recomputes},
        elementwise=problem.footprint.usual is not None,
        read_ahead_bytes=solution.windows.read_ahead_bytes,
        write_behind_bytes=solution.windows.write_behind_bytes,
        keeping=_keeping(problem, solution),
        reason=reason,
    )


def _keeping(problem: Problem, solution: Solution) -> Keeping | None:
    footprint, timeline = problem.footprint, solution.timeline
    needed = timeline.must_fit_bytes if footprint.skipped_blocks else timeline.peak_bytes
    spare = max(0, problem.limit_bytes - needed)
    kept = {
        unit: 0 if one.recomputes else footprint.saved_bytes[unit]
        for unit, one in solution.placements.items()
        if one.tier is None
    }
    if spare > sum(footprint.saved_bytes.values()) and all(
        one is Placement.KEEP for one in solution.placements.values()
    ):
        return None  # a run that would fit with twice as much is left alone
    for span in footprint.blocks:
        if span.name in kept and solution.placements[span.name].recomputes:
            kept[span.name] += span.boundary_bytes
    return Keeping(kept, spare, timeline.resident_bytes + spare)


def too_small(
    problem: Problem, least: Solution, limits: Sequence[str], state_may_leave: bool, weights_may_leave: bool
) -> str:
    """Why no plan fits, and what to do: ``limits`` of tiers is a part of it. What settings do already is left out."""
    footprint, timeline = problem.footprint, least.timeline
    where = timeline.peak_unit
    short = smallest_budget(timeline.must_fit_bytes) - problem.budget_bytes
    more = f", {format_bytes(short)} more" if short > 0 else ""  # else a tier is too small
    advice = ["a smaller batch, with more gradient accumulation", "shorter sequences"]
    weights = footprint.base_bytes + footprint.gradient_bytes
    moved = {one.kind for one in footprint.transfers}
    vocabulary = " or a smaller vocabulary" if footprint.head else ""
    at_head = footprint.head and footprint.units.get(where) is None and where != "the optimizer"
    if STATE in moved and WEIGHTS not in moved and not weights_may_leave:
        what = "weights" if GRADIENTS in moved else "weights and gradients"
        advice.insert(
            0,
            f"{what}, which cannot leave memory here, take {format_bytes(weights)} of it: with several processes, a part of "
            "them in each (FSDP2 with its CPUOffloadPolicy, DeepSpeed's ZeRO-3); 16-bit weights, or training adapters only",
        )
    elif footprint.transfers and WEIGHTS not in moved:
        advice.insert(
            0,
            f"weights, and what is on its way to tiers, take {format_bytes(weights)} of it, and weights on a tier would need "
            f"no less: 16-bit weights, or a model with smaller blocks{vocabulary}",
        )
    elif footprint.transfers:
        stays = footprint.gradient_bytes and GRADIENTS not in moved
        what = "one block of weights, all gradients" if stays else "one block of weights"
        advice.insert(
            0,
            f"{what}, and what is on its way to tiers, take {format_bytes(weights)} of it, and all else of the model's state "
            f"has left memory: 16-bit weights, or a model with smaller blocks{vocabulary}",
        )
    elif weights > 0.5 * timeline.peak_bytes:
        on_tier = "" if state_may_leave else "state on a tier (optimizer='ssd' or 'ram', also with several processes), "
        advice.insert(
            0,
            f"weights, gradients and optimizer state take {format_bytes(weights)} of it: {on_tier}an optimizer with less "
            "state, 16-bit weights, or training adapters only (LoRA)",
        )
    if 2 * weights <= timeline.peak_bytes and at_head:
        tiled = "" if footprint.head in footprint.tiled else ", or tiled_loss='on'"
        advice.insert(0, f"the peak is in {where}, outside of the blocks: a smaller vocabulary{tiled}")
    advice += _about_small(footprint, timeline.must_fit_bytes, state_may_leave)
    if problem.may_recompute:
        advice += _about_blocks(footprint)
    advice += limits
    return (
        f"A memory budget of {format_bytes(problem.budget_bytes)} is too small: the least this run can do with is "
        f"{smallest_budget(timeline.must_fit_bytes) >> 20} MiB{more} (the peak is in {where}). What would lower it: "
        f"{'; '.join(advice)}."
    )


def _about_room(problem: Problem, least: Solution) -> list[str]:
    """Tiers in which more room would do."""
    unlimited = dataclasses.replace(problem, room_bytes=dict.fromkeys(problem.channels, sys.maxsize))
    roomy = smallest(unlimited).timeline
    if roomy.must_fit_bytes >= least.timeline.must_fit_bytes:
        return []
    drive = "" if "ssd" in problem.channels else ", or a directory on a drive"
    room = {tier: max(0, nbytes) for tier, nbytes in problem.room_bytes.items()}
    return [
        f"more room in the {tier} tier, {format_bytes(nbytes)} instead of {format_bytes(room.get(tier, 0))}"
        f"{drive}, with which {smallest_budget(roomy.must_fit_bytes) >> 20} MiB would do"
        for tier, nbytes in roomy.tier_bytes.items()
        if nbytes > room.get(tier, 0)
    ]


def _about_small(footprint: Footprint, peak_bytes: int, state_may_leave: bool) -> list[str]:
    """What ``min_bytes`` keeps in memory, where that is much of the peak."""
    leaving = footprint.weights.values()
    state = footprint.base_bytes + footprint.gradient_bytes
    state -= sum(one.weight_bytes + one.trained_bytes + one.state_bytes for one in leaving)
    if not state_may_leave or footprint.transfers or state <= _MUCH * peak_bytes:
        state = 0
    saved = footprint.small_bytes
    if not footprint.min_bytes or state + saved <= _MUCH * peak_bytes:
        return []
    parts = [(saved, "saved tensors"), (state, "weights with their gradients and state")]
    kept = " and ".join(f"{format_bytes(nbytes)} of {what}" for nbytes, what in parts if nbytes)
    return [f"a lower min_bytes: {kept} stay in memory, being smaller than {format_bytes(footprint.min_bytes)}"]


def _about_blocks(footprint: Footprint) -> list[str]:
    """What keeps blocks from being recomputed."""
    if not any(footprint.units.values()):
        return [
            "recomputing blocks in backward, which is done for classes that derive from "
            "transformers.modeling_layers.GradientCheckpointingLayer, or are named in recompute_blocks"
        ]
    reasons: dict[str, list[str]] = {}
    for span in footprint.blocks:
        if span.not_twice:
            reasons.setdefault(span.not_twice, []).append(span.name)
    return [
        f"recomputing {names[0]}{f' and {len(names) - 1} other blocks' if len(names) > 1 else ''}, which cannot be done "
        f"because {reason}"
        for reason, names in reasons.items()
    ]


def simple_ways(problem: Problem) -> list[Alternative]:
    """Every simple way, whether it fits or not."""
    found = []
    for placement in Placement:
        solution = uniform(problem, placement)
        if solution is not None:
            name = BASELINE if placement is Placement.KEEP else placement.value
            found.append(Alternative(name, placement, solution, problem.fits(solution)))
    return found


def largest(fits: Callable[[int], bool], start: int, limit: int) -> int:
    """The largest number up to ``limit`` for which ``fits`` holds, by doubling and bisection; 0 if not even 1."""
    good = 0
    bad = max(1, start)
    while bad <= limit and fits(bad):
        good, bad = bad, bad * 2
    bad = min(bad, limit + 1)
    while bad - good > max(1, good // 200):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def frontier(problem: Problem, points: int) -> list[tuple[int, Solution]]:
    """Budgets from the smallest that does to the one that keeps everything, and the plan for each."""
    least = smallest_budget(smallest(problem).timeline.must_fit_bytes)
    simple = [uniform(problem, placement) for placement in Placement]
    peaks = {smallest_budget(one.timeline.must_fit_bytes) for one in simple if one is not None}
    most = max(*peaks, least)
    evenly = {least + (most - least) * index // max(1, points - 1) for index in range(points)}
    found = []
    # Where one of the simple ways begins to fit, there is a step.
    for budget in sorted(evenly | peaks):
        solution = solve(dataclasses.replace(problem, budget_bytes=budget))
        if solution is not None:
            found.append((budget, solution))
    return found
