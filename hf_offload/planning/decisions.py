"""Deciding about the plans of a running training: which one a micro-batch has, and what becomes of them after a step."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from hf_offload.engine.hooks import Engine
from hf_offload.errors import OffloadPlanError
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.plan import Plan
from hf_offload.plan.timeline import Windows
from hf_offload.planning.batch_shape import BatchShape
from hf_offload.planning.measuring import StepMeter
from hf_offload.planning.model_state import ModelState
from hf_offload.planning.plan_maker import MicroBatch, PlanMaker
from hf_offload.planning.shape_plan import ShapePlan, moving_all, not_behind, say, windows_to_move_all
from hf_offload.planning.shapes import Shapes
from hf_offload.planning.step_time import Overhead, Pace
from hf_offload.ranks import Ranks
from hf_offload.settings.sizes import format_bytes

# A smaller batch than one that was measured is measured itself when it has come so often in a row.
_LASTING = 3

_WALKS = "Backward walks a graph more than once (retain_graph, create_graph)"
_SHARES = "Several threads run forwards or backwards of one step"


class Decisions:
    """Decides about the plans of a running training, and keeps those that are known.

    Each batch shape goes through the stages of :class:`~hf_offload.planning.shapes.Stage`. The first time that it comes, it
    runs with everything moved, and is measured; a plan is made of what was measured. A smaller batch runs under the plan of a
    larger one, which it fits into, until it has come several times in a row and earns its own. The second step under each
    plan is measured, too: a peak over the budget is planned again with as much less. Where steps take longer or shorter than
    predicted, what was measured is planned again at their pace and with the rates that tiers have reached. Weights and state
    of the ``model_state`` are where the plan of the micro-batch that needs most has them, and others are planned around that;
    where a plan moves them, the next step is measured. Where anything has to leave, elementwise operations are recomputed
    from then on, on machines on which that pays, and on all where nothing fits otherwise: the next step is measured. Where no
    plan fits, ``on_infeasible`` is called to change the model so that it needs less; if it has, the next step is measured,
    too. If it has not, the run ends with an error, unless a whole step has had plans before: then what does not fit runs
    under the plan that needs the least memory, with a warning.

    Plans are made for one forward at a time, whose graph is walked once. Where a step shows something else, everything moves
    from then on.

    Several processes decide together, about the largest batch and the largest peak that any of them has, and have one plan.

    Attributes:
        budget_bytes: The smallest that any process has.
    """

    def __init__(
        self,
        model: nn.Module,
        budget_bytes: int,
        hardware: Hardware,
        *,
        safest: Plan,
        apply: Callable[[Plan], None],
        engine: Engine,
        model_state: ModelState,
        overhead: Overhead,
        on_infeasible: Callable[[], bool],
        ranks: Ranks,
        may_reduce: Callable[[], bool],
    ):
        self._ranks = ranks
        self.budget_bytes = min(ranks.gather(budget_bytes))
        self._safest = safest
        self._apply = apply
        self._engine = engine
        self._model_state = model_state
        self._shapes = Shapes()
        self._maker = PlanMaker(
            model,
            self.budget_bytes,
            hardware,
            shapes=self._shapes,
            safest=safest,
            model_state=model_state,
            overhead=overhead,
            on_infeasible=on_infeasible,
            may_reduce=may_reduce,
            ranks=ranks,
        )
        self._is_unplanned = self._walks = self._shares = False
        self._present = safest
        self._pace = Pace()
        self._last: BatchShape | None = None
        self._repeated = 0

    @property
    def planned(self) -> ShapePlan | None:
        """The plan of the last step, where its peak was predicted; None before the first one."""
        return self._shapes.latest

    # -- a micro-batch begins -----------------------------------------------------------------------------------------

    def begin(self, shape: BatchShape, state_bytes: int) -> MicroBatch:
        """Decide under which plan a micro-batch runs, with so many bytes of optimizer state, and apply it."""
        seen = self._ranks.gather((self._engine.made_graph(), self._shares, state_bytes))
        all_walk, all_share, all_state_bytes = zip(*seen, strict=True)
        self._walks = self._walks or any(all_walk)
        # Without a plan, a measured step says it when it ends, with its peak.
        if any(all_share) or (self._walks and self._shapes.in_force is not None):
            self._stop_planning(_SHARES if any(all_share) else _WALKS, "")
            return MicroBatch(shape, None)
        self._repeated = self._repeated + 1 if shape == self._last else 1
        self._last = shape
        plan = self._shapes.plan_for(shape)
        if plan is not None and max(all_state_bytes) > plan.footprint.state_bytes:
            # An optimizer has begun to step since, or holds more.
            self._shapes.outgrown(plan)
            plan = None
        lasting = self._repeated >= _LASTING and plan is not None and not plan.is_for(shape)
        if plan is None or lasting or self._shapes.is_wanted(shape):
            windows = self._make_room(shape) if plan is None else windows_to_move_all(plan.problem, self._safest)
            if plan is None or windows is not None:
                self._measure(self._safest if windows is None else moving_all(self._safest, windows))
                return MicroBatch(shape, None, is_measured=True)
            self._shapes.drop_wanted(shape)  # there is no room to measure it
        self._apply_plan(plan)
        return MicroBatch(shape, plan, is_measured=plan.is_for(shape) and self._shapes.is_to_be_checked(plan))

    def _make_room(self, shape: BatchShape) -> Windows | None:
        """For a step whose need is not known: the windows to measure it with, None for those of the first step."""
        plans, most = self._shapes.plans, self._maker.most_demanding
        if not plans:
            return self._maker.windows
        needs_more = most is None or shape.demand > most.demand
        if needs_more:
            self._model_state.let_few_stay(True)
        elif self._maker.windows is not None:
            return self._maker.windows
        # What is nearest to it says how much there may be on its way, but for what waits to be written.
        nearest = max(plans.values(), key=lambda one: one.shape.elements)
        return not_behind(
            windows_to_move_all(nearest.problem, self._safest) or nearest.problem.windows[-1], self._safest
        )

    def go_on(self, micro_batch: MicroBatch, shape: BatchShape) -> None:
        """The micro-batch has another forward, which the plan it runs under may not be made for."""
        micro_batch.shape = shape
        if micro_batch.plan is None:
            return
        plan = self._shapes.plan_for(shape)
        if plan is None:
            # Too late to measure all of it: what can be moved is moved from here on.
            self._shapes.want(shape)
            micro_batch.is_measured = False
        if plan is not micro_batch.plan:
            micro_batch.plan = plan
            self._apply_plan(plan)

    def _measure(self, plan: Plan) -> None:
        self._shapes.in_force = None
        self._set_plan(plan)

    def _apply_plan(self, plan: ShapePlan | None) -> None:
        if plan is not self._shapes.in_force:
            self._shapes.in_force = plan
            self._set_plan(self._safest if plan is None else plan.plan_like(self._safest))

    def _set_plan(self, plan: Plan) -> None:
        self._present = dataclasses.replace(plan, elementwise=self._maker.recomputes_elementwise)
        self._apply(self._present)

    # -- steps that no plan is made for -------------------------------------------------------------------------------

    def is_unplanned(self) -> bool:
        """Whether no plans are made any more, and everything moves."""
        return self._is_unplanned

    def allow_threads(self) -> bool:
        """A forward begins while another thread runs one, which ends planning; whether it can: not where blocks recompute."""
        if self._present.elementwise or any(one.recomputes for one in self._present.placements.values()):
            return False
        self._shares = True
        return True

    def _ends_planning(self, micro_batches: Sequence[MicroBatch], meter: StepMeter) -> bool:
        """Whether a measured step is one that no plans are made for: then everything moves from now on."""
        metered = [one.metered for one in micro_batches if one.metered is not None]
        walks = self._walks or self._engine.made_graph() or any(meter.measured[one].walks_again for one in metered)
        all_walk, all_share = zip(*self._ranks.gather((walks, self._shares or meter.is_shared)), strict=True)
        if not metered or not (any(all_walk) or any(all_share)):
            return False
        own = max(map(meter.peak_bytes, metered)), max(map(meter.taken_bytes, metered))
        peak, taken = (max(each) for each in zip(*self._ranks.gather(own), strict=True))
        if peak > self.budget_bytes and not any(all_share):
            self._maker.on_infeasible()
        self._stop_planning(_SHARES if any(all_share) else _WALKS, f": {format_bytes(taken)} in a measured step")
        return True

    def _stop_planning(self, why: str, measured: str) -> None:
        """Plan nothing any more: everything moves.

        Raises :class:`~hf_offload.errors.OffloadPlanError` where a step may write only so much to drives.
        """
        limit = self._maker.terms.allowed.written_bytes
        if limit is not None and self._safest.default.tier == "ssd":
            raise OffloadPlanError(
                f"{why}: such steps are not planned, and everything moves to drives, however much max_step_write_bytes of "
                f"{format_bytes(limit)} allows. Drop that setting, or name tier='none' for a run that fits."
            )
        self._is_unplanned, self._maker.recomputes_elementwise = True, False
        self._shapes.forget()
        self._log(
            logging.WARNING,
            "%s: such steps are not planned. Everything moves from now on, whether it fits the budget of %s or not%s.",
            why,
            format_bytes(self.budget_bytes),
            measured,
        )
        self._set_plan(dataclasses.replace(self._safest, reason=f"{why}: everything moves"))

    # -- a step has ended ---------------------------------------------------------------------------------------------

    def after_step(
        self, micro_batches: Sequence[MicroBatch], meter: StepMeter | None, times: tuple[float, float]
    ) -> None:
        """What becomes of the plans after a step of these micro-batches, with its seconds and those of its compute.

        Raises :class:`~hf_offload.errors.OffloadPlanError` if the budget is too small for the first plan of the run.
        """
        if meter is not None and (
            self._ends_planning(micro_batches, meter) or self._plan_measured(micro_batches, meter)
        ):
            return
        plans = [one.plan for one in micro_batches if one.plan is not None]
        if not plans or len(plans) < len(micro_batches):
            return
        main = self._predict(plans, plans)
        if not all(one.plan is not None and one.plan.is_for(one.shape) for one in micro_batches):
            return  # smaller batches than the plans are for
        for one in _each(plans):
            one.steps += 1
        if meter is not None:
            self._check(micro_batches, meter)
            return
        seconds, computed_s = map(max, zip(*self._ranks.gather(times), strict=True))
        pace = computed_s / max(sum(one.compute_s for one in plans) + main.footprint.optimizer_step_s, 1e-9)
        if all(one.steps > 1 for one in plans):
            self._check_time(plans, main, seconds, pace)
            return
        for one in plans:
            # What was measured was slowed down by measuring. One step that took longer all the same tells of something else
            # on the machine.
            one.pace = min(1.0, pace)

    def _predict(self, candidates: Sequence[ShapePlan], plans: Iterable[ShapePlan]) -> ShapePlan:
        """Of ``candidates`` the one with the largest peak, and the time of a step with micro-batches under ``plans``."""
        self._shapes.latest = main = max(candidates, key=lambda one: one.prediction.peak_bytes)
        main.prediction.step_s = _predicted_s(plans, main)
        return main

    def _plan_measured(self, micro_batches: Sequence[MicroBatch], meter: StepMeter) -> bool:
        """Make plans of the micro-batches that ran with everything moved; whether there were any."""
        found = {
            one.shape: one for one in micro_batches if one.plan is None and one.is_measured and one.metered is not None
        }
        if not found:
            return False
        plans = self._maker.make(found, meter)
        if not plans:
            return True
        for plan in plans:
            self._shapes.planned(plan)
            self._adopt(plan)
        for one in micro_batches:
            if one.plan is None:
                one.plan = self._shapes.plan_for(one.shape)
        self._predict(plans, [one.plan for one in micro_batches if one.plan is not None])
        return True

    def _check(self, micro_batches: Sequence[MicroBatch], meter: StepMeter) -> None:
        """Look at a step under its plans: was it within the budget, and was compute as fast as in the first step?"""
        peaks: dict[BatchShape, int] = {}
        for one in micro_batches:
            if one.plan is not None and one.is_measured and one.metered is not None:
                peaks[one.plan.shape] = max(peaks.get(one.plan.shape, 0), meter.peak_bytes(one.metered))
        for shape, own_peak in peaks.items():
            plan = self._shapes.plans.get(shape)
            if plan is None:
                continue
            peak = plan.prediction.measured_peak_bytes = max(self._ranks.gather(own_peak))
            self._shapes.checked(plan)
            if plan.exceeds or self._correct(plan, peak):
                continue
            if peak > self.budget_bytes and self._maker.on_infeasible():
                self._maker.measure_again(f"A step needed {format_bytes(peak)}.")

    def _correct(self, plan: ShapePlan, peak_bytes: int) -> bool:
        """Plan again where that is better by now; whether it was."""
        corrected, has_moved = self._maker.correct(plan, peak_bytes)
        if corrected is not None:
            self._shapes.corrected(corrected)
            self._adopt(corrected)
        return has_moved or corrected is not None

    def _check_time(self, plans: Sequence[ShapePlan], main: ShapePlan, seconds: float, pace: float) -> None:
        """A step took ``seconds``, and its compute ``pace`` times as long as predicted: correct what is off."""
        main.prediction.measured_step_s.append(seconds)
        self._pace.add(seconds / main.prediction.step_s, pace)
        taken = self._pace.take()
        if taken is None:
            return
        ratio, pace = taken
        predicted = main.prediction.step_s
        self._log(logging.INFO, "Steps take %.2f s instead of the predicted %.2f s.", ratio * predicted, predicted)
        for one in _each(plans):
            one.pace = pace
            self._correct(one, one.prediction.measured_peak_bytes or 0)
            if self._shapes.latest is None:
                return  # weights or state were moved

    def _adopt(self, plan: ShapePlan) -> None:
        """Let the plan be that of its shape, from the next forward on."""
        self._pace.forget()
        name = "Corrected plan" if plan.corrections else "Plan"
        self._log(logging.INFO, "%s for %s of memory: %s.", name, format_bytes(self.budget_bytes), plan.reason)
        self._shapes.latest = plan
        self._apply_plan(plan)

    def _log(self, level: int, message: str, *values: object) -> None:
        """What all processes have decided, said by one of them."""
        say(self._ranks, level, message, *values)


def _each(plans: Iterable[ShapePlan]) -> Iterable[ShapePlan]:
    """Without repetitions."""
    return {id(one): one for one in plans}.values()


def _predicted_s(plans: Iterable[ShapePlan], main: ShapePlan) -> float:
    """Of a step with micro-batches under these plans."""
    return sum(one.micro_batch_s for one in plans) + main.footprint.optimizer_step_s
