"""Where weights, gradients and optimizer state may be, and what is left to be placed then.

There are few choices for them: state in memory or on a tier, weights in memory or on a tier with so many bytes of them in
memory.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.problem import Problem, Solution, make_problem
from hf_offload.plan.state_placement import (
    IN_MEMORY,
    StatePlacement,
    has_no_backward,
    least_weights,
    moved_bytes,
    snapshot_bytes,
    tier_bytes,
    units_in_order,
)
from hf_offload.plan.state_transfers import place_state

_SHARES = 8
"""Weights that stay are tried in so many steps."""
_SMALL_STATE = 0.25
"""Of the budget: gradients and state that may stay in memory while weights leave it."""


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What may be where: ``"none"`` is memory, ``"auto"`` wherever it is best.

    Attributes:
        state, weights: Where gradients and state, and weights, may be.
        in_backward, keeps_gradients: As in :class:`StatePlacement`.
        may_recompute: Whether blocks may be recomputed in backward.
        now: Where a running training has them, and the footprint is taken so; None before it. What has left memory stays out
            of it, but how many bytes of weights are in memory may change, unless ``weights`` is ``"none"``.
        written_bytes: Most bytes that a step may write to drives; None: no limit.
        snapshots: How many of the run are held at a time.
        snapshots_of_trained: Whether they leave out what is not trained.
        is_measured: Whether a measured step had a part in where they are ``now``: if not, a plan is not bound to it.
        must_stay: Whether they are to be where they are ``now``.
        refused: Places that a measured step has shown to leave too little memory: none that has no less in memory is tried.
    """

    state: str = "auto"
    weights: str = "auto"
    in_backward: bool = False
    keeps_gradients: bool = False
    may_recompute: bool = True
    now: StatePlacement | None = None
    written_bytes: int | None = None
    snapshots: int = 0
    snapshots_of_trained: bool = False
    is_measured: bool = True
    must_stay: bool = False
    refused: frozenset[StatePlacement] = frozenset()


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

    @property
    def named(self) -> "Choice":
        """The same, with placements that say which blocks recompute their elementwise operations."""
        return dataclasses.replace(self, solution=self.problem.named(self.solution))


def state_placements(
    footprint: Footprint, hardware: Hardware, allowed: Allowed, width: int = 1
) -> Iterator[StatePlacement]:
    """What may be where: as it is, and then the others, everything in memory first if that is allowed. ``width``: of the
    windows of gradients and state in these.
    """
    for found in _all_placements(footprint, hardware, allowed, width):
        if found == allowed.now or not any(_leaves_no_more(footprint, found, one) for one in allowed.refused):
            yield found


def _leaves_no_more(footprint: Footprint, placement: StatePlacement, other: StatePlacement) -> bool:
    """Whether all that is in memory in ``other`` is so in ``placement``."""
    state = placement.state is None or (other.state is not None and placement.staying >= other.staying)
    return state and _weights_there(footprint, placement) >= _weights_there(footprint, other)


def _weights_there(footprint: Footprint, placement: StatePlacement) -> int:
    total = sum(one.weight_bytes for one in footprint.weights.values())
    return total if placement.weights is None else min(total, placement.weights_bytes)


def _all_placements(footprint: Footprint, hardware: Hardware, allowed: Allowed, width: int) -> Iterator[StatePlacement]:
    total = sum(one.weight_bytes for one in footprint.weights.values())
    least = min(least_weights(footprint), total)
    trained = sum(one.trained_bytes for one in footprint.weights.values())
    now = allowed.now or IN_MEMORY
    if now.moves or allowed.must_stay:
        yield now
    if allowed.must_stay:
        return
    states = _tiers(allowed.state, hardware) if trained else [None]
    tiers = _tiers(allowed.weights, hardware) if total else [None]
    for state in states if now.state is None else [now.state]:
        stays = list(_staying(footprint, state, allowed, width))
        for weights in tiers if now.weights is None else [now.weights]:
            if weights is None:
                for staying, wide in stays:
                    found = StatePlacement(state, None, 0, allowed.in_backward, allowed.keeps_gradients, staying, wide)
                    if not now.moves or found != now:
                        yield found
                continue
            if now.weights is not None and allowed.weights == "none":
                if state != now.state:
                    yield dataclasses.replace(now, state=state, width=width)
                continue
            at_once = state is None and not has_no_backward(footprint)
            if at_once and allowed.weights == "auto" and trained > _SMALL_STATE * total:
                continue  # the optimizer's step takes all of them at once
            # Weights that have left may all come back.
            for share in range(_SHARES - (now.weights is None), -1, -1):
                there = least + (total - least) * share // _SHARES
                for staying, wide in stays if there == total else [(frozenset[str](), stays[-1][1])]:
                    found = StatePlacement(
                        state, weights, there, allowed.in_backward, allowed.keeps_gradients, staying, wide
                    )
                    if found != now:
                        yield found


def _staying(
    footprint: Footprint, state: str | None, allowed: Allowed, width: int
) -> Iterator[tuple[frozenset[str], int]]:
    """Which units' gradients and state stay, the first ones of the model, until all have left; and the width of the windows
    of those that do not. What moves where half of it stays needs no wide ones, which take the room that it leaves.
    """
    now = allowed.now or IN_MEMORY
    sizes = {unit: footprint.weights[unit] for unit in units_in_order(footprint)}
    ends = list(itertools.accumulate(one.state_bytes + one.trained_bytes for one in sizes.values()))
    may_stay = state is not None and allowed.state == "auto" and bool(ends)
    if may_stay and ends[-1] > _SMALL_STATE * sum(one.weight_bytes for one in footprint.weights.values()):
        # What has left may all come back.
        for share in range(_SHARES - (now.state is None), 0, -1):
            count = bisect.bisect_right(ends, ends[-1] * share // _SHARES)
            if count:
                yield frozenset(itertools.islice(sizes, count)), 1 if 2 * ends[count - 1] >= ends[-1] else width
    yield frozenset() if may_stay or state is None else now.staying, 1 if state is None else width


def _tiers(allowed: str, hardware: Hardware) -> Sequence[str | None]:
    tiers = [tier for tier in ("ram", "ssd") if tier in hardware.store_bytes_per_s]
    if hardware.device == "cpu":
        tiers = [tier for tier in tiers if tier != "ram"]
    if allowed == "auto":
        return [None, *tiers]
    return [None if allowed == "none" else allowed]


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
