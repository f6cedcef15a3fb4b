"""Of plans that are about as fast, one that moves fewer bytes: these take time of processors and wear of drives that no
simulation counts.
"""

import bisect
import dataclasses
import itertools

from hf_offload.plan.fitting import may_fit
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.holding import moved_bytes, units_in_order
from hf_offload.plan.places import Allowed, Choice, problem_of, ways
from hf_offload.plan.problem import Problem, Solution
from hf_offload.plan.search import find_prefixes

_AS_FAST = 1.01
"""Predictions are not as exact as that."""
_LOOKED_AT = 3
"""Places of weights and state, those first that move the least."""


def sparing(choice: Choice, footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> Choice:
    """``choice``, or a plan that is about as fast and moves fewer bytes, of activations, weights, gradients and state in all.

    Where a measured step had a part in where weights and state are, and ``choice`` lets them be there, they stay there.
    """
    may_change = allowed.now is None or not allowed.is_measured or choice.held != allowed.now
    step = footprint.plain if choice.problem.footprint.usual is None else footprint.reduced
    assert step is not None, "the choice has been made of it"
    problems = [(choice.held, choice.problem)]
    if may_change:
        problems = [
            (held, problem_of(step, hardware, budget_bytes, held, allowed))
            for held in ways(step, hardware, allowed, choice.held.width)
        ]
    best, least = choice, all_moved_bytes(choice.problem, choice.solution)
    possible = (one for one in sorted(problems, key=lambda one: _passing_bytes(one[1].footprint)) if may_fit(one[1]))
    for held, problem in itertools.islice(possible, _LOOKED_AT):
        if _passing_bytes(problem.footprint) >= least:
            break
        for prefix in find_prefixes(problem):
            nbytes = all_moved_bytes(problem, prefix.solution)
            if nbytes < least and prefix.solution.timeline.step_s <= _AS_FAST * choice.step_s:
                best, least = dataclasses.replace(choice, held=held, problem=problem, solution=prefix.solution), nbytes
    return (_with_more_state(best, step, hardware, budget_bytes, allowed) if may_change else best).named


def _with_more_state(
    choice: Choice, step: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed
) -> Choice:
    """``choice``, with gradients and state of as many more units in memory as fit next to all else: it was searched in
    eighths.
    """
    units = units_in_order(step)
    if not choice.held.staying or allowed.state != "auto":
        return choice

    def with_first(count: int) -> Choice:
        held = dataclasses.replace(choice.held, staying=frozenset(units[:count]))
        problem = problem_of(step, hardware, budget_bytes, held, allowed)
        placements, windows = choice.solution.placements, choice.solution.windows
        return Choice(held, problem, problem.play(placements, windows, choice.solution.method))

    def is_too_much(count: int) -> bool:
        found = with_first(count)
        return not found.problem.fits(found.solution) or found.step_s > choice.step_s

    counts = range(len(choice.held.staying) + 1, len(units) + 1)
    more = bisect.bisect_left(counts, True, key=is_too_much)
    return with_first(counts[more - 1]) if more else choice


def all_moved_bytes(problem: Problem, solution: Solution) -> int:
    """What a step writes to tiers and reads from them."""
    return _passing_bytes(problem.footprint) + 2 * solution.timeline.moved_bytes


def _passing_bytes(footprint: Footprint) -> int:
    return sum(sum(each.values()) for each in moved_bytes(footprint))
