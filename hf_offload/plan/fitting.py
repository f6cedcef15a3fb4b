"""What fits into a budget, however slow, and what is said of a budget that nothing fits into."""

import collections
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.holding import IN_MEMORY, Held, moved_bytes, tier_bytes
from hf_offload.plan.places import Allowed, Choice, problem_of, ways
from hf_offload.plan.planner import refusal
from hf_offload.plan.problem import Choices, Problem, Solution, smallest_budget
from hf_offload.plan.search import can_fit, smallest
from hf_offload.settings.sizes import format_bytes

_LIKELY = 4
"""Ways of moving weights and state that are looked at for the one that needs the least memory."""
_ROUNDS = 4


def least_memory(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> Choice:
    """What needs the least memory, however slow."""
    found = [
        [(held, problem_of(step, hardware, budget_bytes, held, allowed)) for held in ways(footprint, hardware, allowed)]
        for step in _steps(footprint)
    ]
    roomy = [[one for one in each if min(one[1].room_bytes.values(), default=0) >= 0] or each for each in found]
    smallest_ones = itertools.chain.from_iterable(map(smallest_of, roomy))
    return min(smallest_ones, key=lambda one: _size(one.problem, one.solution)).named


def _steps(footprint: Footprint) -> list[Footprint]:
    """The step without recompute of elementwise operations, and the one with it."""
    return [footprint.plain] if footprint.reduced is None else [footprint.plain, footprint.reduced]


def smallest_of(found: Sequence[tuple[Held, Problem]]) -> Iterator[Choice]:
    """What needs the least memory in each way that may be the one with the least of all: a few, and the one in which nothing
    leaves memory.
    """
    likely = sorted(found, key=lambda one: _least_bytes(one[1]))
    moving = [one for one in likely if one[0].moves][:_LIKELY]
    best: int | None = None
    for held, problem in [one for one in likely if not one[0].moves or one in moving]:
        if best is None or _least_bytes(problem) < best:
            solution = smallest(problem)
            if problem.has_room(solution):
                best = min(solution.timeline.must_fit_bytes, best or sys.maxsize)
            yield Choice(held, problem, solution)


def _size(problem: Problem, solution: Solution) -> tuple[bool, int]:
    return not problem.has_room(solution), solution.timeline.must_fit_bytes


def can_hold(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> bool:
    """Whether anything fits."""
    return any(_can_hold(step, hardware, budget_bytes, allowed) for step in _steps(footprint))


def _can_hold(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> bool:
    problems = (
        problem_of(footprint, hardware, budget_bytes, held, allowed) for held in ways(footprint, hardware, allowed)
    )
    possible = (problem for problem in problems if may_fit(problem))
    first = next(possible, None)
    if first is None:
        return False
    if any(True for _ in narrowest(first)):  # mostly so, and no other place has to be looked at
        return True
    return can_fit(min((first, *possible), key=_least_bytes))


def may_hold(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> bool:
    """Whether anything could fit if less were saved."""
    held = ways(footprint, hardware, allowed)
    return any(may_fit(problem_of(footprint, hardware, budget_bytes, one, allowed)) for one in held)


def may_fit(problem: Problem) -> bool:
    """Whether it could if no activations were in memory."""
    if any(nbytes < 0 for nbytes in problem.room_bytes.values()):
        return False
    return _least_bytes(problem) <= problem.limit_bytes


def _least_bytes(problem: Problem) -> int:
    """What a step needs wherever its activations are."""
    footprint = problem.footprint
    alive = int(footprint.least_live_bytes.max())
    return footprint.base_bytes + max(alive, footprint.gradient_bytes + footprint.optimizer_step_bytes)


def narrowest(problem: Problem) -> Iterator[Solution]:
    """All units placed alike, with the narrowest windows, where that fits."""
    choices = Choices(problem)
    for placement in sorted(choices.options, key=lambda one: not one.recomputes):  # what moves little is played soonest
        solution = problem.play(choices.uniform(placement), problem.windows[-1], placement.value)
        if problem.fits(solution):
            yield solution


def refuse(
    footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed, less: int = 0
) -> tuple[Choice, OffloadPlanError]:
    """What needs the least memory, and what is to be said of a budget that it does not fit into, with ``less`` bytes less."""
    least, needed = least_memory(footprint, hardware, budget_bytes, allowed), budget_bytes
    for _ in range(_ROUNDS):  # what is on its way takes a part of the budget, so that more of it needs more
        before, needed = needed, smallest_budget(least.solution.timeline.must_fit_bytes)
        if needed == before:
            break
        least = least_memory(footprint, hardware, needed, allowed)
    timeline = least.solution.timeline
    timeline = dataclasses.replace(
        timeline, peak_bytes=timeline.peak_bytes + less, must_fit_bytes=timeline.must_fit_bytes + less
    )
    problem = dataclasses.replace(least.problem, budget_bytes=budget_bytes)
    solution = dataclasses.replace(least.solution, timeline=timeline)
    found = dataclasses.replace(least, problem=problem, solution=solution)
    now = allowed.now or IN_MEMORY
    tried = allowed.state != "none" or now.state is not None
    limits = _about_room(footprint, hardware, allowed, least, needed)
    may_leave = allowed.weights != "none" or now.weights is not None
    return found, refusal(problem, solution, limits, state_may_leave=tried, weights_may_leave=may_leave)


def _about_room(
    footprint: Footprint, hardware: Hardware, allowed: Allowed, least: Choice, budget_bytes: int
) -> list[str]:
    """Limits of tiers with which less memory would do than ``least`` needs, if it keeps to them."""
    keeps_to_them = least.problem.has_room(least.solution) and min(least.problem.room_bytes.values(), default=0) >= 0
    most = smallest_budget(least.solution.timeline.must_fit_bytes) if keeps_to_them else sys.maxsize
    writing = dataclasses.replace(allowed, written_bytes=None)
    room = {tier: dataclasses.replace(figure, value=sys.maxsize) for tier, figure in hardware.room_bytes.items()}
    drive = "" if "ssd" in hardware.room else ", or a directory on a drive"
    advice = []
    roomy = least_memory(footprint, dataclasses.replace(hardware, room_bytes=room), budget_bytes, writing)
    if (needed := smallest_budget(roomy.solution.timeline.must_fit_bytes)) < most:
        lying = collections.Counter(tier_bytes(footprint, roomy.held))
        lying.update(roomy.solution.timeline.tier_bytes)
        advice += [
            f"more room in the {tier} tier, {format_bytes(nbytes)} instead of {format_bytes(hardware.room.get(tier, 0))}"
            f"{drive}, with which {needed >> 20} MiB would do"
            for tier, nbytes in lying.items()
            if nbytes > hardware.room.get(tier, 0)
        ]
    if allowed.written_bytes is None:
        return advice
    free = least_memory(footprint, hardware, budget_bytes, writing)
    written = moved_bytes(free.problem.footprint)[0].get("ssd", 0) + free.solution.timeline.tier_bytes.get("ssd", 0)
    needed = smallest_budget(free.solution.timeline.must_fit_bytes)
    if needed < most and written > allowed.written_bytes:
        advice.append(
            f"max_step_write_bytes of {format_bytes(written)} instead of {format_bytes(allowed.written_bytes)}, with which "
            f"{needed >> 20} MiB would do"
        )
    return advice
