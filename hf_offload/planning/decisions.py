"""Deciding about the plans of a running training: which one a micro-batch has, and what becomes of them after a step."""

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from torch import nn

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.plan import Plan
from hf_offload.plan.timeline import Windows
from hf_offload.planning.correcting import corrected_plan, follow_pace, say
from hf_offload.planning.elementwise import Elementwise
from hf_offload.planning.known import (
    Known,
    find_known,
    known_by_simulating,
    known_exceeding,
    known_with_more_state,
)
from hf_offload.planning.measuring import StepMeter
from hf_offload.planning.model_state import ModelState
from hf_offload.planning.moved import moving_all, not_behind, windows_to_measure
from hf_offload.planning.moving import Moving
from hf_offload.planning.observed import ObservedEngine
from hf_offload.planning.overhead import Overhead
from hf_offload.planning.pace import Pace
from hf_offload.planning.situation import Situation
from hf_offload.planning.unplanned import Unplanned
from hf_offload.ranks import Ranks
from hf_offload.settings.sizes import format_bytes

# The first step under a new plan still learns which records need not leave: the second is looked at.
_SETTLED_STEPS = 1
# A smaller batch than one that was measured is measured itself when it has come so often in a row.
_LASTING = 3


@dataclasses.dataclass
class Played:
    """A micro-batch of the running step: what it runs under, whether it is measured, and recomputes elementwise operations
    for that, and which of the meter's it is.
    """

    situation: Situation
    known: Known | None
    is_measured: bool = False
    is_reduced: bool = False
    metered: int | None = None

    @property
    def is_kept(self) -> bool:
        """Whether its plan keeps everything, however often its graph is walked."""
        return self.known is not None and self.known.plan is not None


class Decisions:
    """Decides about the plans of a running training, and keeps those that are known.

    The first time that a situation comes, it runs with everything moved, and is measured; a plan is made of what was
    measured. A smaller batch runs under the plan of a larger one, which it fits into, until it has come several times in a
    row and earns its own. The second step under each plan is measured, too: a peak over the budget is planned again with as
    much less. Where steps take longer or shorter than predicted, what was measured is planned again at their pace and with
    the rates that tiers have reached. Weights and state of the ``model_state`` are where the plan of the micro-batch that
    needs most has them, and others are planned around that; where a plan moves them, the next step is measured. Where
    anything has to leave, another step is measured with recompute of elementwise operations, on machines on which that pays,
    and on all where nothing fits otherwise. Where no plan fits, ``on_infeasible`` is called to change the model so that it
    needs less; if it has, the next step is measured, too. If it has not, the run ends with an error, unless a whole step
    has had plans before: then what does not fit runs under the plan that needs the least memory, with a warning.

    Plans are made for one forward at a time, whose graph is walked once. Where a step shows something else, everything moves
    from then on, unless one thread trains and all that was measured can stay.

    Several processes decide together, about the largest batch and the largest peak that any of them has, and follow one plan.

    Attributes:
        budget_bytes: The smallest that any process has.
        planned: The plan of the last step, where its peak was predicted; None before the first one.
    """

    def __init__(
        self,
        model: nn.Module,
        budget_bytes: int,
        hardware: Hardware,
        *,
        safest: Plan,
        apply: Callable[[Plan], None],
        engine: ObservedEngine,
        model_state: ModelState,
        overhead: Overhead,
        on_infeasible: Callable[[], bool],
        ranks: Ranks,
        elementwise: Elementwise,
    ):
        self._model = weakref.ref(model)
        self._ranks = ranks
        self.budget_bytes = min(ranks.gather(budget_bytes))
        self._safest = safest
        self._apply = apply
        self._engine = engine
        self._model_state = model_state
        self._moving = Moving(model_state, ranks, self.budget_bytes, hardware, overhead, on_infeasible)
        self._elementwise = elementwise
        self._known: dict[Situation, Known] = {}
        self._windows: Windows | None = None  # of the next step that is measured, where nothing is known
        self._wanted: set[Situation] = set()  # to be measured when they come again
        self._unplanned = Unplanned(safest, ranks)
        self._present = safest
        self._pace = Pace()
        self._in_force: Known | None = None
        self._has_planned = self._has_warned = False
        self._refused: dict[Situation, OffloadPlanError] = {}  # before there was a plan
        self.planned: Known | None = None
        self._last: Situation | None = None
        self._repeated = 0

    # -- a micro-batch begins -----------------------------------------------------------------------------------------

    def begin(self, situation: Situation, state_bytes: int) -> Played:
        """Decide under which plan a micro-batch runs, with so many bytes of optimizer state, and let it be followed."""
        keeps = self._in_force is not None and self._in_force.plan is not None
        walks = self._engine.made_graph() and not keeps
        seen = self._ranks.gather((walks, self._unplanned.shares, state_bytes))
        all_walk, all_share, all_state_bytes = zip(*seen, strict=True)
        if any(all_share):
            self._unplanned.shares = True
            self._stop_planning(None)
            return Played(situation, None)
        if any(all_walk):
            self._measure_walks()
        self._repeated = self._repeated + 1 if situation == self._last else 1
        self._last = situation
        known = find_known(self._known, situation)
        if known is not None:
            known = self._with_all_state(known, max(all_state_bytes))
        lasting = self._repeated >= _LASTING and known is not None and not known.is_for(situation)
        reduced = self._elementwise.plan(situation)
        if reduced is not None:
            self._in_force = None
            self._set_plan(reduced)
            return Played(situation, None, is_measured=True, is_reduced=True)
        if known is None or lasting or any(situation.begins(wanted) for wanted in self._wanted):
            windows = self._make_room(situation) if known is None else windows_to_measure(known, self._safest)
            if known is None or windows is not None:
                self._in_force = None
                self._set_plan(self._safest if windows is None else moving_all(self._safest, windows))
                return Played(situation, None, is_measured=True)
            self._wanted = {one for one in self._wanted if not situation.begins(one)}  # there is no room to measure it
        self._apply_plan(known)
        looked_at = known.is_for(situation) and known.steps == _SETTLED_STEPS
        return Played(situation, known, is_measured=looked_at)

    def _make_room(self, situation: Situation) -> Windows | None:
        """For a step whose need is not known: the windows to measure it with, None for those of the first step."""
        if not self._known:
            return self._windows
        most = self._moving.most_demanding
        needs_more = most is None or situation.demand > most.demand
        if needs_more:
            self._model_state.let_few_stay(True)
        elif self._windows is not None:
            return self._windows
        # What is nearest to it says how much there may be on its way, but for what waits to be written.
        nearest = max(self._known.values(), key=lambda one: one.situation.elements)
        return not_behind(windows_to_measure(nearest, self._safest) or nearest.problem.windows[-1], self._safest)

    def go_on(self, played: Played, situation: Situation) -> None:
        """The micro-batch has another forward, which the plan it runs under may not be made for."""
        played.situation = situation
        if played.known is None:
            return
        known = find_known(self._known, situation)
        if known is None:
            # Too late to measure all of it: what can be moved is moved from here on.
            self._wanted.add(situation)
            played.is_measured = False
        if known is not played.known:
            played.known = known
            self._apply_plan(known)

    def _with_all_state(self, known: Known, state_bytes: int) -> Known | None:
        """``known``, planned again where optimizers hold more by now than it was made for; None if that does not fit."""
        more = state_bytes - known.footprint.state_bytes
        if more <= 0:
            return known
        del self._known[known.situation]
        try:
            other, _ = self._in_place(
                lambda: known_with_more_state(known, more, self._moving.terms_for(known.situation))
            )
        except OffloadPlanError:
            return None  # it is measured
        if other is None:
            return None
        self._log(logging.INFO, "Optimizer state has grown by %s: planning again.", format_bytes(more))
        self._adopt(other)
        return other

    def _apply_plan(self, known: Known | None) -> None:
        if known is not self._in_force:
            self._in_force = known
            self._set_plan(self._safest if known is None else known.plan_like(self._safest))

    def _set_plan(self, plan: Plan) -> None:
        self._present = plan
        self._apply(plan)

    # -- steps that no plan is made for -------------------------------------------------------------------------------

    def is_unplanned(self) -> bool:
        """Whether no plans are made any more, and everything moves."""
        return self._unplanned.is_on

    def allow_threads(self) -> bool:
        """A forward begins while another thread runs one; whether it can under the present plan."""
        return self._unplanned.allow_threads(self._present)

    def _find_kept(
        self, found: Mapping[Situation, int], reduced: Container[Situation], meter: StepMeter
    ) -> dict[Situation, Known] | None:
        """The plans that keep everything of a measured step that no other plan can be made for; empty if there are none, and
        None if it can be planned.
        """
        walks = self._engine.made_graph() or any(map(meter.walks_again, found.values()))
        if not self._unplanned.see(walks, meter.is_shared):
            return None
        if any(one in reduced for one in found) and not self._unplanned.shares:
            self._measure_walks()  # with all that is saved without
            return {}
        plans = self._unplanned.kept({one: self._footprint(meter, at) for one, at in found.items()}, self._moving.terms)
        if not plans:
            own = max(map(meter.peak_bytes, found.values())), max(map(meter.taken_bytes, found.values()))
            peak, taken = (max(each) for each in zip(*self._ranks.gather(own), strict=True))
            if peak > self.budget_bytes and not self._unplanned.shares:
                self._moving.on_infeasible()
            self._stop_planning(taken)
        return plans

    def _measure_walks(self) -> None:
        """A graph was walked again under a plan for steps that do not: a measured step says whether all of it can stay."""
        self._unplanned.walks = True
        self._elementwise.forget()
        self._known.clear()
        self._in_force = self.planned = None

    def _stop_planning(self, peak_bytes: int | None) -> None:
        self._known.clear()
        self._wanted.clear()
        self._in_force = self.planned = None
        self._set_plan(self._unplanned.begin(self.budget_bytes, peak_bytes))

    # -- a step has ended ---------------------------------------------------------------------------------------------

    def after_step(self, played: Sequence[Played], meter: StepMeter | None, times: tuple[float, float]) -> None:
        """What becomes of the plans after a step of these micro-batches, with its seconds and those of its compute.

        Raises :class:`~hf_offload.errors.OffloadPlanError` if the budget is too small for the first plan of the run.
        """
        if meter is not None and self._plan_measured(played, meter):
            return
        known = [one.known for one in played if one.known is not None]
        if not known or len(known) < len(played):
            return
        self.planned = max(known, key=lambda one: one.prediction.peak_bytes)
        self.planned.prediction.step_s = _predicted_s(known, self.planned)
        if not all(one.known is not None and one.known.is_for(one.situation) for one in played):
            return  # smaller batches than the plans are for
        for one in _each(known):
            one.steps += 1
        if meter is not None:
            self._unplanned.shares = self._unplanned.shares or meter.is_shared
            walks = (meter.walks_again(one.metered) for one in played if one.metered is not None and not one.is_kept)
            if any(self._ranks.gather(any(walks))):
                self._measure_walks()
            else:
                self._check_peaks(played, meter)
            return
        seconds, computed_s = map(max, zip(*self._ranks.gather(times), strict=True))
        once = self.planned.footprint.optimizer_step_s
        pace = computed_s / max(sum(one.compute_s for one in known) + once, 1e-9)
        if all(one.steps > 1 for one in known):
            self._check_time(known, seconds, pace)
            return
        for one in known:
            # What was measured was slowed down by measuring. One step that took longer all the same tells of something else
            # on the machine.
            one.pace = min(1.0, pace)

    def _plan_measured(self, played: Sequence[Played], meter: StepMeter) -> bool:
        """Make plans of the micro-batches that ran under the safest one; whether there were any."""
        found = {
            one.situation: one.metered
            for one in played
            if one.known is None and one.is_measured and one.metered is not None
        }
        if not found:
            return False
        reduced = {one.situation for one in played if one.is_reduced}
        kept = self._find_kept(found, reduced, meter)
        if kept is not None and not kept:
            return True
        plans: dict[Situation, Known] = kept or {}
        needed: list[Situation] = []
        if kept is None:  # where one begins as another, one plan is enough for both
            needed = [one for one in found if not any(other != one and one.begins(other) for other in found)]
            needed.sort(key=lambda situation: situation.demand, reverse=True)
        refused: dict[Situation, OffloadPlanError] = {}
        steps: dict[Situation, Footprint] = {}
        for situation in needed:
            footprint = self._footprint(meter, found[situation])
            joined = self._elementwise.joined(situation, footprint) if situation in reduced else footprint
            if joined is not None:
                steps[situation] = joined
        for situation, footprint in steps.items():
            try:
                known, has_moved = self._simulated(situation, footprint)
                if has_moved:
                    return True
                if known is not None:
                    plans[situation] = known
            except OffloadPlanError as error:
                refused[situation] = error
        if refused:
            # A step that was measured again may have been a smaller one than the one that was refused before it.
            self._refused = refused if self._has_planned else self._refused | refused
            most, refusal = max(self._refused.items(), key=lambda one: one[1].smallest_bytes or 0)
            if self._moving.on_infeasible():
                self._measure_again(str(refusal))
                return True
            if not self._has_planned:
                text = f"{refusal} That is for batches with {most.largest_input}: larger ones need more."
                raise OffloadPlanError(text, refusal.smallest_bytes)
            plans |= {one: known_exceeding(one, steps[one], self._moving.terms) for one in refused}
            self._log(
                logging.INFO if self._has_warned else logging.WARNING,
                "Batches with %s do not fit the budget, which had room for those before. They run under the plan that needs "
                "the least memory, and may exceed the budget. %s",
                most.largest_input,
                refusal,
            )
            self._has_warned = True
        if not plans:
            return True
        for situation, known in plans.items():
            still = [one for one in self._wanted if not (one.begins(situation) or situation.begins(one))]
            self._wanted = set(still)
            self._adopt(known)
        for one in played:
            if one.known is None:
                one.known = find_known(self._known, one.situation)
        self._has_planned = self._has_planned or kept is not None or len(plans) == len(needed)
        self.planned = max(plans.values(), key=lambda one: one.prediction.peak_bytes)
        all_known = [one.known for one in played if one.known is not None]
        self.planned.prediction.step_s = _predicted_s(all_known, self.planned)
        return True

    def _footprint(self, meter: StepMeter, metered: int) -> Footprint:
        footprint = self._ranks.largest(meter.footprint(metered), lambda one: sum(one.saved_bytes.values()))
        return self._model_state.with_weights(self._present_model, footprint)

    def _simulated(self, situation: Situation, footprint: Footprint) -> tuple[Known | None, bool]:
        """The plan for a micro-batch that was measured, None if it has to be measured again; and whether weights or state
        were moved.
        """
        moving = self._moving
        may_decide = moving.may_decide(situation)
        if may_decide:
            moving.most_demanding = situation
        if self._elementwise.pays(footprint, moving.terms) and self._elementwise.measure(
            situation, footprint, moving.terms
        ):
            return None, False
        if not may_decide:
            with contextlib.suppress(OffloadPlanError):
                return self._in_place(lambda: known_by_simulating(situation, footprint, moving.terms_for(situation)))
        try:
            return self._in_place(lambda: known_by_simulating(situation, footprint, moving.terms))
        except OffloadPlanError:
            if self._elementwise.may_help(footprint, moving.terms) and self._elementwise.measure(
                situation, footprint, moving.terms, within_room=False
            ):
                return None, False
            raise

    def _check_peaks(self, played: Sequence[Played], meter: StepMeter) -> None:
        """Look at a step under its plans."""
        peaks: dict[Situation, int] = {}
        for one in played:
            if one.known is not None and one.is_measured and one.metered is not None:
                key = one.known.situation
                peaks[key] = max(peaks.get(key, 0), meter.peak_bytes(one.metered))
        for situation, peak in peaks.items():
            if situation in self._known:
                self._check_peak(self._known[situation], max(self._ranks.gather(peak)))

    def _check_peak(self, known: Known, peak: int) -> None:
        """Was it within the budget, and was compute as fast as in the first step?"""
        known.prediction.measured_peak_bytes = peak
        if known.plan is not None or known.exceeds:
            return
        if self._correct(known, peak):
            return
        if peak > self.budget_bytes and self._moving.on_infeasible():
            self._measure_again(f"A step needed {format_bytes(peak)}.")

    def _correct(self, known: Known, peak: int) -> bool:
        """Plan again where that is better by now; whether it was."""
        corrected, has_moved = self._in_place(
            lambda: corrected_plan(known, peak, self._moving.terms_for(known.situation))
        )
        if corrected is not None and not has_moved:
            self._adopt(corrected)
        return has_moved or corrected is not None

    @property
    def _present_model(self) -> nn.Module:
        model = self._model()
        assert model is not None, "a step has a model"
        return model

    def _in_place(self, find: Callable[[], Known | None]) -> tuple[Known | None, bool]:
        """The plan that is found, and whether weights or state had to be moved for one: the next step is measured then."""
        known, why = self._moving.settle(self._present_model, find)
        if why is None or known is None:
            return known, False
        self._measure_again(why)
        # Everything moves in the step that is measured, and it is to be within the budget, too.
        self._windows = windows_to_measure(known, self._safest) or known.problem.windows[-1]
        return None, True

    def _measure_again(self, why: str) -> None:
        """What is known is of a run that had other weights and state in memory, or was computed in another way."""
        self._known.clear()
        self._wanted.clear()
        self._elementwise.forget()
        self._windows = None
        self._in_force = self.planned = None
        self._log(logging.INFO, "Measuring again, with something else in memory. %s", why)

    def _check_time(self, known: Sequence[Known], seconds: float, pace: float) -> None:
        """A step took ``seconds``, and its compute ``pace`` times as long as predicted: correct what is off."""
        main = self.planned
        assert main is not None, "it is the largest of these"
        ratio = self._pace.add(main, seconds, pace)
        if ratio is None and not self._pace.has_changed:
            return
        pace = self._pace.take()
        simulated = [one for one in _each(known) if one.plan is None]
        if ratio is None:
            terms = self._moving.terms
            for one in simulated:
                one.pace = pace
                follow_pace(one, terms)
            main.prediction.step_s = _predicted_s(known, main)
            return
        predicted = main.prediction.step_s / main.followed
        self._log(logging.INFO, "Steps take %.2f s instead of the predicted %.2f s.", ratio * predicted, predicted)
        for one in simulated:
            one.pace, one.followed = pace, 1.0
            self._correct(one, one.prediction.measured_peak_bytes or 0)
            if self.planned is None:
                return  # weights or state were moved

    def _adopt(self, known: Known) -> None:
        """Let the plan be that of its situation, from the next forward on."""
        self._known[known.situation] = known
        self._pace.forget()
        kind = "Corrected plan" if known.corrections else "Plan"
        self._log(logging.INFO, "%s for %s of memory: %s.", kind, format_bytes(self.budget_bytes), known.reason)
        self.planned = known
        self._apply_plan(known)

    def _log(self, level: int, message: str, *values: object) -> None:
        """What all processes have decided, said by one of them."""
        say(self._ranks, level, message, *values)


def _each(known: Iterable[Known]) -> Iterable[Known]:
    """Without repetitions."""
    return {id(one): one for one in known}.values()


def _predicted_s(known: Iterable[Known], main: Known) -> float:
    """Of a step with micro-batches under these plans."""
    return sum(one.micro_batch_s for one in known) + main.footprint.optimizer_step_s
