"""What is where in a step, and what it moves, by kind: weights, gradients, optimizer state and activations."""

import dataclasses
from collections.abc import Mapping

from hf_offload.plan.footprint import Footprint
from hf_offload.plan.holding import ACTIVATIONS, GRADIENTS, STATE, WEIGHTS, Held, least_weights
from hf_offload.plan.problem import Problem, Solution


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of bytes under a plan.

    Attributes:
        name: Of the kind.
        total_bytes: All of it, as a run that moves nothing has it in memory.
        memory_bytes: How much of it stays in memory; of activations, what is kept.
        tiers: Tier -> the most that lies there.
        written_bytes, read_bytes: Tier -> bytes a step.
    """

    name: str
    total_bytes: int
    memory_bytes: int
    tiers: Mapping[str, int]
    written_bytes: Mapping[str, int]
    read_bytes: Mapping[str, int]

    @property
    def place(self) -> str:
        """Where it is, in words."""
        places = ["memory"] if self.memory_bytes or not self.tiers else []
        return ", ".join([*places, *(tier for tier, nbytes in self.tiers.items() if nbytes)])


def kinds_of(counted: Footprint, problem: Problem, held: Held, solution: Solution | None) -> list[Kind]:
    """All kinds. ``counted`` is the step with everything in memory, ``problem`` what ``held`` leaves of it."""
    every = counted.weights.values()
    weights = counted.base_bytes - counted.state_bytes - counted.buffer_bytes
    large = sum(one.weight_bytes for one in every)
    leaving = [one for unit, one in counted.weights.items() if held.state is not None and unit not in held.staying]
    state, trained = (sum(getattr(one, name) for one in leaving) for name in ("state_bytes", "trained_bytes"))
    staying = min(large, max(held.weights_bytes, least_weights(counted))) if held.weights is not None else large
    gradients = counted.gradient_bytes
    left = 0 if held.keeps_gradients else min(gradients, trained)
    found = [
        _kind(problem, WEIGHTS, weights, weights - large + staying, held.weights, large),
        _kind(problem, GRADIENTS, gradients, gradients - left, held.state if held.moves_gradients else None, trained),
        _kind(problem, STATE, counted.state_bytes, counted.state_bytes - state, held.state, state),
    ]
    if solution is not None:
        now_saved = problem.footprint.saved_bytes
        saved = now_saved if problem.footprint.usual is None else problem.footprint.usual.saved_bytes
        kept = sum(
            now_saved[unit] for unit, one in solution.placements.items() if one.tier is None and not one.recomputes
        )
        moved = dict(solution.timeline.tier_bytes)
        found.append(Kind(ACTIVATIONS, sum(saved.values()), kept, moved, moved, moved))
    return found


def _kind(problem: Problem, name: str, total: int, memory: int, tier: str | None, nbytes: int) -> Kind:
    transfers = [one for one in problem.footprint.transfers if one.kind == name]
    moved = [
        {
            one.tier: sum(each.nbytes for each in transfers if each.loads == loads and each.tier == one.tier)
            for one in transfers
        }
        for loads in (False, True)
    ]
    return Kind(name, total, memory, {} if tier is None else {tier: nbytes}, *moved)
