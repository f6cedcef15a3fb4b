"""Of plans that are about as fast, one that moves fewer bytes: these take time of processors and wear of drives that no
simulation counts.
"""

import dataclasses
import itertools

from hf_offload.plan.fitting import may_fit
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.holding import moved_bytes
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
    problems = [(choice.held, choice.problem)]
    if allowed.now is None or not allowed.is_measured or choice.held != allowed.now:
        plain = footprint.plain
        problems = [
            (held, problem_of(plain, hardware, budget_bytes, held, allowed)) for held in ways(plain, hardware, allowed)
        ]
    best, least = choice, all_moved_bytes(choice.problem, choice.solution)
    possible = (one for one in sorted(problems, key=lambda one: _passing_bytes(one[1].footprint)) if may_fit(one[1]))
    for held, problem in itertools.islice(possible, _LOOKED_AT):
        if _passing_bytes(problem.footprint) >= least:
            break
        for prefix in find_prefixes(problem.plain):
            nbytes = all_moved_bytes(problem, prefix.solution)
            if nbytes < least and prefix.solution.timeline.step_s <= _AS_FAST * choice.step_s:
                best, least = dataclasses.replace(choice, held=held, problem=problem, solution=prefix.solution), nbytes
    return best


def all_moved_bytes(problem: Problem, solution: Solution) -> int:
    """What a step writes to tiers and reads from them."""
    return _passing_bytes(problem.step(solution.placements)) + 2 * solution.timeline.moved_bytes


def _passing_bytes(footprint: Footprint) -> int:
    return sum(sum(each.values()) for each in moved_bytes(footprint))
