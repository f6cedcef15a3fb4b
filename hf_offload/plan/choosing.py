"""Choosing where weights, gradients and optimizer state are, and what becomes of activations in the memory that is left.

There are few choices for them: state in memory or on a tier, weights in memory or on a tier with so many bytes of them in
memory. A step in which all activations stay, whether they fit or not, bounds what each choice can reach; in this order, those
that fit are planned until none that is left can be faster. What stays in memory next to some plan is not moved, as in a run.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.holding import Held, hold, least_weights, tier_bytes
from hf_offload.plan.plan import Placement
from hf_offload.plan.planner import make_problem
from hf_offload.plan.problem import Choices, Problem, Solution
from hf_offload.plan.search import can_fit, find_greedy, find_uniform, local_search, smallest

_SHARES = 8
"""Weights that stay are tried in so many steps."""
_SOLVED = 4
_STAGES = 3
_SMALL_STATE = 0.25
"""Of the budget: gradients and state that may stay in memory while weights leave it."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Where weights, gradients and state are, and the plan for the activations with them."""

    held: Held
    problem: Problem
    solution: Solution

    @property
    def step_s(self) -> float:
        """Of the predicted step."""
        return self.solution.timeline.step_s


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What may be where: ``"none"`` is memory, ``"auto"`` wherever it is best. ``in_backward`` as in :class:`Held`."""

    state: str = "auto"
    weights: str = "auto"
    in_backward: bool = False
    may_recompute: bool = True


def problem_of(footprint: Footprint, hardware: Hardware, budget_bytes: int, held: Held, allowed: Allowed) -> Problem:
    """What is left to be placed: activations, in the memory and the room that the rest leaves."""
    on_host = hardware.device == "cpu"
    found = hold(footprint, held, budget_bytes, on_host)
    problem = make_problem(found, hardware, budget_bytes, may_recompute=allowed.may_recompute)
    taken = tier_bytes(footprint, held)
    room = {tier: nbytes - taken.get(tier, 0) for tier, nbytes in problem.room_bytes.items()}
    return dataclasses.replace(problem, room_bytes=room)


def choose(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> Choice | None:
    """The fastest step within the budget that is found; None if nothing fits. In a run that fits, everything stays."""
    found: list[tuple[float, int, Held, Problem]] = []
    for number, held in enumerate(ways(footprint, hardware, allowed)):
        problem = problem_of(footprint, hardware, budget_bytes, held, allowed)
        if not _may_fit(problem):
            continue
        kept = problem.play(Choices(problem).uniform(Placement.KEEP), problem.windows[0], "keep")
        if number == 0 and problem.fits(kept):
            return Choice(held, problem, kept)
        found.append((round(kept.timeline.step_s, 4), problem.footprint.base_bytes, held, problem))
    for stage in range(_STAGES):
        best = _fastest([one for one in found if _stage(one[2]) == stage])
        if best is not None:
            improved = local_search(best.problem, [best.solution])
            return best if improved is None else dataclasses.replace(best, solution=improved)
    return _smallest(found)


def _stage(held: Held) -> int:
    """A run moves state where no plan fits next to it, and weights where none fits then."""
    return 2 if held.weights is not None else int(held.state is not None)


def _fastest(found: Sequence[tuple[float, int, Held, Problem]]) -> Choice | None:
    best: Choice | None = None
    tried = 0
    # Activations that are moved or recomputed make no step faster.
    for least_s, _, held, problem in sorted(found, key=lambda one: one[:2]):
        if best is not None and (tried >= _SOLVED or least_s >= best.step_s):
            break
        if not any(True for _ in _narrowest(problem)):
            continue
        solutions = [*find_greedy(problem), *find_uniform(problem)]
        tried += bool(solutions)
        solution = min(solutions, key=lambda one: one.objective, default=None)
        if solution is not None and (best is None or solution.timeline.step_s < best.step_s):
            best = Choice(held, problem, solution)
    return best


def least_memory(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> Choice:
    """What needs the least memory, however slow."""
    found = [
        (held, problem_of(footprint, hardware, budget_bytes, held, allowed))
        for held in ways(footprint, hardware, allowed)
    ]
    roomy = [one for one in found if min(one[1].room_bytes.values(), default=0) >= 0] or found
    held, problem = min(roomy, key=lambda one: one[1].footprint.base_bytes + one[1].footprint.gradient_bytes)
    return Choice(held, problem, smallest(problem))


def can_hold(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> bool:
    """Whether anything fits."""
    problems = [
        problem_of(footprint, hardware, budget_bytes, held, allowed) for held in ways(footprint, hardware, allowed)
    ]
    possible = [problem for problem in problems if _may_fit(problem)]
    if not possible:
        return False
    if any(True for _ in _narrowest(possible[0])):
        return True
    return can_fit(min(possible, key=lambda one: one.footprint.base_bytes + one.footprint.gradient_bytes))


def _smallest(found: Sequence[tuple[float, int, Held, Problem]]) -> Choice | None:
    if not found:
        return None
    _, _, held, problem = min(found, key=lambda one: one[1])
    solution = smallest(problem)
    return Choice(held, problem, solution) if problem.fits(solution) else None


def ways(footprint: Footprint, hardware: Hardware, allowed: Allowed) -> Iterator[Held]:
    """What may be where, everything in memory first if that is allowed."""
    total = sum(one.weight_bytes for one in footprint.weights.values())
    least = min(least_weights(footprint), total)
    trained = sum(one.trained_bytes for one in footprint.weights.values())
    for state in _places(allowed.state, hardware) if trained else [None]:
        for weights in _places(allowed.weights, hardware) if total else [None]:
            if weights is None:
                yield Held(state, None, 0, allowed.in_backward)
                continue
            if state is None and allowed.weights == "auto" and trained > _SMALL_STATE * total:
                continue  # the optimizer's step takes all of them at once
            for share in range(_SHARES - 1, -1, -1):
                yield Held(state, weights, least + (total - least) * share // _SHARES, allowed.in_backward)


def _places(allowed: str, hardware: Hardware) -> Sequence[str | None]:
    tiers = [tier for tier in ("ram", "ssd") if tier in hardware.store_bytes_per_s]
    if hardware.device == "cpu":
        tiers = [tier for tier in tiers if tier != "ram"]
    if allowed == "auto":
        return [None, *tiers]
    return [None if allowed == "none" else allowed]


def _may_fit(problem: Problem) -> bool:
    footprint = problem.footprint
    if any(nbytes < 0 for nbytes in problem.room_bytes.values()):
        return False
    alive = max(segment.live_bytes for segment in footprint.segments)
    alive = max(alive, footprint.gradient_bytes + footprint.optimizer_step_bytes)
    return footprint.base_bytes + alive <= problem.limit_bytes


def _narrowest(problem: Problem) -> Iterator[Solution]:
    """All units placed alike, with the narrowest windows, where that fits."""
    choices = Choices(problem)
    for placement in choices.options:
        solution = problem.play(choices.uniform(placement), problem.windows[-1], placement.value)
        if problem.fits(solution):
            yield solution
