"""Steps that are measured with recompute of elementwise operations: a plan that has it is predicted from one without and one
with it.
"""

import dataclasses
import logging
from collections.abc import Callable

from hf_offload.plan.choosing import everything_stays, may_hold
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.holding import IN_MEMORY
from hf_offload.plan.places import problem_of
from hf_offload.plan.plan import Plan
from hf_offload.plan.timeline import Windows
from hf_offload.planning.correcting import say
from hf_offload.planning.known import Terms
from hf_offload.planning.moved import moving_all, windows_to_move_all
from hf_offload.planning.situation import Situation


class Elementwise:
    """Which situations are measured so next, and what was measured without. ``possible``: whether any block has such
    operations.
    """

    def __init__(self, safest: Plan, possible: Callable[[], bool]):
        self._safest = safest
        self._possible = possible
        self._next: dict[Situation, tuple[Footprint, Windows]] = {}
        self._refused: set[Situation] = set()

    def pays(self, footprint: Footprint, terms: Terms) -> bool:
        """Whether a plan of this step has it as a rule, and it was not measured so: something has to leave memory that is
        fast.
        """
        return terms.ranks.first(
            lambda: (
                footprint.elementwise is None
                and terms.hardware.repeats_elementwise
                and not everything_stays(footprint, terms.hardware, terms.budget_bytes, terms.allowed)
            )
        )

    def may_help(self, footprint: Footprint, terms: Terms) -> bool:
        """Whether anything could fit with it where nothing does without, and it was not measured so."""
        is_alone = footprint.elementwise is None
        return terms.ranks.first(
            lambda: is_alone and may_hold(footprint, terms.hardware, terms.budget_bytes, terms.allowed)
        )

    def measure(self, situation: Situation, usual: Footprint, terms: Terms, *, within_room: bool = True) -> bool:
        """Measure the next step of ``situation`` so, of which ``usual`` was measured; whether there is anything to recompute,
        and everything that moves, and what one unit recomputes, is within the budget, and of tiers if it is to be
        ``within_room``.
        """
        if situation in self._refused or not self._possible():
            return False
        held = terms.allowed.now or IN_MEMORY
        problem = problem_of(usual, terms.hardware, terms.budget_bytes, held, terms.allowed)
        windows = windows_to_move_all(problem, self._safest, _most_recomputed_bytes(usual), within_room=within_room)
        if windows is None:
            return False
        self._next[situation] = usual, windows
        say(terms.ranks, logging.INFO, "Measuring a step in which elementwise operations are recomputed.")
        return True

    def plan(self, situation: Situation) -> Plan | None:
        """Under which a micro-batch that begins as ``situation`` is measured so; None if it is not its turn."""
        turn = (windows for one, (_, windows) in self._next.items() if situation.begins(one))
        windows = next(turn, None)
        return None if windows is None else dataclasses.replace(moving_all(self._safest, windows), elementwise=True)

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
