"""The question that a placement answers: what may be placed where, within which limits, and what an answer is worth."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from hf_offload.plan.footprint import Footprint
from hf_offload.plan.plan import Placement
from hf_offload.plan.simulate import simulate
from hf_offload.plan.timeline import Channel, Timeline, Windows

Placements = Mapping[str, Placement]

# What a plan cannot count on: memory that kernels take for a while, and what differs between two steps.
_RESERVE_PERCENT = 3
_MIB = 1 << 20

_RECOMPUTES = {"ram": Placement.RECOMPUTE_RAM, "ssd": Placement.RECOMPUTE_SSD}


@dataclasses.dataclass(frozen=True)
class Solution:
    """A placement of every unit, and its simulated step. ``method`` found it."""

    placements: Placements
    windows: Windows
    timeline: Timeline
    method: str

    @property
    def objective(self) -> tuple[float, int]:
        """Less is better: time, and among steps that differ by less than a ten-thousandth, the drive is spared."""
        return (round(self.timeline.step_s, 4), self.timeline.moved_bytes)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be placed, and within which limits.

    Attributes:
        footprint: The step.
        channels: Tiers that may be used, with their bandwidths.
        room_bytes: Most bytes that may lie in each of those tiers.
        budget_bytes: Most memory at any time, weights and optimizer state included. A small share of it is left free.
        windows: How far to read ahead and write behind, best first.
        may_recompute: Whether blocks may be recomputed in backward.
        reduced: The same problem with all blocks recomputing their elementwise operations; None where that cannot be chosen.
    """

    footprint: Footprint
    channels: Mapping[str, Channel]
    room_bytes: Mapping[str, int]
    budget_bytes: int
    windows: Sequence[Windows]
    may_recompute: bool = True
    reduced: "Problem | None" = None

    @property
    def limit_bytes(self) -> int:
        """Most memory that a plan may be predicted to need."""
        return limit_of(self.budget_bytes)

    def play(self, placements: Placements, windows: Windows, method: str) -> Solution:
        """Simulate a placement of every unit. Each is simulated once, and what moves nothing has no windows."""
        moves = any(one.tier is not None for one in placements.values())
        key = tuple(placements.values()), windows if moves else None
        timeline = self._played.get(key)
        if timeline is None:
            timeline = self._played[key] = simulate(self.footprint, placements, self.channels, windows)
        return Solution(placements, windows, timeline, method)

    @functools.cached_property
    def _played(self) -> dict[tuple[tuple[Placement, ...], Windows | None], Timeline]:
        return {}

    def named(self, solution: Solution) -> Solution:
        """``solution``, whose placements say which blocks recompute their elementwise operations."""
        blocks, units = self.footprint.reduced_blocks, self.footprint.units
        return dataclasses.replace(
            solution,
            placements={
                unit: one.with_elementwise if units[unit] in blocks and not one.recomputes else one
                for unit, one in solution.placements.items()
            },
        )

    def least_s(self, placements: Placements) -> float:
        """A step takes no less: everything is computed once, and what is recomputed twice."""
        costs = self.footprint.recompute_costs
        return self.footprint.step_s + sum(
            seconds for block, (seconds, _) in costs.items() if placements[block].recomputes
        )

    def fits(self, solution: Solution) -> bool:
        """Whether memory, even where the tier stops writing for a while, and every tier stay within their limits."""
        return solution.timeline.must_fit_bytes <= self.limit_bytes and self.has_room(solution)

    def over(self, solution: Solution) -> dict[str, int]:
        """What does not fit, memory or tiers, and by how many bytes its budget or room is too small."""
        short = smallest_budget(solution.timeline.must_fit_bytes) - self.budget_bytes
        memory = {} if solution.timeline.must_fit_bytes <= self.limit_bytes else {"memory": short}
        tiers = {tier: nbytes - self.room_bytes.get(tier, 0) for tier, nbytes in solution.timeline.tier_bytes.items()}
        return memory | {tier: nbytes for tier, nbytes in tiers.items() if nbytes > 0}

    def has_room(self, solution: Solution) -> bool:
        """Whether every tier stays within its limit."""
        return all(nbytes <= self.room_bytes.get(tier, 0) for tier, nbytes in solution.timeline.tier_bytes.items())


def limit_of(budget_bytes: int) -> int:
    """Most memory that a plan for this budget may be predicted to need."""
    return budget_bytes - -(-budget_bytes * _RESERVE_PERCENT // 100)


def smallest_budget(peak_bytes: int) -> int:
    """The smallest whole number of MiB, in bytes, that a plan with this peak fits into."""
    return -(-peak_bytes * 100 // ((100 - _RESERVE_PERCENT) * _MIB)) * _MIB


class Choices:
    """The placements that a problem allows for each unit.

    Attributes:
        tiers: Placements that move what a unit saves.
        recomputes: Placements that recompute a block.
        options: All placements, ``keep`` first.
        units: Units that save something, in the order of forward.
        blocks: What can be recomputed.
        members: Block -> the units that lie in it.
    """

    def __init__(self, problem: Problem):
        footprint = problem.footprint
        self._blocks_of = footprint.units
        self.tiers = [one for one in (Placement.RAM, Placement.SSD) if one.value in problem.channels]
        # A set would go through them in another order in every process, and find another plan.
        self.blocks = list(dict.fromkeys(span.name for span in footprint.recomputable))
        self._recomputable = frozenset(self.blocks)
        self.recomputes: list[Placement] = []
        if problem.may_recompute and self.blocks:
            self.recomputes = [Placement.RECOMPUTE, *(_RECOMPUTES[tier.value] for tier in self.tiers)]
        self.options = [Placement.KEEP, *self.tiers, *self.recomputes]
        first: dict[str, int] = {}
        for one in footprint.saved:
            first.setdefault(one.unit, one.packed)
        self.units = sorted(first, key=first.__getitem__)
        self.members: dict[str, list[str]] = {block: [] for block in self.blocks}
        for unit in self.units:
            block = self._blocks_of[unit]
            if block in self.members:
                self.members[block].append(unit)

    def uniform(self, placement: Placement) -> Placements:
        """Every unit placed alike."""
        return self.place(dict.fromkeys(self.units, placement))

    def place(self, wanted: Placements) -> Placements:
        """A placement for every unit: a block is recomputed as a whole, and nothing outside of blocks is."""
        chosen = dict.fromkeys(self._blocks_of, Placement.KEEP)
        recomputed: dict[str, Placement] = {}
        for unit, placement in wanted.items():
            block = self._blocks_of[unit]
            if placement.recomputes and block in self._recomputable:
                recomputed[block] = placement
                continue
            recomputed.pop(unit, None)
            chosen[unit] = placement.in_full
        for block, placement in recomputed.items():
            chosen |= dict.fromkeys((block, *self.members[block]), placement)
        return chosen

    def moves(self) -> list[tuple[str, Placement]]:
        """Every single choice there is."""
        stays = (Placement.KEEP, *self.tiers)
        found = [(unit, placement) for unit in self.units for placement in stays]
        return found + [(block, placement) for block in self.blocks for placement in self.recomputes]

    def changed(self, placements: Placements, unit: str, placement: Placement) -> Placements:
        """``placements``, which :meth:`place` has made, with one unit, or one block as a whole, placed otherwise."""
        block = self._blocks_of[unit]
        wanted = dict(placements)
        before = Placement.KEEP if block is None else placements[block]
        if not (before.recomputes or placement.recomputes):
            wanted[unit] = placement
            return wanted
        if block is not None and not placement.recomputes:
            # One part of a recomputed block cannot be moved alone: the block is taken apart.
            wanted |= dict.fromkeys([block, *self.members.get(block, ())], placement)
        wanted[unit] = placement
        return self.place(wanted)
