"""Choosing a placement for every unit: the fastest step whose memory stays within the budget.

The search is greedy. Of each placement, as few units as the budget allows: the first ones of the model, whose bytes backward
needs last, and which have the most time to go and come back (SSDTrain's prefix rule), or for recompute the blocks that free
the most bytes for each second. All others are kept. What a tier has no room for goes to another. The simulation judges them.
What more searching is worth: docs/measured_plans.md.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import Choices, Problem, Solution
from hf_offload.plan.timeline import Windows

# The first units of a model are counted in 32nds of it.
_PARTS = 32


def solve(problem: Problem, below_s: float = math.inf) -> Solution | None:
    """The fastest solution within the budget, None if none is found, or none that is faster than ``below_s``."""
    if problem.fits(problem.kept):
        return problem.kept
    choices, best = Choices(problem), None
    for placement in choices.options[1:]:
        for found in _fewest(problem, choices, placement, below_s):
            if found.timeline.step_s <= below_s and (best is None or found.objective < best.objective):
                best, below_s = found, found.timeline.step_s
    return best


def _fewest(problem: Problem, choices: Choices, placement: Placement, below_s: float) -> Iterator[Solution]:
    """As few units placed so as the budget allows, in the widest windows in which that fits: wider ones wait less. Where the
    tier has no room for them in any, those that it has room for, and the others placed otherwise. What cannot be faster than
    ``below_s`` is left out.
    """
    found: list[tuple[int, Solution]] = []
    usable = _windows_for(problem, placement)
    if not problem.is_within_memory(problem.play(choices.uniform(placement), usable[-1])):
        return
    for windows in usable:
        first = _first_enough(problem, choices, placement, windows, below_s)
        if first is not None and problem.has_room(first[1]):
            yield first[1]
            return
        found += [] if first is None else [first]
    if found and not placement.recomputes:
        yield from _spilled(problem, choices, placement, *found[0])


def _first_enough(
    problem: Problem, choices: Choices, placement: Placement, windows: Windows, below_s: float
) -> tuple[int, Solution] | None:
    """The fewest of the first units with which a step is within memory if they are placed so, and that step; None if not even
    all of them are enough, or if it is slower than ``below_s``.
    """
    best = problem.play(choices.uniform(placement), windows)
    if not problem.is_within_memory(best):
        return None
    grain = max(1, len(choices.units) // _PARTS)
    low, high = 0, -(-len(choices.units) // grain)
    while high - low > 1:
        middle = (low + high) // 2
        tried = problem.play(choices.first(middle * grain, placement), windows)
        if problem.is_within_memory(tried):
            high, best = middle, tried
        elif tried.timeline.step_s > below_s:
            return None  # more of them take longer
        else:
            low = middle
    return min(high * grain, len(choices.units)), best


def _spilled(
    problem: Problem, choices: Choices, placement: Placement, count: int, like: Solution
) -> Iterator[Solution]:
    """The first ``count`` units, of which the last ones are placed so, as many as the tier has room for, and those before,
    which have the most time, in each of the other ways.
    """
    units, room = choices.units[:count], problem.room_bytes.get(placement.tier or "", 0)
    ends = itertools.accumulate(problem.footprint.saved_bytes[unit] for unit in reversed(units))
    others = count - sum(1 for _ in itertools.takewhile(lambda nbytes: nbytes <= room, ends))
    for other in choices.options[1:]:
        if other.tier != placement.tier:
            placements = dict(choices.first(others, other))
            placements |= {unit: placement for unit in units[others:] if not placements[unit].recomputes}
            solution = problem.play(placements, like.windows)
            if problem.fits(solution):
                yield solution


def smallest(problem: Problem) -> Solution:
    """What needs the least memory, however slow: one of the simple ways. No tier is filled beyond its room: what does not fit
    into it is kept, from the end of the model on.
    """
    return min(_within_room(problem), key=lambda one: (*_size(problem, one), one.timeline.step_s))


def _size(problem: Problem, solution: Solution) -> tuple[bool, int]:
    return not problem.has_room(solution), solution.timeline.must_fit_bytes


def _within_room(problem: Problem) -> Iterator[Solution]:
    """Every unit placed alike, or as many of the first ones as the tier has room for, in each way and with all windows."""
    choices = Choices(problem)
    for placement in choices.options:
        for windows in reversed(_windows_for(problem, placement)):
            every = problem.play(choices.uniform(placement), windows)
            yield every if problem.has_room(every) else _as_many_as_fit(problem, choices, placement, windows)


def _as_many_as_fit(problem: Problem, choices: Choices, placement: Placement, windows: Windows) -> Solution:
    most = problem.play(choices.first(0, placement), windows)
    low, high = 0, len(choices.units)
    while high - low > 1:
        middle = (low + high) // 2
        tried = problem.play(choices.first(middle, placement), windows)
        if problem.has_room(tried):
            low, most = middle, tried
        else:
            high = middle
    return most


def _windows_for(problem: Problem, placement: Placement) -> Sequence[Windows]:
    # What moves nothing has no windows.
    return problem.windows if placement.tier is not None else problem.windows[:1]


def uniform(problem: Problem, placement: Placement) -> Solution | None:
    """Every unit placed alike, with the widest windows; None if the problem does not allow that placement."""
    choices = Choices(problem)
    if placement not in choices.options:
        return None
    return problem.play(choices.uniform(placement), problem.windows[0])


@dataclasses.dataclass(frozen=True)
class Alternative:
    """What one simple way (``placement`` for all), or ``auto`` (None), is predicted to do; no solution where nothing fits."""

    name: str
    placement: Placement | None
    solution: Solution | None
    fits: bool


def simple_ways(problem: Problem) -> list[Alternative]:
    """Every simple way, whether it fits or not; where all blocks recompute their elementwise operations, those in which no
    block is recomputed as a whole.
    """
    found = []
    for placement in Placement:
        solution = uniform(problem, placement)
        if solution is None or (problem.footprint.is_reduced and placement.recomputes):
            continue
        name = "baseline" if placement is Placement.KEEP else placement.value
        if problem.footprint.is_reduced:
            name = "elementwise" if placement is Placement.KEEP else f"elementwise+{placement.value}"
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
