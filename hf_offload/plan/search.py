"""Choosing a placement for every unit: the fastest step whose memory stays within the budget.

Candidates are all units placed alike, and as few units as the budget allows: from the first on, the largest or the smallest.
The simulation judges them, and a local search improves the best. The work is counted, not timed: the same plan on every
machine. What each is worth: docs/measured_plans.md.
"""

import bisect
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

from hf_offload.plan.bounds import Bounds
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import Choices, Placements, Problem, Solution
from hf_offload.plan.timeline import Windows

# Moments and saved tensors that the local search may play through: some tenths of a second.
_SEARCH_WORK = 90_000
_PER_TRANSFER = 2  # each is looked at when it begins and when it is due
# Copies of good solutions in which up to so many placements are drawn at random before they are improved again.
_PERTURBATIONS = 200
_PERTURBED = 6
# A first part of the model is found to a 32nd of it, and the best so many of them are combined with others.
_PREFIX_PARTS = 32
_PAIRED = 2
# Where all units placed alike need so much of the limit, whatever room tiers have, no part of them and no mixture fits.
_FAR = 1.05
# So many placements are looked at where several problems are compared.
_LIKELY = 3
# What is slower than the best by this is not improved further, where all units are placed alike.
_NEAR = 1.03


def solve(problem: Problem) -> Solution | None:
    """The fastest solution within the budget, or None if there is none. Ties go to what moves fewer bytes."""
    keep = problem.play(Choices(problem).uniform(Placement.KEEP), problem.windows[0], "keep")
    if problem.fits(keep):
        return keep
    found = local_search(problem, find_greedy(problem), find_uniform(problem))
    if found is None:
        found = smallest(problem)
    return found if problem.fits(found) else None


def local_search(problem: Problem, *families: Sequence[Solution]) -> Solution | None:
    """The best that is found by changing solutions that fit, beginning with the best of every family; None without any."""
    return _LocalSearch(problem).improve(*families) if any(families) else None


def smallest(problem: Problem) -> Solution:
    """What needs the least memory, however slow: the best of the simple ways, with single units placed otherwise.

    No tier is filled beyond its room: what does not fit into it is kept, from the end of the model on.
    """
    return min(_ever_smaller(problem), key=_size_in(problem))


def can_fit(problem: Problem) -> bool:
    """``problem.fits(smallest(problem))``, but without looking further once something fits."""
    footprint = problem.footprint
    # Whatever is moved, this stays.
    alive = int(footprint.least_live_bytes.max())
    alive = max(alive, footprint.gradient_bytes + footprint.optimizer_step_bytes)
    if footprint.base_bytes + alive > problem.limit_bytes:
        return False
    far_bytes = int(_FAR * problem.limit_bytes)
    return any(problem.fits(solution) for solution in _ever_smaller(problem, far_bytes))


def _ever_smaller(problem: Problem, far_bytes: int | None = None) -> Iterator[Solution]:
    """The simple ways, then the smallest of them with one unit after the other placed otherwise, smaller each time. Ways that
    need more than ``far_bytes``, whatever room tiers have, are left out.
    """
    choices, size = Choices(problem), _size_in(problem)

    def is_near(placement: Placement, windows: Windows) -> bool:
        every = problem.play(choices.uniform(placement), windows, placement.value)
        return far_bytes is None or every.timeline.must_fit_bytes <= far_bytes

    simple = []
    for placement in choices.options:
        usable = _windows_for(problem, placement)
        if is_near(placement, usable[-1]):
            for windows in usable:
                if is_near(placement, windows):
                    simple.append(_as_many_as_fit(problem, choices, placement, windows))
                    yield simple[-1]
    if not simple:
        return
    best = min(simple, key=size)
    work = _SEARCH_WORK // (_moments(problem) + 1)
    improved = True
    while improved and work > 0:
        improved = False
        for unit, placement in choices.moves():
            if best.placements[unit] is placement:
                continue
            work -= 1
            other = problem.play(choices.changed(best.placements, unit, placement), best.windows, best.method)
            if size(other) < size(best):
                best, improved = other, True
                yield best
            if work <= 0:
                break


def _size_in(problem: Problem) -> Callable[[Solution], tuple[bool, int, float]]:
    def size(solution: Solution) -> tuple[bool, int, float]:
        timeline = solution.timeline
        return not problem.has_room(solution), timeline.must_fit_bytes, timeline.step_s

    return size


def _as_many_as_fit(problem: Problem, choices: Choices, placement: Placement, windows: Windows) -> Solution:
    """Every unit placed alike, or only a first part of them: as many as the tier has room for."""

    def prefix(parts: int) -> Solution:
        return problem.play(choices.place(dict.fromkeys(choices.units[:parts], placement)), windows, placement.value)

    count = len(choices.units)
    if problem.has_room(every := prefix(count)):
        return every
    # They are looked at in ever larger steps, and then in smaller ones, from those on that have room if all is there at once.
    room, nbytes = problem.room_bytes.get(placement.tier or "", 0), problem.footprint.saved_bytes
    ends = list(itertools.accumulate(nbytes[unit] for unit in choices.units))
    enough, step = min(bisect.bisect_right(ends, room), count - 1), 1
    while enough + step < count and problem.has_room(prefix(enough + step)):
        enough, step = enough + step, 2 * step
    candidates = range(enough + 1, min(enough + step, count))
    return prefix(enough + bisect.bisect_left(candidates, True, key=lambda parts: not problem.has_room(prefix(parts))))


def uniform(problem: Problem, placement: Placement) -> Solution | None:
    """Every unit placed alike, with the widest windows; None if the problem does not allow that placement."""
    if placement.elementwise:
        reduced = problem.reduced
        found = None if reduced is None else uniform(reduced, placement.in_full)
        return None if reduced is None or found is None else reduced.named(found)
    choices = Choices(problem)
    if placement not in choices.options:
        return None
    return problem.play(choices.uniform(placement), problem.windows[0], placement.value)


def find_greedy(problem: Problem) -> list[Solution]:
    """Solutions in which as few units are placed in one way as the budget allows, and the rest is kept. Each way has the
    widest windows in which that fits: wider ones wait less. Ways that cannot be faster than what others have found are left
    out.

    Which come first: those whose bytes backward needs last, which have the most time to go and come back (SSDTrain's prefix
    rule), the largest, or the smallest. Half of the best prefixes is tried with a second placement.
    """
    choices = Choices(problem)
    bounds = Bounds(problem)
    units = choices.units
    nbytes = problem.footprint.saved_bytes
    largest = sorted(units, key=lambda unit: -nbytes[unit])
    smallest_first = sorted(units, key=lambda unit: nbytes[unit])
    prefixes: list[Prefix] = []
    solutions: list[Solution] = []
    for least_s, placement in _possible(choices, bounds):
        if least_s >= min((one.timeline.step_s for one in solutions), default=math.inf):
            break
        orders = (units,) if placement.recomputes else (units, largest, smallest_first)
        for order in orders:
            found = _prefix(problem, choices, bounds, order, placement)
            if found is not None:
                solutions.append(found.solution)
                prefixes += [found] if order is units else []
    prefixes.sort(key=lambda one: one.solution.objective)
    for one in prefixes[:_PAIRED]:
        for second in choices.options[1:]:
            if second is not one.placement:
                halves = dict.fromkeys(units[: one.count // 2], second)
                halves |= dict.fromkeys(units[one.count // 2 : one.count], one.placement)
                placements = choices.place(halves)
                if problem.least_s(placements) < prefixes[0].solution.timeline.step_s:
                    solutions.append(problem.play(placements, one.solution.windows, "greedy"))
    return [one for one in solutions if problem.fits(one)]


def _possible(choices: Choices, bounds: Bounds) -> list[tuple[float, Placement]]:
    """The ways that may fit, with how long a step takes at least in each: what promises most first."""
    found = [(bounds.least_s(placement), placement) for placement in choices.options[1:]]
    return sorted((one for one in found if one[0] < math.inf), key=lambda one: one[0])


def _all_alike(problem: Problem, choices: Choices, placement: Placement, below_s: float) -> Solution | None:
    """Every unit placed so, in the widest windows in which that fits; None if it fits in none, or takes ``below_s``."""
    placements = choices.uniform(placement)
    if problem.least_s(placements) >= below_s:
        return None
    for windows in _windows_for(problem, placement):
        solution = problem.play(placements, windows, placement.value)
        if solution.timeline.step_s >= below_s:
            return None  # narrower ones wait more
        if problem.fits(solution):
            return solution
    return None


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The first ``count`` units are placed in one way, and all others kept."""

    solution: Solution
    placement: Placement
    count: int


def find_prefixes(problem: Problem) -> list[Prefix]:
    """The shortest one that fits, best first, of each of the placements that promise most. A part of what
    :func:`find_greedy` finds, which mostly says which of several problems has the faster solution.
    """
    choices = Choices(problem)
    bounds = Bounds(problem)
    found: list[Prefix] = []
    for least_s, placement in _possible(choices, bounds):
        if least_s > min((one.solution.timeline.step_s for one in found), default=math.inf):
            break
        one = _prefix(problem, choices, bounds, choices.units, placement)
        if one is not None:
            found.append(one)
        if len(found) == _LIKELY:
            break
    return sorted(found, key=lambda one: one.solution.objective)


def _prefix(
    problem: Problem, choices: Choices, bounds: Bounds, order: Sequence[str], placement: Placement
) -> Prefix | None:
    """The shortest first part of ``order`` that is enough to be placed so, in the widest windows in which any is.

    It is looked where it would be enough if what moves took no memory, which is mostly true or nearly so; then where it would
    be if it took as much as it did there. Every third look halves what is left.
    """
    grain = max(1, len(order) // _PREFIX_PARTS)
    least, limit = bounds.least_bytes(order, grain, placement), problem.limit_bytes

    def enough(moving_bytes: int) -> int:
        return bisect.bisect_left(least, True, key=lambda nbytes: nbytes + moving_bytes <= limit)

    never = enough(0) - 1
    for windows in _windows_for(problem, placement):
        low, high, best = never, len(least), None
        middle, looks = max(low + 1, enough(0)), 0
        while low < middle < high:
            chosen = choices.place(dict.fromkeys(order[: middle * grain], placement))
            tried = problem.play(chosen, windows, "greedy")
            if problem.fits(tried):
                high, best = middle, tried
            elif problem.has_room(tried):
                low = middle
            else:  # nor has what is longer
                high = middle
            looks += 1
            middle = (low + high) // 2 if looks % 3 == 2 else enough(tried.timeline.must_fit_bytes - least[middle])
            middle = min(max(middle, low + 1), high - 1)
        if best is not None:
            return Prefix(best, placement, high * grain)
    return None


def find_uniform(problem: Problem, best_s: float = math.inf) -> list[Solution]:
    """Every unit placed alike, each way with the widest windows that fit; where a step of ``best_s`` is known, what is much
    slower is left out: a search that begins with it does not come out ahead.
    """
    choices, below_s = Choices(problem), _NEAR * best_s
    found = (_all_alike(problem, choices, placement, below_s) for placement in choices.options[1:])
    return [solution for solution in found if solution is not None]


def _windows_for(problem: Problem, placement: Placement) -> Sequence[Windows]:
    # What moves nothing has no windows.
    return problem.windows if placement.tier is not None else problem.windows[:1]


class _LocalSearch:
    """A local search, from solutions that fit."""

    def __init__(self, problem: Problem):
        self._problem = problem
        self._choices = choices = Choices(problem)
        self._moves = choices.moves()
        self._work_left = _SEARCH_WORK
        self._tried: dict[tuple[tuple[Placement, ...], Windows], Solution | None] = {}

    def improve(self, *families: Sequence[Solution]) -> Solution:
        """Improve the best of every family, with an equal share of the work; then the others, and changed copies."""
        firsts = [min(family, key=_objective) for family in families if family]
        share = self._work_left // len(firsts)
        climbed = [self._climb(one, self._work_left - share) for one in firsts]
        different = {_key(one.placements, one.windows): one for family in families for one in family}
        starts = sorted(different.values(), key=_objective)
        best = min((*climbed, *(self._climb(one) for one in starts if one not in firsts)), key=_objective)
        draw = random.Random(0)
        for turn in range(_PERTURBATIONS):
            if self._work_left <= 0:
                break
            # From the best, and in turns from one of the others: the best may lie behind worse ones.
            placements = (starts[turn % len(starts)] if turn % 2 else best).placements
            for unit, placement in draw.sample(self._moves, min(draw.randint(2, _PERTURBED), len(self._moves))):
                placements = self._choices.changed(placements, unit, placement)
            other = self._try(placements, best)
            if other is not None:
                best = min(best, self._climb(other), key=_objective)
        return best

    def _climb(self, solution: Solution, leave: int = 0) -> Solution:
        """Change one placement, or two at once, as long as that makes the step faster. Leaves so much of the work."""
        improved = True
        while improved:
            improved = False
            for changed in itertools.chain(self._one_change(solution), self._two_changes(solution)):
                if self._work_left <= leave:
                    return solution
                if self._problem.least_s(changed) > solution.timeline.step_s:
                    continue
                other = self._try(changed, solution)
                if other is not None and other.objective < solution.objective:
                    solution, improved = other, True
                    break
        return solution

    def _try(self, placements: Placements, like: Solution) -> Solution | None:
        """The solution with these placements, if it fits; each is played once."""
        key = _key(placements, like.windows)
        if key not in self._tried:
            self._work_left -= _moments(self._problem)
            solution = self._problem.play(placements, like.windows, like.method)
            self._tried[key] = solution if self._problem.fits(solution) else None
        return self._tried[key]

    def _one_change(self, solution: Solution) -> Iterator[Placements]:
        for unit, placement in self._moves:
            if solution.placements[unit] is not placement:
                yield self._choices.changed(solution.placements, unit, placement)

    def _two_changes(self, solution: Solution) -> Iterator[Placements]:
        for first, (unit, placement) in enumerate(self._moves, start=1):
            if solution.placements[unit] is placement:
                continue
            once = self._choices.changed(solution.placements, unit, placement)
            for other, second in itertools.islice(self._moves, first, None):
                if other != unit and solution.placements[other] is not second:
                    yield self._choices.changed(once, other, second)


def _moments(problem: Problem) -> int:
    """What one simulation goes through."""
    footprint = problem.footprint
    return len(footprint.segments) + len(footprint.saved) + _PER_TRANSFER * len(footprint.transfers)


def _objective(solution: Solution) -> tuple[float, int]:
    return solution.objective


def _key(placements: Placements, windows: Windows) -> tuple[tuple[Placement, ...], Windows]:
    return tuple(placements.values()), windows
