"""Steps that no plan is made for: backward walks a graph more than once, or several threads share them."""

import dataclasses
import logging
from collections.abc import Mapping

from hf_offload.plan.footprint import Footprint
from hf_offload.plan.plan import Plan
from hf_offload.planning.batch_shape import BatchShape
from hf_offload.planning.shape_plan import ShapePlan, Terms, check_writes, planned_if_kept, say
from hf_offload.ranks import Ranks
from hf_offload.settings.sizes import format_bytes

_WALKS = "Backward walks a graph more than once (retain_graph, create_graph)"
_SHARES = "Several threads run forwards or backwards of one step"


class Unplanned:
    """Notes what steps have shown that plans are not made for, which is all but one forward at a time whose graph is walked
    once, and ends planning for it.

    Attributes:
        is_on: Whether no plans are made any more, and everything moves.
        walks: Whether a graph was walked again under a plan for steps that do not; a measured step says what becomes of it.
        shares: Whether several threads have shared a step.
    """

    def __init__(self, safest: Plan, ranks: Ranks):
        self._safest = safest
        self._ranks = ranks
        self._walks_now = False
        self.is_on = self.walks = self.shares = False

    def allow_threads(self, plan: Plan) -> bool:
        """A forward begins while another thread runs one under ``plan``; whether it can: not if blocks recompute."""
        if plan.elementwise or any(one.recomputes for one in plan.placements.values()):
            return False
        self.shares = True
        return True

    def see(self, walks: bool, shares: bool) -> bool:
        """What a measured step has shown in any process; whether it or an earlier one is none that a plan is made for."""
        all_walk, all_share = zip(*self._ranks.gather((walks, self.shares or shares)), strict=True)
        self._walks_now, self.shares = any(all_walk), any(all_share)
        return self._walks_now or self.walks or self.shares

    def kept(self, footprints: Mapping[BatchShape, Footprint], terms: Terms) -> list[ShapePlan]:
        """Plans that keep everything of the micro-batches of that step. There are none if one of them may not fit, and if
        another step has walked a graph again or several threads share it: what that needs is not known.

        Raises :class:`~hf_offload.errors.OffloadPlanError` where everything moves instead, and more is written to drives for
        that than a step may write.
        """
        found = [planned_if_kept(one, footprint, terms, self._safest) for one, footprint in footprints.items()]
        plans = [plan for plan in found if plan is not None]
        if len(plans) == len(found) and self._walks_now and not self.shares:
            self.walks = False
            return plans
        check_writes(footprints.values(), terms, self._safest)
        return []

    def begin(self, budget_bytes: int, peak_bytes: int | None) -> Plan:
        """Plan nothing any more: everything moves, under the plan that this returns."""
        self.is_on = True
        why = _SHARES if self.shares else _WALKS
        measured = "" if peak_bytes is None else f": {format_bytes(peak_bytes)} in a measured step"
        say(
            self._ranks,
            logging.WARNING,
            "%s: such steps are not planned. Everything moves from now on, whether it fits the budget of %s or not%s.",
            why,
            format_bytes(budget_bytes),
            measured,
        )
        return dataclasses.replace(self._safest, reason=f"{why}: everything moves")
