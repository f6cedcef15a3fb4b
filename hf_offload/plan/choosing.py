"""Choosing where weights, gradients and optimizer state are, and what becomes of activations in the memory that is left.

A step in which all activations stay, whether they fit or not, bounds what each choice for weights and state can reach. In
this order, they are solved until none that is left can be faster.
"""

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Iterable

from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.problem import Problem, Solution, make_problem, smallest_budget
from hf_offload.plan.rules import WIDTHS
from hf_offload.plan.search import smallest, solve
from hf_offload.plan.state_placement import (
    IN_MEMORY,
    Allowed,
    StatePlacement,
    moved_bytes,
    snapshot_bytes,
    state_placements,
    tier_bytes,
)
from hf_offload.plan.state_transfers import place_state

_SOLVED = 4
"""Places of weights and state for which activations are placed, too: the fastest ones that anything fits into."""
_GAIN = 1.05
"""What is no faster than this is not worth another place of weights and state in a run."""
_LIKELY = 4
"""Ways of moving weights and state that are looked at for the one that needs the least memory."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Where weights, gradients and state are, and the plan for the activations with them."""

    state_placement: StatePlacement
    problem: Problem
    solution: Solution

    @property
    def step_s(self) -> float:
        """Of the predicted step."""
        return self.solution.timeline.step_s


def problem_of(
    footprint: Footprint, hardware: Hardware, budget_bytes: int, placement: StatePlacement, allowed: Allowed
) -> Problem:
    """What is left to be placed: activations, in the memory and the room that the rest leaves."""
    on_host = hardware.device == "cpu"
    found = place_state(footprint.plain, placement, budget_bytes, on_host, allowed.now or IN_MEMORY)
    if any(one.tier not in hardware.store_bytes_per_s for one in found.transfers):  # else with what is known of it
        transfers = tuple(one for one in found.transfers if one.tier in hardware.store_bytes_per_s)
        found = dataclasses.replace(found, transfers=transfers)
    problem = make_problem(found, hardware, budget_bytes, may_recompute=allowed.may_recompute)
    taken = tier_bytes(footprint, placement)
    snapshots = snapshot_bytes(
        footprint.plain, allowed.now or IN_MEMORY, allowed.snapshots, allowed.snapshots_of_trained
    )
    # Snapshots that find no room are refused by themselves.
    room = {
        tier: max(0, nbytes - (snapshots if tier == "ram" else 0)) - taken.get(tier, 0)
        for tier, nbytes in problem.room_bytes.items()
    }
    if allowed.written_bytes is not None and "ssd" in room:
        # What activations take of a drive in a step is written in it.
        room["ssd"] = min(room["ssd"], allowed.written_bytes - moved_bytes(found)[0].get("ssd", 0))
    return dataclasses.replace(problem, room_bytes=room)


def choose(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> Choice | None:
    """The fastest step within the budget that is found; None if nothing fits. In a run that fits, everything stays.

    Weights and state of a running training stay where they are unless that is a good deal slower. Where anything has to
    leave, all blocks recompute their elementwise operations on machines that do so sooner than bytes move, and on others
    where nothing fits otherwise. Windows of gradients and state are as wide as anything fits with: no simulation knows how
    much a drive's pace changes.
    """
    steps = _steps(footprint)
    if hardware.repeats_elementwise and not everything_stays(footprint, hardware, budget_bytes, allowed):
        steps.reverse()
    found = (_choose_with(width, step, hardware, budget_bytes, allowed) for step in steps for width in WIDTHS)
    best = next((one for one in found if one is not None), None)
    if best is None:
        least = least_memory(footprint, hardware, budget_bytes, allowed)
        best = least if least.problem.fits(least.solution) else None
    return best


def _steps(footprint: Footprint) -> list[Footprint]:
    """The step without recompute of elementwise operations, and the one with it."""
    return [footprint.plain] if footprint.reduced is None else [footprint.plain, footprint.reduced]


def everything_stays(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> bool:
    """Whether a step fits in which nothing is moved or recomputed."""
    placement = next((one for one in state_placements(footprint, hardware, allowed) if not one.moves), None)
    if placement is None:
        return False
    problem = problem_of(footprint, hardware, budget_bytes, placement, allowed)
    return problem.may_fit and problem.fits(problem.kept)


def _choose_with(
    width: int, footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed
) -> Choice | None:
    found: list[_Way] = []
    for placement in state_placements(footprint, hardware, allowed, width):
        way = _Way(placement, problem_of(footprint, hardware, budget_bytes, placement, allowed))
        if not way.problem.may_fit:
            continue
        if not placement.moves and way.problem.fits(way.problem.kept):
            return Choice(placement, way.problem, way.problem.kept)
        found.append(way)
    best = _fastest(found)
    if best is not None and allowed.now is not None and allowed.is_measured and best.state_placement != allowed.now:
        present = _fastest(way for way in found if way.state_placement == allowed.now)
        if present is not None and present.step_s <= _GAIN * best.step_s:
            return present
    return best


def _about(seconds: float) -> int:
    """The same for times that differ by less than 1 %, which no prediction tells apart, and more for longer ones."""
    return round(100 * math.log(max(seconds, 1e-6)))


@dataclasses.dataclass(frozen=True)
class _Way:
    """Somewhere weights and state may be, and what is left to be placed then."""

    state_placement: StatePlacement
    problem: Problem

    @functools.cached_property
    def order(self) -> tuple[int, int, int]:
        """The time of a step in which all activations stay; of ways that are about as fast, one that writes less to drives
        comes first, and one that leaves more memory.
        """
        footprint = self.problem.footprint
        return _about(self.problem.kept.timeline.step_s), moved_bytes(footprint)[0].get("ssd", 0), footprint.base_bytes


def _fastest(found: Iterable[_Way]) -> Choice | None:
    best: Choice | None = None
    left = _SOLVED
    for way in sorted(found, key=lambda one: one.order):
        problem = way.problem
        if not left or (best is not None and way.order[0] >= _about(best.step_s)):
            break
        if problem.fits(problem.kept):
            return Choice(way.state_placement, problem, problem.kept)
        solution = solve(problem) if best is None else solve(problem, best.step_s)
        left -= solution is not None
        if solution is not None and (best is None or _about(solution.timeline.step_s) < _about(best.step_s)):
            best = Choice(way.state_placement, problem, solution)
    return best


def least_memory(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> Choice:
    """What needs the least memory, however slow."""
    found: list[Choice] = []
    for step in _steps(footprint):
        each = [
            (placement, problem_of(step, hardware, budget_bytes, placement, allowed))
            for placement in state_placements(step, hardware, allowed)
        ]
        roomy = [one for one in each if min(one[1].room_bytes.values(), default=0) >= 0] or each
        likely = sorted(roomy, key=lambda one: one[1].least_bytes)
        moving = itertools.islice((one for one in likely if one[0].moves), _LIKELY)
        in_memory = (one for one in likely if not one[0].moves)
        found += (Choice(placement, problem, smallest(problem)) for placement, problem in (*moving, *in_memory))

    def size(one: Choice) -> tuple[bool, int]:
        return not one.problem.has_room(one.solution), one.solution.timeline.must_fit_bytes

    return min(found, key=size)


def can_hold(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> bool:
    """Whether anything fits."""
    least = least_memory(footprint, hardware, budget_bytes, allowed)
    return least.problem.fits(least.solution)


def frontier(footprint: Footprint, hardware: Hardware, allowed: Allowed, points: int) -> list[tuple[int, Choice]]:
    """Budgets from the smallest that does to the one that keeps everything in memory, and what is chosen for each."""
    everything = make_problem(footprint, hardware, sys.maxsize).kept.timeline.must_fit_bytes
    most = least = smallest_budget(everything)
    for _ in range(2):  # what is on its way takes a part of the budget
        least = smallest_budget(least_memory(footprint, hardware, least, allowed).solution.timeline.must_fit_bytes)
    least = min(least, most)
    found: list[tuple[int, Choice]] = []
    for index in range(points):
        budget = round(least * (most / least) ** (index / (points - 1)))
        choice = choose(footprint, hardware, budget, allowed)
        if found and (choice is None or found[-1][1].step_s < choice.step_s):
            choice = found[-1][1]  # what does with less does with more
        if choice is not None:
            found.append((budget, choice))
    return found
