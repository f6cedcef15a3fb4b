"""Weights on a tier, of which only a part is in memory, in the steps of a training: which come and go when.

Where a weight needs room, those leave that are used last, and what comes next is read ahead into the same memory, until the
step ends. That is the rule of :class:`~hf_offload.state.units.Units`, which knows uses from the step before; so the step that
is simulated is one after others.
"""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from hf_offload.plan.footprint import Footprint, Transfer, UnitWeights
from hf_offload.plan.state_placement import (
    WEIGHTS,
    StatePlacement,
    has_no_backward,
    least_weights,
    staying_weights,
    weights_leave,
)


def weight_transfers(footprint: Footprint, placement: StatePlacement) -> list[Transfer]:
    """What moves of weights in a step."""
    return _of_two_passes(footprint, placement) if has_no_backward(footprint) else _of_a_step(footprint, placement)


def both_ways(kind: str, unit: str, tier: str, nbytes: int, at: int) -> list[Transfer]:
    """Bytes that are loaded and stored in one segment."""
    return [Transfer(kind, unit, tier, nbytes, at, loads) for loads in (True, False)] if nbytes else []


def _of_a_step(footprint: Footprint, placement: StatePlacement) -> list[Transfer]:
    assert placement.weights is not None
    weights, uses = footprint.weights, footprint.uses
    in_order = sorted(weights, key=lambda unit: uses[unit].forward)
    moved = _sequence(
        tuple((unit, weights[unit]) for unit in in_order),
        staying_weights(footprint, placement),
        least_weights(footprint),
        placement.in_backward,
    )
    found: dict[tuple[int, str, bool], int] = {}
    for one in moved:
        key = uses[one.user].backward if one.backward else uses[one.user].forward, one.unit, one.loads
        found[key] = found.get(key, 0) + one.nbytes
    return [
        Transfer(WEIGHTS, unit, placement.weights, nbytes, at, loads) for (at, unit, loads), nbytes in found.items()
    ]


class _WeightTransfer(NamedTuple):
    """Weights of ``unit`` come or go when ``user`` computes."""

    user: str
    backward: bool
    unit: str
    loads: bool
    nbytes: int


@functools.lru_cache(maxsize=64)  # the same for every place of state, and in all steps that use them in this order
def _sequence(
    in_order: tuple[tuple[str, UnitWeights], ...], limit_bytes: int, ahead_bytes: int, in_backward: bool
) -> list[_WeightTransfer]:
    """What leaves is what is used last: when forward ends, the end of the model is in memory, and when backward ends, its
    beginning.
    """
    weights = dict(in_order)
    every = [(unit, place) for unit, one in in_order for place in range(len(one.each))]
    numbers = {each: number for number, each in enumerate(every)}
    sizes = [weights[unit].each[place] for unit, place in every]
    forward: list[tuple[str, int, bool]] = []  # the user, the weight, and whether it is updated there
    backward: list[tuple[str, int, bool]] = []
    for unit, one in in_order:
        own = [(unit, place) for place in range(len(one.each))]
        for each in (*own, *(tied for tied in one.borrowed if tied in numbers)):
            trains = weights[each[0]].trained_bytes > 0
            forward.append((unit, numbers[each], trains and not in_backward))
            if not one.is_looked_up or (trains and in_backward):
                backward.append((unit, numbers[each], trains and in_backward))
    uses = [*forward, *reversed(backward)]
    in_turn = [Use(number, place, changes) for place, (_, number, changes) in enumerate(uses)]
    moved = simulate_traffic(in_turn, sizes, limit_bytes, ahead_bytes)
    found = []
    for loads, each_moved in ((True, moved.read), (False, moved.written)):
        for place, number in each_moved:
            owner, nbytes = every[number][0], sizes[number]
            one = weights[owner]
            nbytes = nbytes if loads else nbytes * one.trained_bytes // one.weight_bytes
            found.append(_WeightTransfer(uses[place][0], place >= len(forward), owner, loads, nbytes))
    return found


def in_turns(footprint: Footprint) -> Footprint:
    """Both passes of ``footprint`` at once: each segment for one and then for the other, whose hidden states wait, and which
    uses the weights of a block in a copy.
    """
    first = footprint.segments[: len(footprint.segments) // 2 + 1]
    waiting = min((one.live_bytes for one in first if footprint.units.get(one.unit)), default=0)
    waiting += least_weights(footprint)
    both = tuple(
        dataclasses.replace(one, live_bytes=one.live_bytes + waiting, seconds=2 * one.seconds) for one in first
    )
    return dataclasses.replace(footprint, segments=both)


def _of_two_passes(footprint: Footprint, placement: StatePlacement) -> list[Transfer]:
    """What leaves is brought and written once by both passes at once, and by each of two."""
    assert placement.weights is not None
    total = sum(one.weight_bytes for one in footprint.weights.values())
    # Where any leave, there is room for a block that is read ahead; where no third one fits, none stays until the next step.
    block = least_weights(footprint)
    staying = placement.weights_bytes - block if placement.weights_bytes >= 3 * block else 0
    leaving = max(0, total - staying) if weights_leave(footprint, placement) else 0
    share = leaving / max(1, total)
    second: dict[str, int] = {}
    for index, segment in enumerate(footprint.segments):
        if index > len(footprint.segments) // 2:
            second.setdefault(segment.unit, index)
    found = []
    for unit, one in footprint.weights.items():
        first = footprint.uses[unit].forward
        for use in [first] if footprint.is_one_stack else [first, second.get(unit, first)]:
            found += [
                Transfer(WEIGHTS, unit, placement.weights, round(one.weight_bytes * share), use, loads=True),
                Transfer(WEIGHTS, unit, placement.weights, round(one.trained_bytes * share), use, loads=False),
            ]
    return [one for one in found if one.nbytes]


class Use(NamedTuple):
    """A weight is used in segment ``at``; ``changes``: and updated."""

    weight: int
    at: int
    changes: bool = False


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What moves in a step: (segment, weight) of each in order; and the bytes of weights that are in memory in each use."""

    read: tuple[tuple[int, int], ...]
    written: tuple[tuple[int, int], ...]
    held_bytes: tuple[int, ...]


_STEPS = 3
"""In the first, all weights come; the last is like all others."""


def simulate_traffic(uses: Sequence[Use], sizes: Sequence[int], limit_bytes: int, ahead_bytes: int = 0) -> Traffic:
    """Play steps with these uses, in order, of weights of these sizes, of which ``limit_bytes`` may be in memory, and
    ``ahead_bytes`` of these before they are used.
    """
    sequence = list(itertools.chain.from_iterable(itertools.repeat(uses, _STEPS)))
    next_use = _next_uses(sequence)
    in_memory: set[int] = set()
    due = [0] * len(sizes)  # the place at which each is used next
    farthest: list[tuple[int, int]] = []  # of all in memory, and former ones
    changed: set[int] = set()
    held = 0
    held_bytes: list[int] = []
    read: list[tuple[int, int]] = []
    written: list[tuple[int, int]] = []
    early: set[int] = set()  # read ahead, and not used yet
    known = 0  # all that is used from here to this place is in memory

    def comes(one: int, at: int, wanted_at: int, before: int) -> bool:
        """Let it come in segment ``at`` for a use in ``wanted_at``: instead of those that are used after place ``before``."""
        nonlocal held
        while in_memory and held + sizes[one] > limit_bytes:
            when, other = farthest[0]
            if other in in_memory and -when == due[other]:
                if -when <= before:
                    return False
                in_memory.remove(other)
                early.discard(other)
                held -= sizes[other]
                if other in changed:
                    changed.remove(other)
                    written.append((at, other))
            heapq.heappop(farthest)
        in_memory.add(one)
        held += sizes[one]
        read.append((wanted_at, one))
        return True

    for place, use in enumerate(sequence):
        if place % len(uses) == 0:
            known = place
            if place == len(uses) * (_STEPS - 1):
                read, written, held_bytes = [], [], []
        one = use.weight
        if one not in in_memory:
            comes(one, use.at, use.at, -1)
        early.discard(one)
        held_bytes.append(held)
        if use.changes:
            changed.add(one)
        due[one] = next_use[place]
        heapq.heappush(farthest, (-next_use[place], one))
        known = max(known, place + 1)
        while known < (place // len(uses) + 1) * len(uses):
            coming = sequence[known]
            if coming.weight not in in_memory:
                too_many = sum(sizes[other] for other in early) + sizes[coming.weight] > ahead_bytes
                if too_many or not comes(coming.weight, use.at, coming.at, known):
                    break
                early.add(coming.weight)
                due[coming.weight] = known
                heapq.heappush(farthest, (-known, coming.weight))
            known += 1
    return Traffic(tuple(read), tuple(written), tuple(held_bytes))


def _next_uses(sequence: Sequence[Use]) -> list[int]:
    """For every use the place of the next one of the same weight: as if another step like these followed."""
    steps = len(sequence)
    first: dict[int, int] = {}
    for place, use in enumerate(sequence):
        first.setdefault(use.weight, place)
    found = [0] * steps
    coming: dict[int, int] = {weight: steps + place for weight, place in first.items()}
    for place in range(steps - 1, -1, -1):
        found[place] = coming[sequence[place].weight]
        coming[sequence[place].weight] = place
    return found
