"""Making plans of measured steps, and letting weights, gradients and optimizer state be where these plans have them."""

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping

from torch import nn

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.plan import Plan
from hf_offload.plan.state_placement import Allowed
from hf_offload.plan.timeline import Windows
from hf_offload.planning.batch_shape import BatchShape
from hf_offload.planning.measuring import StepMeter
from hf_offload.planning.model_state import ModelState
from hf_offload.planning.shape_plan import (
    ShapePlan,
    Terms,
    planned,
    planned_over_budget,
    repeats_elementwise,
    say,
    windows_to_move_all,
    windows_to_reduce,
)
from hf_offload.planning.shapes import Shapes
from hf_offload.planning.step_time import Overhead
from hf_offload.ranks import Ranks

# Each is followed by a measured step.
_MOST_CHANGES = 4


@dataclasses.dataclass
class MicroBatch:
    """A micro-batch of the running step.

    Attributes:
        plan: What it runs under; None where everything moves.
        is_measured: Whether it is.
        metered: Which of the meter's it is.
    """

    shape: BatchShape
    plan: ShapePlan | None
    is_measured: bool = False
    metered: int | None = None


class PlanMaker:
    """Makes plans for what is where, and moves weights and state where a plan has them. It does not keep the model.

    All processes go the same way, where some cannot move what others can, too: that of the first one.

    Attributes:
        most_demanding: Of all micro-batches that were measured, the one that needs most: weights and state are where its plan
            has them.
        has_planned: Whether a whole step has had plans.
        windows: Of the next step that is measured, where nothing is known; None for those of the first step.
        recomputes_elementwise: Whether all blocks recompute their elementwise operations.
    """

    def __init__(
        self,
        model: nn.Module,
        budget_bytes: int,
        hardware: Hardware,
        *,
        shapes: Shapes,
        safest: Plan,
        model_state: ModelState,
        overhead: Overhead,
        on_infeasible: Callable[[], bool],
        may_reduce: Callable[[], bool],
        ranks: Ranks,
    ):
        self._model_ref = weakref.ref(model)
        self._budget_bytes = budget_bytes
        self._hardware = hardware
        self._shapes = shapes
        self._safest = safest
        self._state = model_state
        self._overhead = overhead
        self._on_infeasible = on_infeasible
        self._may_reduce = may_reduce  # whether any block has elementwise operations that it may recompute
        self._ranks = ranks
        self._changes = 0
        self._refusals: dict[BatchShape, OffloadPlanError] = {}  # before there was a plan
        self.has_planned = self._has_warned = self.recomputes_elementwise = False
        self.most_demanding: BatchShape | None = None
        self.windows: Windows | None = None

    @property
    def _model(self) -> nn.Module:
        model = self._model_ref()
        assert model is not None, "a step has a model"
        return model

    # -- what plans are made for --------------------------------------------------------------------------------------

    @property
    def terms(self) -> Terms:
        """Of the present: with the rates that tiers have reached, and what may still be moved."""
        return Terms(self._budget_bytes, self._overhead.on(self._hardware), self._allowed, self._ranks)

    def terms_for(self, shape: BatchShape) -> Terms:
        """The same for a micro-batch, for whose sake nothing may be moved where another one needs more."""
        terms = self.terms
        if self.may_decide(shape):
            return terms
        return dataclasses.replace(terms, allowed=dataclasses.replace(terms.allowed, must_stay=True))

    def may_decide(self, shape: BatchShape) -> bool:
        """Whether weights and state are where its plan has them. One that needs less than another would take the room for
        them that the other one needs, and each of both would move what the other has moved.
        """
        return self.most_demanding is None or shape.demand >= self.most_demanding.demand

    @property
    def _allowed(self) -> Allowed:
        """What a plan may do with them: once they have been moved several times, or a step did not fit, nothing any more, but
        let state stay again that has left for a step.
        """
        allowed = self._state.allowed
        if self._changes < _MOST_CHANGES:
            return allowed
        return dataclasses.replace(
            allowed, state=allowed.state if self._state.left_for_a_step else "none", weights="none"
        )

    def on_infeasible(self) -> bool:
        """No plan fits, or a measured step did not: let the model need less memory; whether that was possible."""
        before = self._state.state_placement
        has_changed = any(self._ranks.gather(self._on_infeasible()))
        if self._state.state_placement != before:
            self._changes = _MOST_CHANGES  # nothing goes back to where it did not fit
        return has_changed

    # -- plans of measured steps --------------------------------------------------------------------------------------

    def footprint(self, meter: StepMeter, micro_batch: MicroBatch) -> Footprint:
        """What was measured of a micro-batch, of the process that saved the most."""
        assert micro_batch.metered is not None, "it was measured"
        found = self._ranks.largest(meter.footprint(micro_batch.metered), lambda one: sum(one.saved_bytes.values()))
        return self._state.with_weights(self._model, dataclasses.replace(found, is_reduced=self.recomputes_elementwise))

    def make(self, micro_batches: Mapping[BatchShape, MicroBatch], meter: StepMeter) -> list[ShapePlan]:
        """Plans for measured micro-batches. None where there is something else in memory now: the next step is measured then.
        Where one begins as another, one plan is enough for both.

        Raises :class:`~hf_offload.errors.OffloadPlanError` if the budget is too small for the first plan of the run.
        """
        needed = [
            one for one in micro_batches if not any(other != one and one.begins(other) for other in micro_batches)
        ]
        in_order = sorted(needed, key=lambda shape: shape.demand, reverse=True)
        steps = {shape: self.footprint(meter, micro_batches[shape]) for shape in in_order}
        plans: list[ShapePlan] = []
        refused: dict[BatchShape, OffloadPlanError] = {}
        for shape, footprint in steps.items():
            try:
                plan, has_moved = self._make_one(shape, footprint)
            except OffloadPlanError as error:
                refused[shape] = error
                continue
            if has_moved:
                return []
            plans += [] if plan is None else [plan]
        if refused and not self._may_exceed(refused):
            return []
        plans += [planned_over_budget(one, steps[one], self.terms) for one in refused]
        self.has_planned = self.has_planned or len(plans) == len(needed)
        return plans

    def _may_exceed(self, refused: Mapping[BatchShape, OffloadPlanError]) -> bool:
        """No plan fits these. Whether they run all the same, over the budget: not if the model was changed instead.

        Raises :class:`~hf_offload.errors.OffloadPlanError` if no whole step had plans before.
        """
        # A step that was measured again may have been a smaller one than the one that was refused before it.
        self._refusals = {**({} if self.has_planned else self._refusals), **refused}
        most, refusal = max(self._refusals.items(), key=lambda one: one[1].smallest_bytes or 0)
        if self.on_infeasible():
            self.measure_again(str(refusal))
            return False
        if not self.has_planned:
            text = f"{refusal} That is for batches with {most.largest_input}: larger ones need more."
            raise OffloadPlanError(text, refusal.smallest_bytes)
        say(
            self._ranks,
            logging.INFO if self._has_warned else logging.WARNING,
            "Batches with %s do not fit the budget, which had room for those before. They run under the plan that needs "
            "the least memory, and may exceed the budget. %s",
            most.largest_input,
            refusal,
        )
        self._has_warned = True
        return True

    def _make_one(self, shape: BatchShape, footprint: Footprint) -> tuple[ShapePlan | None, bool]:
        """The plan for a micro-batch that was measured, or None; and whether there is something else in memory now, so that
        it has to be measured again.
        """
        may_decide = self.may_decide(shape)
        if may_decide:
            self.most_demanding = shape
        if repeats_elementwise(footprint, self.terms) and self._reduce(footprint, within_room=True):
            return None, True
        if not may_decide:
            with contextlib.suppress(OffloadPlanError):
                return self._in_place(lambda: planned(shape, footprint, self.terms_for(shape)))
        try:
            return self._in_place(lambda: planned(shape, footprint, self.terms))
        except OffloadPlanError:
            if self._reduce(footprint, within_room=False):
                return None, True
            raise

    def _reduce(self, usual: Footprint, *, within_room: bool) -> bool:
        """Recompute elementwise operations from now on; whether that is new, and can be measured within the budget."""
        if self.recomputes_elementwise or not self._may_reduce():
            return False
        windows = windows_to_reduce(usual, self.terms, self._safest, within_room=within_room)
        if windows is None:
            return False
        self.recomputes_elementwise = True
        self.measure_again("Elementwise operations are recomputed from now on.")
        self.windows = windows
        return True

    # -- plans that are renewed ---------------------------------------------------------------------------------------

    def correct(self, plan: ShapePlan, peak_bytes: int) -> tuple[ShapePlan | None, bool]:
        """Another plan where that is better by now, if there is one; and whether weights or state were moved for it."""
        return self._in_place(lambda: plan.corrected(peak_bytes, self.terms_for(plan.shape)))

    def _in_place(self, find: Callable[[], ShapePlan | None]) -> tuple[ShapePlan | None, bool]:
        """The plan that is found, and whether weights or state had to be moved for one: what was measured is then of a run
        that had something else in memory, and the next step is measured.
        """
        while True:
            plan = find()
            if plan is None:
                return None, False
            is_there = self._ranks.gather(plan.state_placement == self._state.state_placement)[0]
            if any(self._ranks.gather(self._state.place(self._model, plan.state_placement))):
                break
            if is_there:
                return plan, False
            self._changes += 1
        self._changes += 1
        self.measure_again(f"The plan: {plan.reason}.")
        # Everything moves in the step that is measured, and it is to be within the budget, too.
        self.windows = windows_to_move_all(plan.problem, self._safest) or plan.problem.windows[-1]
        return None, True

    def measure_again(self, why: str) -> None:
        """What is known is of a run that had other weights and state in memory, or was computed in another way."""
        self._shapes.forget()
        self.windows = None
        say(self._ranks, logging.INFO, "Measuring again, with something else in memory. %s", why)
