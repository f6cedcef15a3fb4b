"""Finding out what recompute of elementwise operations is worth: two more measured steps, one with it and one without.

The first step of a run is a cold one, so both are measured again, one right after the other. Where nothing fits without it,
one step is enough.

How much memory such a step needs is not known before: as much as it would need without, and what one unit recomputes. It is
measured only if that fits the budget.
"""

import dataclasses
from collections.abc import Callable, Iterable

from hf_offload.plan.footprint import Footprint
from hf_offload.plan.plan import Plan
from hf_offload.plan.problem import Problem
from hf_offload.plan.timeline import Windows
from hf_offload.planning.moved import moving_all, windows_to_move_all
from hf_offload.planning.situation import Situation

_MOST_TRIALS = 8
"""Of a run: batches of ever new shapes are not all worth two measured steps."""


@dataclasses.dataclass
class _Found:
    """What has been measured: ``reduced`` with all blocks doing it, under ``windows``, ``plain`` with none."""

    windows: Windows
    reduced: Footprint | None = None
    plain: Footprint | None = None


class Trial:
    """Which situations are measured with recompute of elementwise operations, and what was found of those that were."""

    def __init__(self, blocks: Iterable[str], possible: Callable[[], bool]):
        self._blocks = tuple(blocks)
        self._possible = possible
        self._running: dict[Situation, _Found] = {}
        self._over: dict[Situation, Footprint | None] = {}
        self._left = _MOST_TRIALS

    def begin(self, situation: Situation, problem: Problem, safest: Plan, plain: Footprint | None = None) -> bool:
        """Measure the next steps of ``situation`` for it, with ``plain`` only one; whether that is of any use, and within the
        budget of its ``problem`` if what can be moved is moved as in ``safest``.
        """
        if self._left <= 0 or situation in self._running or situation in self._over or not self._possible():
            return False
        more = _most_recomputed_bytes(problem.footprint)
        # Where nothing fits without it, it may be for want of room.
        windows = windows_to_move_all(problem, safest, more, within_room=plain is None)
        if windows is None:
            return False
        self._left -= 1
        self._running[situation] = _Found(windows, plain=plain)
        return True

    def wants(self, situation: Situation) -> bool:
        """Whether a micro-batch that begins as ``situation`` is to be measured."""
        return any(situation.begins(one) for one in self._running)

    def plan(self, situation: Situation, plan: Plan) -> Plan:
        """``plan``, under which the micro-batch is measured, with all blocks doing it if it is their turn."""
        turn = (found for one, found in self._running.items() if situation.begins(one) and found.reduced is None)
        found = next(turn, None)
        if found is None:
            return plan
        placements = {**plan.placements, **{name: plan.placement(name).with_elementwise for name in self._blocks}}
        return dataclasses.replace(moving_all(plan, found.windows), placements=placements)

    def joined(self, situation: Situation, measured: Footprint) -> Footprint | None:
        """What was measured of ``situation``, with the choice if it is known; None where another step is to be measured."""
        found = self._running.get(situation)
        if found is None:
            return dataclasses.replace(measured, elementwise=self._over.get(situation))
        if found.reduced is None:
            found.reduced = measured
            if found.plain is None:
                return None
        else:
            found.plain = measured
        del self._running[situation]
        self._over[situation] = found.reduced
        return dataclasses.replace(found.plain, elementwise=found.reduced)

    def give_up(self, situation: Situation) -> None:
        """Measure no step of ``situation`` for it any more."""
        for one in [one for one in self._running if situation.begins(one)]:
            del self._running[one]
            self._over[one] = None

    def forget(self) -> None:
        """What was measured is of a run that had something else in memory."""
        self._running.clear()
        self._over.clear()


def _most_recomputed_bytes(footprint: Footprint) -> int:
    """What is recomputed of a unit is what it would have saved."""
    return max((footprint.saved_bytes[unit] for unit, block in footprint.units.items() if block is not None), default=0)
