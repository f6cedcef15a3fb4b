"""The question that a placement answers: what may be placed where, within which limits, and what an answer is worth."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from hf_offload.plan import rules
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.plan import Keeping, Placement, Plan
from hf_offload.plan.simulate import simulate
from hf_offload.plan.timeline import Channel, Timeline, Windows

Placements = Mapping[str, Placement]

# What a plan cannot count on: memory that kernels take for a while, and what differs between two steps.
_RESERVE_PERCENT = 3
_MIB = 1 << 20

_RECOMPUTES = {"ram": Placement.RECOMPUTE_RAM, "ssd": Placement.RECOMPUTE_SSD}

# Windows to try, widest first: records of average size that backward may have ahead, and that may be on their way out.
_WINDOWS: tuple[tuple[int, int | None], ...] = (
    (rules.WINDOW_RECORDS, None),
    (rules.WINDOW_RECORDS, 16),
    (3, 4),
    (1, 2),
    (1, 0),
)


@dataclasses.dataclass(frozen=True)
class Solution:
    """A placement of every unit, and its simulated step."""

    placements: Placements
    windows: Windows
    timeline: Timeline

    @property
    def objective(self) -> tuple[float, int]:
        """Less is better: time, and among steps that differ by less than a ten-thousandth, bytes moved."""
        return (round(self.timeline.step_s, 4), self.timeline.moved_bytes)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be placed, and within which limits.

    Attributes:
        footprint: The step.
        channels: Tiers that may be used, with their bandwidths.
        room_bytes: Most bytes that may lie in each of those tiers.
        budget_bytes: Most memory at any time, weights and optimizer state included. A small share of it is left free.
        windows: How far to read ahead and write behind, widest first.
        may_recompute: Whether blocks may be recomputed in backward.
    """

    footprint: Footprint
    channels: Mapping[str, Channel]
    room_bytes: Mapping[str, int]
    budget_bytes: int
    windows: Sequence[Windows]
    may_recompute: bool = True

    @property
    def limit_bytes(self) -> int:
        """Most memory that a plan may be predicted to need."""
        return limit_of(self.budget_bytes)

    @functools.cached_property
    def least_bytes(self) -> int:
        """What a step needs wherever its activations are."""
        footprint = self.footprint
        alive = int(footprint.least_live_bytes.max())
        return footprint.base_bytes + max(alive, footprint.gradient_bytes + footprint.optimizer_step_bytes)

    @property
    def may_fit(self) -> bool:
        """Whether anything could fit if no activations were in memory."""
        return min(self.room_bytes.values(), default=0) >= 0 and self.least_bytes <= self.limit_bytes

    @functools.cached_property
    def kept(self) -> Solution:
        """All activations stay, whether they fit or not."""
        return self.play(dict.fromkeys(self.footprint.units, Placement.KEEP), self.windows[0])

    def play(self, placements: Placements, windows: Windows) -> Solution:
        """Simulate a placement of every unit."""
        return Solution(placements, windows, simulate(self.footprint, placements, self.channels, windows))

    def is_within_memory(self, solution: Solution) -> bool:
        """Whether memory stays within its limit, even where a tier stops writing for a while."""
        return solution.timeline.must_fit_bytes <= self.limit_bytes

    def has_room(self, solution: Solution) -> bool:
        """Whether every tier stays within its limit."""
        return all(nbytes <= self.room_bytes.get(tier, 0) for tier, nbytes in solution.timeline.tier_bytes.items())

    def fits(self, solution: Solution) -> bool:
        """Whether memory and every tier stay within their limits."""
        return self.is_within_memory(solution) and self.has_room(solution)

    def over(self, solution: Solution) -> dict[str, int]:
        """What does not fit, memory or tiers, and by how many bytes its budget or room is too small."""
        short = smallest_budget(solution.timeline.must_fit_bytes) - self.budget_bytes
        memory = {} if self.is_within_memory(solution) else {"memory": short}
        tiers = {tier: nbytes - self.room_bytes.get(tier, 0) for tier, nbytes in solution.timeline.tier_bytes.items()}
        return memory | {tier: nbytes for tier, nbytes in tiers.items() if nbytes > 0}


def limit_of(budget_bytes: int) -> int:
    """Most memory that a plan for this budget may be predicted to need."""
    return budget_bytes - -(-budget_bytes * _RESERVE_PERCENT // 100)


def smallest_budget(peak_bytes: int) -> int:
    """The smallest whole number of MiB, in bytes, that a plan with this peak fits into."""
    return -(-peak_bytes * 100 // ((100 - _RESERVE_PERCENT) * _MIB)) * _MIB


def make_problem(footprint: Footprint, hardware: Hardware, budget_bytes: int, *, may_recompute: bool = True) -> Problem:
    """What :func:`~hf_offload.plan.search.solve` takes, of a footprint on a machine."""
    return Problem(
        footprint=footprint.plain,
        channels=hardware.channels,
        room_bytes=hardware.room,
        budget_bytes=budget_bytes,
        windows=windows_for(footprint),
        may_recompute=may_recompute,
    )


def windows_for(footprint: Footprint) -> tuple[Windows, ...]:
    """Windows to try, widest first."""
    saved_bytes, most = sum(one.nbytes for one in footprint.saved), rules.WRITE_BEHIND_BYTES

    def bytes_of(records: int | None) -> int:
        return most if records is None else rules.window_bytes(saved_bytes, len(footprint.saved), records)

    return tuple(dict.fromkeys(Windows(bytes_of(ahead), min(bytes_of(behind), most)) for ahead, behind in _WINDOWS))


class Choices:
    """The placements that a problem allows for each unit.

    Attributes:
        options: All placements, ``keep`` first.
        units: Units that save something, in the order of forward.
    """

    def __init__(self, problem: Problem):
        footprint = problem.footprint
        self._blocks_of = footprint.units
        tiers = [one for one in (Placement.RAM, Placement.SSD) if one.value in problem.channels]
        self.options = [Placement.KEEP, *tiers]
        if problem.may_recompute and footprint.recomputable:
            self.options += [Placement.RECOMPUTE, *(_RECOMPUTES[tier.value] for tier in tiers)]
        first: dict[str, int] = {}
        for one in footprint.saved:
            first.setdefault(one.unit, one.packed)
        self.units = sorted(first, key=first.__getitem__)
        self._members: dict[str | None, list[str]] = {span.name: [span.name] for span in footprint.recomputable}
        for unit in self.units:
            if (block := self._blocks_of[unit]) in self._members:
                self._members[block].append(unit)
        seconds_per_byte = {
            span.name: footprint.recompute_costs[span.name][0]
            / max(1, sum(footprint.saved_bytes[unit] for unit in self._members[span.name]))
            for span in footprint.recomputable
        }
        # Equal blocks differ by the clock, and stay in the order of forward: two digits count.
        self._cheapest_first = sorted(
            self.units, key=lambda unit: float(f"{seconds_per_byte.get(self._blocks_of[unit] or '', math.inf):.1e}")
        )

    def first(self, count: int, placement: Placement) -> Placements:
        """The first ``count`` units placed so, and all others kept: the first in forward, or for recompute those that free
        the most bytes for each second. A block is recomputed as a whole; units that cannot be recomputed go where the inputs
        of recomputed blocks go.
        """
        chosen = dict.fromkeys(self._blocks_of, Placement.KEEP)
        for unit in (self._cheapest_first if placement is Placement.RECOMPUTE else self.units)[:count]:
            block = self._blocks_of[unit]
            if placement.recomputes and block in self._members:
                chosen |= dict.fromkeys(self._members[block], placement)
            else:
                chosen[unit] = placement.in_full
        return chosen

    def uniform(self, placement: Placement) -> Placements:
        """Every unit placed alike."""
        return self.first(len(self.units), placement)


def plan_of(problem: Problem, solution: Solution, like: Plan, reason: str) -> Plan:
    """The engine's plan for a solution. What it does not set is as in ``like``, and so is the placement of units that saved
    nothing when the footprint was taken: a layer may be skipped in one step and run in the next.
    """
    saved = problem.footprint.saved_bytes
    return dataclasses.replace(
        like,
        placements={unit: one for unit, one in solution.placements.items() if saved[unit] or one.recomputes},
        read_ahead_bytes=solution.windows.read_ahead_bytes,
        write_behind_bytes=solution.windows.write_behind_bytes,
        keeping=_keeping(problem, solution),
        reason=reason,
    )


def _keeping(problem: Problem, solution: Solution) -> Keeping | None:
    footprint, timeline = problem.footprint, solution.timeline
    needed = timeline.must_fit_bytes if footprint.skipped_blocks else timeline.peak_bytes
    spare = max(0, problem.limit_bytes - needed)
    kept = {
        unit: 0 if one.recomputes else footprint.saved_bytes[unit]
        for unit, one in solution.placements.items()
        if one.tier is None
    }
    if spare > sum(footprint.saved_bytes.values()) and all(
        one is Placement.KEEP for one in solution.placements.values()
    ):
        return None  # a run that would fit with twice as much is left alone
    for span in footprint.blocks:
        if span.name in kept and solution.placements[span.name].recomputes:
            kept[span.name] += span.boundary_bytes
    return Keeping(kept, spare, timeline.resident_bytes + spare)
