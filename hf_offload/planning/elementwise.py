"""Steps that are measured with recompute of elementwise operations: a plan that has it is predicted from one without and one
with it.
"""

import dataclasses
from collections.abc import Callable

from hf_offload.plan.footprint import Footprint
from hf_offload.plan.plan import Plan
from hf_offload.plan.problem import Problem
from hf_offload.plan.timeline import Windows
from hf_offload.planning.moved import moving_all, windows_to_move_all
from hf_offload.planning.situation import Situation


class Elementwise:
    """Which situations are measured so next, and what was measured without. ``possible``: whether any block has such
    operations.
    """

    def __init__(self, possible: Callable[[], bool]):
        self._possible = possible
        self._next: dict[Situation, tuple[Footprint, Windows]] = {}
        self._refused: set[Situation] = set()

    def measure(
        self, situation: Situation, usual: Footprint, problem: Problem, safest: Plan, *, within_room: bool
    ) -> bool:
        """Measure the next step of ``situation`` so, of which ``usual`` was measured; whether everything that moves as in
        ``safest``, and what one unit recomputes, is within the budget of its ``problem``, and of tiers if it is to be
        ``within_room``.
        """
        if situation in self._refused or not self._possible():
            return False
        windows = windows_to_move_all(problem, safest, _most_recomputed_bytes(usual), within_room=within_room)
        if windows is not None:
            self._next[situation] = usual, windows
        return windows is not None

    def plan(self, situation: Situation, safest: Plan) -> Plan | None:
        """Under which a micro-batch that begins as ``situation`` is measured so; None if it is not its turn."""
        turn = (windows for one, (_, windows) in self._next.items() if situation.begins(one))
        windows = next(turn, None)
        return None if windows is None else dataclasses.replace(moving_all(safest, windows), elementwise=True)

    def joined(self, situation: Situation, measured: Footprint) -> Footprint | None:
        """The step of ``situation`` that was measured before, with this one, which was measured so. None if it began as one
        that was to be measured, and went on as another one, of which nothing is known: that is not tried again.
        """
        usual, _ = self._next.pop(situation, (None, None))
        if usual is None:
            begun = [one for one in self._next if situation.begins(one) or one.begins(situation)]
            self._refused.update(begun)
            for one in begun:
                del self._next[one]
        return None if usual is None else dataclasses.replace(usual, elementwise=measured)

    def forget(self) -> None:
        """What was measured is of a run that had something else in memory."""
        self._next.clear()
        self._refused.clear()


def _most_recomputed_bytes(footprint: Footprint) -> int:
    """What is recomputed of a unit is what it would have saved."""
    return max((footprint.saved_bytes[unit] for unit, block in footprint.units.items() if block is not None), default=0)
