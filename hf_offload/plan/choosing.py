"""Choosing where weights, gradients and optimizer state are, and what becomes of activations in the memory that is left.

A step in which all activations stay, whether they fit or not, bounds what each choice for weights and state can reach; in
this order, those that fit are planned until none that is left can be faster.
"""

import dataclasses
import functools
import heapq
import sys
from collections.abc import Iterator, Sequence

from hf_offload.plan.fitting import least_memory, may_fit, narrowest, refuse, smallest_of
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.holding import Held, moved_bytes
from hf_offload.plan.places import Allowed, Choice, problem_of, ways
from hf_offload.plan.plan import Placement
from hf_offload.plan.planner import make_problem
from hf_offload.plan.problem import Choices, Problem, Solution, smallest_budget
from hf_offload.plan.search import find_greedy, find_prefixes, find_uniform, local_search
from hf_offload.plan.windows import WIDTHS

_SOLVED = 4
_SOLVED_PARTLY = 3
"""The same of places where a part of the state stays."""
_SEARCHED = 3
"""Of all of those, so many are searched in full: where they are about as fast as the fastest of them."""
_GAIN = 1.05
"""What is no faster than this is not worth another place of weights and state in a run."""


def choose(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> Choice | None:
    """The fastest step within the budget that is found; None if nothing fits. In a run that fits, everything stays.

    Weights and state of a running training stay where they are unless that is a good deal slower. Where anything has to
    leave, all blocks recompute their elementwise operations on machines that do so sooner than bytes move, and on others
    where nothing fits otherwise. Windows of gradients and state are as wide as anything fits with: no simulation knows how
    much a drive's pace changes.
    """
    steps = [footprint.plain] if footprint.reduced is None else [footprint.plain, footprint.reduced]
    if hardware.repeats_elementwise and not everything_stays(footprint, hardware, budget_bytes, allowed):
        steps.reverse()
    found = (_choose_with(width, step, hardware, budget_bytes, allowed) for step in steps for width in WIDTHS)
    return next((one.named for one in found if one is not None), None)


def everything_stays(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> bool:
    """Whether a step fits in which nothing is moved or recomputed."""
    held = next((one for one in ways(footprint, hardware, allowed) if not one.moves), None)
    if held is None:
        return False
    way = _Way(held, problem_of(footprint, hardware, budget_bytes, held, allowed))
    return may_fit(way.problem) and way.problem.fits(way.kept)


def _choose_with(
    width: int, footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed
) -> Choice | None:
    found: list[_Way] = []
    for held in ways(footprint, hardware, allowed, width):
        way = _Way(held, problem_of(footprint, hardware, budget_bytes, held, allowed))
        if not may_fit(way.problem):
            continue
        if not held.moves and way.problem.fits(way.kept):
            return Choice(held, way.problem, way.kept)
        found.append(way)
    best, solutions = _fastest(found)
    if best is None:
        return _smallest(found)
    if allowed.now is not None and allowed.is_measured and best.held != allowed.now:
        present, others = _fastest([way for way in found if way.held == allowed.now])
        if present is not None and present.step_s <= _GAIN * best.step_s:
            best, solutions = present, others
    if not solutions:
        return best
    improved = local_search(best.problem, solutions, find_uniform(best.problem, best.step_s))
    return best if improved is None else dataclasses.replace(best, solution=improved)


def find_choice(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed, less: int = 0) -> Choice:
    """As :func:`choose`, with ``less`` bytes less than the budget.

    Raises :class:`~hf_offload.errors.OffloadPlanError` with the smallest budget that would do, and what would lower it.
    """
    choice = choose(footprint, hardware, budget_bytes - less, allowed)
    if choice is None:
        raise refuse(footprint, hardware, budget_bytes, allowed, less)[1]
    return choice


class _Way:
    """Somewhere weights and state may be, and what is left to be placed then."""

    def __init__(self, held: Held, problem: Problem):
        self.held = held
        self.problem = problem

    @functools.cached_property
    def kept(self) -> Solution:
        """All activations stay, whether they fit or not: no step of this way is faster."""
        return self.problem.play(Choices(self.problem).uniform(Placement.KEEP), self.problem.windows[0], "keep")

    @functools.cached_property
    def written_bytes(self) -> int:
        """To drives: of ways that are as fast, they wear the least."""
        return moved_bytes(self.problem.footprint)[0].get("ssd", 0)

    @functools.cached_property
    def least_s(self) -> float:
        """What that step takes at least, without playing it: all compute, and all loads."""
        footprint, channels = self.problem.footprint, self.problem.channels
        loads = (nbytes / channels[tier].load_bytes_per_s for tier, nbytes in moved_bytes(footprint)[1].items())
        return max([footprint.step_s, *loads])


def _fastest(found: Sequence[_Way]) -> tuple[Choice | None, Sequence[Solution]]:
    """The fastest, and what the search for it began with: nothing where no search can find a faster one."""
    best: Choice | None = None
    tried: list[Choice] = []  # at a first look
    left = {False: _SOLVED, True: _SOLVED_PARTLY}
    for way in _by_time(found):
        kept_s = way.kept.timeline.step_s
        if best is not None and (not any(left.values()) or kept_s >= best.step_s):
            break
        part_stays = bool(way.held.staying)
        if best is not None and not left[part_stays]:
            continue
        if way.problem.fits(way.kept):
            if best is None or way.kept.timeline.step_s < best.step_s:
                best = Choice(way.held, way.problem, way.kept)
            continue
        if not any(True for _ in narrowest(way.problem)):
            continue
        prefixes = find_prefixes(way.problem)
        if prefixes:
            left[part_stays] -= 1
            tried.append(Choice(way.held, way.problem, prefixes[0].solution))
            best = tried[-1] if best is None or tried[-1].step_s < best.step_s else best
    if best is not None and all(best is not one for one in tried):
        return _sparing(found, best), ()
    solutions: Sequence[Solution] = ()
    for one in sorted(tried, key=lambda one: one.step_s)[:_SEARCHED]:
        assert best is not None
        if one.step_s > _GAIN * best.step_s:
            break
        some = find_greedy(one.problem)
        fastest = min(some, key=lambda each: each.objective, default=one.solution)
        if not solutions or fastest.timeline.step_s < best.step_s:
            best, solutions = dataclasses.replace(one, solution=fastest), some
    return best, solutions


def _by_time(found: Sequence[_Way]) -> Iterator[_Way]:
    """From the fastest step in which all activations stay to the slowest; of equals, first what leaves most memory."""
    # Played are those alone whose turn it is.
    coming = [(way.least_s, way.problem.footprint.base_bytes, number, False) for number, way in enumerate(found)]
    heapq.heapify(coming)
    while coming:
        least_s, base_bytes, number, is_played = heapq.heappop(coming)
        way = found[number]
        if is_played:
            yield way
        else:
            kept_s = max(least_s, round(way.kept.timeline.step_s, 4))
            heapq.heappush(coming, (kept_s, base_bytes, number, True))


def _sparing(found: Sequence[_Way], fastest: Choice) -> Choice:
    """Of all ways in which activations stay, and which are as fast, the one that wears the drive the least."""
    written_bytes = moved_bytes(fastest.problem.footprint)[0].get("ssd", 0)
    for way in sorted(found, key=lambda one: one.written_bytes):
        if way.written_bytes >= written_bytes:
            break
        may_be = way.least_s <= fastest.step_s
        if may_be and way.kept.timeline.step_s <= fastest.step_s and way.problem.fits(way.kept):
            return Choice(way.held, way.problem, way.kept)
    return fastest


def _smallest(found: Sequence[_Way]) -> Choice | None:
    if not found:
        return None
    fitting = (one for one in smallest_of([(way.held, way.problem) for way in found]) if one.problem.fits(one.solution))
    return next(fitting, None)


def frontier(footprint: Footprint, hardware: Hardware, allowed: Allowed, points: int) -> list[tuple[int, Choice]]:
    """Budgets from the smallest that does to the one that keeps everything in memory, and what is chosen for each."""
    kept = make_problem(footprint, hardware, sys.maxsize)
    everything = kept.play(Choices(kept).uniform(Placement.KEEP), kept.windows[0], "keep").timeline.must_fit_bytes
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
