"""Choosing a placement for every unit: the fastest step whose memory stays within the budget.

Candidates come from a mixed-integer linear program and from a greedy search; both see a simplified step. The simulation
decides between them, and a local search improves the winner. The work is counted, not timed: the same plan on every machine.
"""

import bisect
import itertools
import random
from collections.abc import Iterator, Sequence

from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import Choices, Placements, Problem, Solution
from hf_offload.plan.program import by_program
from hf_offload.plan.timeline import Windows

# Moments and saved tensors that the local search may play through: some tenths of a second.
_POLISH_WORK = 45_000
# Copies of good solutions in which up to so many placements are drawn at random before they are improved again.
_KICKS = 200
_KICKED = 6
# A first part of the model is found to a 32nd of it, and the best so many of them are combined with others.
_PREFIX_PARTS = 32
_PAIRED = 2


def solve(problem: Problem) -> Solution | None:
    """The fastest solution within the budget, or None if there is none. Ties go to what moves fewer bytes."""
    choices = Choices(problem)
    keep = problem.play(choices.uniform(Placement.KEEP), problem.windows[0], "keep")
    if problem.fits(keep):
        return keep
    simple = _simple(problem, choices)
    # Wider windows wait less, so mixtures are looked for in the widest that has any; a simple way may need a narrower one.
    for windows in problem.windows:
        ways = itertools.chain(_greedy(problem, choices, windows), by_program(problem, choices, windows))
        found = [one for one in ways if problem.fits(one)]
        if found:
            return _Polish(problem, choices).improve([*found, *simple])
    if simple:
        return _Polish(problem, choices).improve(simple)
    least = smallest(problem)
    return least if problem.fits(least) else None


def smallest(problem: Problem) -> Solution:
    """What needs the least memory, however slow: the best of the simple ways, with single units placed otherwise.

    No tier is filled beyond its room: what does not fit into it is kept, from the end of the model on.
    """
    choices = Choices(problem)

    def size(solution: Solution) -> tuple[bool, int, float]:
        timeline = solution.timeline
        return not problem.has_room(solution), timeline.must_fit_bytes, timeline.step_s

    best = min(
        (
            _as_many_as_fit(problem, choices, placement, windows)
            for placement in choices.options
            for windows in _windows_for(problem, placement)
        ),
        key=size,
    )
    work = _POLISH_WORK // (len(problem.footprint.moments) + len(problem.footprint.saved) + 1)
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
            if work <= 0:
                break
    return best


def _as_many_as_fit(problem: Problem, choices: Choices, placement: Placement, windows: Windows) -> Solution:
    """Every unit placed alike, or only a first part of them: as many as the tier has room for."""

    def prefix(parts: int) -> Solution:
        return problem.play(choices.place(dict.fromkeys(choices.parts[:parts], placement)), windows, placement.value)

    count = len(choices.parts)
    if problem.has_room(every := prefix(count)):
        return every
    too_many = bisect.bisect_left(range(count), True, lo=1, key=lambda parts: not problem.has_room(prefix(parts)))
    return prefix(too_many - 1)


def uniform(problem: Problem, placement: Placement) -> Solution | None:
    """Every unit placed alike, with the widest windows; None if the problem does not allow that placement."""
    choices = Choices(problem)
    if placement not in choices.options:
        return None
    return problem.play(choices.uniform(placement), problem.windows[0], placement.value)


def greedy(problem: Problem, windows: Windows) -> Iterator[Solution]:
    """Solutions in which a first part of the model, as short as the budget allows, is placed in one way.

    What backward needs last has the most time to go and come back, so it is what leaves first (SSDTrain's prefix rule). For
    every placement the length is found by bisection; half of the part of the best of them is tried with a second placement.
    """
    return _greedy(problem, Choices(problem), windows)


def _greedy(problem: Problem, choices: Choices, windows: Windows) -> Iterator[Solution]:
    names = choices.parts
    grain = max(1, len(names) // _PREFIX_PARTS)
    found: list[tuple[Solution, Placement, int]] = []
    for first in choices.options[1:]:

        def prefix(parts: int, first: Placement = first) -> Solution:
            chosen = choices.place(dict.fromkeys(names[: parts * grain], first))
            return problem.play(chosen, windows, "greedy")

        low, high = 0, -(-len(names) // grain)
        best = prefix(high)
        if not problem.fits(best):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            tried = prefix(middle)
            if problem.fits(tried):
                high, best = middle, tried
            else:
                low = middle
        yield best
        found.append((best, first, high * grain))
    found.sort(key=lambda one: one[0].merit)
    for _, first, length in found[:_PAIRED]:
        for second in choices.options[1:]:
            if second is not first:
                halves = dict.fromkeys(names[: length // 2], second) | dict.fromkeys(names[length // 2 : length], first)
                yield problem.play(choices.place(halves), windows, "greedy")


def _simple(problem: Problem, choices: Choices) -> list[Solution]:
    """Every unit placed alike, each way with the widest windows that fit."""
    found = []
    for placement in choices.options[1:]:
        for windows in _windows_for(problem, placement):
            solution = problem.play(choices.uniform(placement), windows, placement.value)
            if problem.fits(solution):
                found.append(solution)
                break
    return found


def _windows_for(problem: Problem, placement: Placement) -> Sequence[Windows]:
    # What moves nothing has no windows.
    return problem.windows if placement.tier is not None else problem.windows[:1]


class _Polish:
    """A local search, from solutions that fit."""

    def __init__(self, problem: Problem, choices: Choices):
        self._problem = problem
        self._choices = choices
        self._moves = choices.moves()
        self._work_left = _POLISH_WORK
        self._tried: dict[tuple[tuple[Placement, ...], Windows], Solution | None] = {}

    def improve(self, found: Sequence[Solution]) -> Solution:
        """Improve the best of what was found, then the next ones, then changed copies of the best, while work is left."""
        different = {_key(one.placements, one.windows): one for one in sorted(found, key=_merit, reverse=True)}
        starts = sorted(different.values(), key=_merit)
        best = min((self._climb(one) for one in starts), key=_merit)
        draw = random.Random(0)
        for kick in range(_KICKS):
            if self._work_left <= 0:
                break
            # From the best, and in turns from one of the others: the best may lie behind worse ones.
            placements = (starts[kick % len(starts)] if kick % 2 else best).placements
            for unit, placement in draw.sample(self._moves, min(draw.randint(2, _KICKED), len(self._moves))):
                placements = self._choices.changed(placements, unit, placement)
            other = self._try(placements, best)
            if other is not None:
                best = min(best, self._climb(other), key=_merit)
        return best

    def _climb(self, solution: Solution) -> Solution:
        """Change one placement, or two at once, as long as that makes the step faster."""
        improved = True
        while improved:
            improved = False
            for changed in itertools.chain(self._one_change(solution), self._two_changes(solution)):
                if self._work_left <= 0:
                    return solution
                if self._least_s(changed) > solution.timeline.step_s:
                    continue
                other = self._try(changed, solution)
                if other is not None and other.merit < solution.merit:
                    solution, improved = other, True
                    break
        return solution

    def _try(self, placements: Placements, like: Solution) -> Solution | None:
        """The solution with these placements, if it fits; each is played once."""
        key = _key(placements, like.windows)
        if key not in self._tried:
            self._work_left -= len(self._problem.footprint.moments) + len(self._problem.footprint.saved)
            solution = self._problem.play(placements, like.windows, like.method)
            self._tried[key] = solution if self._problem.fits(solution) else None
        return self._tried[key]

    def _least_s(self, placements: Placements) -> float:
        """A step takes no less: everything is computed once, and what is recomputed twice."""
        footprint = self._problem.footprint
        again = (seconds for block, (seconds, _) in footprint.recompute_costs.items() if placements[block].recomputes)
        return footprint.step_s + sum(again)

    def _one_change(self, solution: Solution) -> Iterator[Placements]:
        for unit, placement in self._moves:
            if solution.placements[unit] is not placement:
                yield self._choices.changed(solution.placements, unit, placement)

    def _two_changes(self, solution: Solution) -> Iterator[Placements]:
        for (unit, placement), (other, second) in itertools.combinations(self._moves, 2):
            if (
                unit != other
                and solution.placements[unit] is not placement
                and solution.placements[other] is not second
            ):
                once = self._choices.changed(solution.placements, unit, placement)
                yield self._choices.changed(once, other, second)


def _merit(solution: Solution) -> tuple[float, int]:
    return solution.merit


def _key(placements: Placements, windows: Windows) -> tuple[tuple[Placement, ...], Windows]:
    return tuple(placements.values()), windows
