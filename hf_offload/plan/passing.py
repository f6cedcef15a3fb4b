"""Weights of which only a part is in memory, in the steps of a training: what comes and goes when.

The rule is that of :class:`~hf_offload.state.units.Units`: where a weight needs room, those leave that are used
last, and what comes next is read ahead into the same memory, until the step ends. It knows uses from the step before, so what
is played is a step after others.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Use(NamedTuple):
    """A weight is used in segment ``at``; ``changes``: and updated."""

    weight: int
    at: int
    changes: bool = False


@dataclasses.dataclass(frozen=True)
class Passing:
    """What moves in a step: (segment, weight) of each in order; and the bytes of weights that are in memory in each use."""

    read: tuple[tuple[int, int], ...]
    written: tuple[tuple[int, int], ...]
    held_bytes: tuple[int, ...]


_STEPS = 3
"""In the first, all weights come; the last is like all others."""


def passing(uses: Sequence[Use], sizes: Sequence[int], limit_bytes: int, ahead_bytes: int = 0) -> Passing:
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
    return Passing(tuple(read), tuple(written), tuple(held_bytes))


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
