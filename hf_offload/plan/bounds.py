"""What no placement does better, known without playing a step: the memory that is left, and how long the step takes.

What stays in memory fills it, and is there at times known beforehand; what leaves counts for nothing here.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from hf_offload.plan import rules
from hf_offload.plan.footprint import Column, Footprint
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import Problem


class Bounds:
    """Of one problem."""

    def __init__(self, problem: Problem):
        self._problem = problem
        self._others_bytes = _others_bytes(problem.footprint)

    def least_bytes(self, order: Sequence[str], grain: int, placement: Placement) -> Sequence[int]:
        """What has to fit at least where the first units of ``order`` are placed so, and others kept: none, ``grain`` of
        them, twice as many, and so on up to all of them.
        """
        most = (self._others_bytes + _staying(self._problem.footprint, tuple(order), grain)).max(axis=1)
        found: list[int] = most.tolist()
        return found

    @functools.cached_property
    def _worst(self) -> tuple[int, int]:
        """The segment in which most has to leave for a step to fit, and how much."""
        footprint = self._problem.footprint
        held = _staying(footprint, tuple(footprint.units), len(footprint.units))[0]
        at = int(np.argmax(self._others_bytes + held))
        return at, int(self._others_bytes[at] + held[at]) - self._problem.limit_bytes

    def least_s(self, placement: Placement) -> float:
        """How long a step takes at least that fits, in which units are placed so or kept; infinite if none fits."""
        footprint = self._problem.footprint
        at, excess = self._worst
        if excess <= 0 or placement is Placement.KEEP:
            return footprint.step_s
        if placement.recomputes:
            return footprint.step_s + _recomputing_s(footprint, at, excess)
        return self._moving_s(placement.value, excess)

    def _moving_s(self, tier: str, nbytes: int) -> float:
        """How long a step takes at least from whose worst segment so much has gone to a tier."""
        # All of it is on the tier when that segment begins, or in the ring before it, and comes back later.
        footprint, channel, at = self._problem.footprint, self._problem.channels[tier], self._worst[0]
        left = max(0, nbytes - rules.ring_bytes_shared(channel.ring_bytes))
        if left > self._problem.room_bytes[tier]:
            return math.inf
        before, after = self._loads[tier]
        before_s = footprint.segment_columns.begins_s[at]
        return max(before_s, left / channel.store_bytes_per_s, before / channel.load_bytes_per_s) + max(
            footprint.step_s - before_s, (left + after) / channel.load_bytes_per_s
        )

    @functools.cached_property
    def _loads(self) -> dict[str, tuple[int, int]]:
        """Tier -> what comes from it in any case until the worst segment begins, and later."""
        footprint, at = self._problem.footprint, self._worst[0]
        on_their_way = sum(footprint.transfer_windows.values())
        found = dict.fromkeys(self._problem.channels, (0, -on_their_way))
        for one in footprint.transfers:
            if one.loads:
                before, after = found[one.tier]
                found[one.tier] = (before + one.nbytes, after) if one.at <= at else (before, after + one.nbytes)
        return found


def _others_bytes(footprint: Footprint) -> Column:
    """Segment -> what is there whatever leaves or is recomputed."""
    columns = footprint.segment_columns
    return footprint.base_bytes + footprint.least_live_bytes + columns.measured_bytes


def _recomputing_s(footprint: Footprint, at: int, nbytes: int) -> float:
    """How long it takes at least to recompute blocks that have saved so much when segment ``at`` begins."""
    saved = _saved_at(footprint, at)
    costs = footprint.recompute_costs
    blocks = (span.name for span in footprint.recomputable if saved.get(span.name))
    seconds = 0.0
    for block in sorted(blocks, key=lambda block: costs[block][0] / saved[block]):
        if nbytes <= 0:
            break
        seconds += costs[block][0] * min(1.0, nbytes / saved[block])
        nbytes -= saved[block]
    return seconds


def _saved_at(footprint: Footprint, at: int) -> dict[str | None, int]:
    """Block, or None -> bytes that nothing else holds when segment ``at`` begins."""
    saved: dict[str | None, int] = {}
    for one in footprint.saved:
        if one.gone <= at < one.released:
            block = footprint.units[one.unit]
            saved[block] = saved.get(block, 0) + one.nbytes
    return saved


def _staying(footprint: Footprint, order: tuple[str, ...], grain: int) -> Column:
    """(units that leave, in ``grain``s from the first on; segments): saved bytes of the others that nothing else holds."""
    known = footprint.staying_bytes
    if (order, grain) not in known:
        saved, end = footprint.saved_columns, len(footprint.segments)
        parts = -(-len(order) // grain)
        part = dict.fromkeys(footprint.units, parts) | {unit: place // grain for place, unit in enumerate(order)}
        of_saved = np.array(list(part.values()), np.int64)[saved.unit]
        alone = saved.where(saved.gone < saved.released)
        row = of_saved[saved.gone < saved.released] * (end + 1)
        count = (parts + 1) * (end + 1)
        changes = np.bincount(row + alone.gone, alone.nbytes, count)
        changes -= np.bincount(row + np.minimum(alone.released, end), alone.nbytes, count)
        each = changes.astype(np.int64).reshape(parts + 1, end + 1).cumsum(axis=1)[:, :end]
        known[order, grain] = each[::-1].cumsum(axis=0)[::-1]
    return known[order, grain]
