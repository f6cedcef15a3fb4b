"""Micro-batches whose graph backward walks more than once, as gradient penalties have it (retain_graph, create_graph).

How long a tensor is needed in one is known only of the plan under which one was measured: what can be moved is moved, all of
it or nothing. So they have plans of their own, for which a step with such a graph is waited for.
"""

import logging

from hf_offload.plan.footprint import Footprint
from hf_offload.plan.plan import Plan
from hf_offload.plan.planner import windows_for
from hf_offload.plan.timeline import Windows
from hf_offload.planning.correcting import say
from hf_offload.planning.known import (
    Known,
    Terms,
    check_as_measured,
    known_as_measured,
    known_if_kept,
    written_if_moved,
)
from hf_offload.planning.moved import moving_all
from hf_offload.planning.situation import Situation
from hf_offload.settings.sizes import format_bytes

# A gradient penalty comes every sixteenth step or more often, where it comes again at all.
_MOST_WITHOUT_GRAPH = 32


class WalkedGraphs:
    """In which situations backward makes a graph of itself, though not in every step, and how such a step is measured."""

    def __init__(self, safest: Plan):
        self._safest = safest
        self._awaited: dict[Situation, int] = {}  # how many steps to wait for one that does
        self._narrow: dict[Situation, Plan] = {}
        self._not_awaited: set[Situation] = set()  # since waiting writes more than a step may

    def await_one(self, situation: Situation, windows: Windows) -> None:
        """Backward has made one in ``situation``: wait for another, moving everything with the narrowest ``windows``."""
        self._awaited[situation] = _MOST_WITHOUT_GRAPH
        self._narrow[situation] = moving_all(self._safest, windows)

    def may_await(self, situation: Situation) -> bool:
        """Whether such a step may be waited for."""
        return situation not in self._not_awaited

    def awaits(self, situation: Situation) -> bool:
        """Whether its backward may make one."""
        return self._awaited.get(situation, 0) > 0

    def plan(self, situation: Situation, otherwise: Plan) -> Plan:
        """That under which ``situation`` is measured."""
        return self._narrow.get(situation, otherwise)

    def goes_on_waiting(self, situation: Situation, footprint: Footprint, terms: Terms) -> bool:
        """A step was measured in which backward made none: whether the next one is to be measured, too.

        All is moved in every one until then: if that writes more than a step may, there is no waiting, which is said.
        """
        if not self.awaits(situation):
            return False
        self._awaited[situation] -= 1
        limit = terms.allowed.written_bytes
        if limit is None or written_if_moved(footprint, self._safest) <= limit:
            return True
        self._awaited[situation] = 0
        self._not_awaited.add(situation)
        say(
            terms.ranks,
            logging.WARNING,
            "Steps in which backward makes a graph of itself may take more than the budget of %s: they are planned once one "
            "has been measured with everything moved, which max_step_write_bytes of %s does not let them wait for. Set "
            "memory_budget to what such a step takes in memory, or a larger max_step_write_bytes.",
            format_bytes(terms.budget_bytes),
            format_bytes(limit),
        )
        return False

    def find_known(
        self, situation: Situation, footprint: Footprint, terms: Terms, plan: Plan, peak_bytes: int
    ) -> Known | None:
        """The plan for a micro-batch that walked one, measured under ``plan`` with this peak; None if it has to be measured
        again, with the narrowest windows.

        Raises :class:`~hf_offload.errors.OffloadPlanError` if it needed more than the budget, or wrote more to drives than
        a step may.
        """
        known = known_if_kept(situation, footprint, terms, plan)
        if known is not None:
            return known
        limit = terms.allowed.written_bytes
        if situation not in self._narrow and (limit is None or written_if_moved(footprint, plan) <= limit):
            # What it needs then does not depend on how fast the tier is at the moment.
            self._narrow[situation] = moving_all(self._safest, windows_for(footprint)[-1])
            return None
        check_as_measured(footprint, terms, plan, peak_bytes)
        return known_as_measured(situation, footprint, terms, plan, peak_bytes)
