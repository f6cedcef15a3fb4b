"""The tier ``auto`` of a session: measured steps decide about the plan, and the plan about what is moved and recomputed."""

import contextlib
import dataclasses
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hf_offload.engine.device import device_of
from hf_offload.engine.hooks import Engine
from hf_offload.engine.recompute import Recompute
from hf_offload.engine.unsupported import check_eager
from hf_offload.errors import OffloadConfigError, OffloadPlanError
from hf_offload.interrupts import signals_deferred
from hf_offload.plan.hardware import BUDGET_SHARE
from hf_offload.plan.plan import Plan
from hf_offload.planning.batch_shape import shape_of, tensors_in
from hf_offload.planning.decisions import Decisions
from hf_offload.planning.measuring import StepMeter
from hf_offload.planning.model_state import ModelState
from hf_offload.planning.plan_maker import MicroBatch
from hf_offload.planning.ranks import hardware_of_all
from hf_offload.planning.shape_plan import ShapePlan, say
from hf_offload.planning.shapes import OverBudget
from hf_offload.planning.state_bytes import OptimizerState
from hf_offload.planning.step_time import Overhead, StepClock
from hf_offload.ranks import Ranks
from hf_offload.settings.schema import OffloadConfig
from hf_offload.transforms.rematerialization.apply import ElementwiseBlocks

_SAFE_WINDOW_SHARE = 1 / 16
"""Of the budget: most bytes that wait to be written, and that are read ahead, before the first step has been measured."""
_MOST_MICRO_BATCHES = 1024


class AutomaticPlan:
    """The plan of a running training, which an engine follows. It does not keep the model alive.

    Tells forwards, micro-batches and steps apart, measures those that :class:`~hf_offload.planning.decisions.Decisions` asks
    for, and says what took more than the budget. Several processes measure the same steps: each of them runs as many forwards
    as the others.

    Attributes:
        budget_bytes: Most memory that the training may take.
        hardware: What it runs on.
        plan: The present one: ``safest`` until a step has been measured.
        most_measured_bytes: The highest peak of all steps that were measured; None before the first one.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        config: OffloadConfig,
        engine: Engine,
        safest: Plan,
        ranks: Ranks,
        model_state: ModelState,
        on_infeasible: Callable[[], bool],
        elementwise: ElementwiseBlocks | None,
    ):
        self._engine = engine
        self._model_state = model_state
        self._ranks = ranks
        self._model = weakref.ref(model)
        self._blocks = weakref.WeakValueDictionary(blocks)
        self._recompute = Recompute(blocks)
        self._elementwise = elementwise
        self.hardware = hardware = hardware_of_all(config, ranks, device_of(model))
        budget = config.memory_budget
        self.budget_bytes = int(hardware.memory_bytes.value * BUDGET_SHARE) if budget is None else int(budget)
        little = int(_SAFE_WINDOW_SHARE * self.budget_bytes)
        behind = min(safest.write_behind_bytes, little)
        safest = dataclasses.replace(safest, write_behind_bytes=behind, most_ahead_bytes=little)
        self._apply(safest)
        engine.transfer.mover.time_stalls()  # else plans would count transfers as compute
        self._overhead = overhead = Overhead(engine, model_state.storage, hardware.device)
        self._decisions = Decisions(
            model,
            self.budget_bytes,
            hardware,
            safest=safest,
            apply=self._apply,
            engine=engine,
            model_state=model_state,
            overhead=overhead,
            on_infeasible=on_infeasible,
            ranks=ranks,
            may_reduce=lambda: elementwise is not None and all(ranks.gather(elementwise.possible)),
        )
        self._meter: StepMeter | None = None
        self._over_budget = OverBudget(self._decisions.budget_bytes)
        self._forward = OneForward()
        self._micro_batches: list[MicroBatch] = []  # of the running step
        self._clock = StepClock(overhead.seconds)
        self._state = OptimizerState(model, self._clock.mark_end)
        self.most_measured_bytes: int | None = None

    @property
    def planned(self) -> ShapePlan | None:
        """The current plan and the measured step that it was made of; None before the first one."""
        return self._decisions.planned

    def _apply(self, plan: Plan) -> None:
        with signals_deferred:
            self.plan = plan
            self._engine.apply_plan(plan)
            self._recompute.apply(self._present(name for name, one in plan.placements.items() if one.recomputes))
            if self._elementwise is not None:
                self._elementwise.apply(plan.elementwise)

    def _present(self, names: Iterable[str]) -> Iterator[str]:
        """Of these units the blocks that have the names they had at first: once one has been added, deleted or replaced, a
        plan is about others.
        """
        model = self._model()
        if model is None:
            return
        for name in names:
            with contextlib.suppress(AttributeError):
                if model.get_submodule(name) is self._blocks.get(name):
                    yield name

    def begin_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], compiled: bool) -> None:
        """A forward of the whole model begins, with these inputs. It may have been ``compiled`` since.

        Raises :class:`~hf_offload.errors.OffloadConfigError` while one runs in another thread, where the plan recomputes.
        """
        check_eager(model, compiled)
        if self._decisions.is_unplanned():
            return
        if self._forward.is_elsewhere:
            if not self._decisions.allow_threads():
                raise self._forward.refusal()
            return
        is_broken_off = self._forward.begin() or (self._meter is not None and self._meter.is_broken_off)
        if any(self._ranks.gather(is_broken_off)):
            self._give_step_up()
        if self._meter is not None and self._meter.is_over:
            self.end_step()  # the end of the last step was not reported
        if self._clock.start():
            self._micro_batches = []
        shape = shape_of(model, args, kwargs)
        if self._micro_batches and self._engine.awaits_backward:
            shape = self._micro_batches[-1].shape.joined(shape)
        shape = self._ranks.largest(shape, lambda one: one.elements)
        with signals_deferred:  # a micro-batch that has begun without its meter would be taken for measured
            is_next = len(shape.forwards) == 1 or not self._micro_batches
            if is_next:
                del self._micro_batches[:-_MOST_MICRO_BATCHES]  # where no step is ever said to end
                self._micro_batches.append(self._decisions.begin(shape, self._state.nbytes()))
            else:
                self._decisions.go_on(self._micro_batches[-1], shape)
            micro_batch = self._micro_batches[-1]
            if self._decisions.is_unplanned():
                self._stop_measuring()
                return
            # Several processes measure the same steps, whatever is on their stacks.
            if self._meter is None and not self._ranks.connected and not StepMeter.can_begin():
                micro_batch.is_measured = False  # another step will do
            if self._meter is None and micro_batch.is_measured:
                self._engine.observer = self._meter = self._begin_measuring(model)
            if self._meter is not None:
                self._meter.begin_forward(tensors_in((args, dict(kwargs))), is_next)
                micro_batch.metered = self._meter.micro_batches - 1

    def end_forward(self) -> None:
        """A forward has ended in this thread."""
        self._forward.end()

    def watch_optimizer(self, optimizer: Optimizer) -> None:
        """Count the state of ``optimizer``, whenever it comes. Other optimizers are seen in steps that are measured."""
        self._state.watch(optimizer)

    def begin_evaluation(self) -> None:
        """A forward of the whole model without gradients begins: it does not belong to a step that is measured, unless the
        backward of its micro-batch is still to come.
        """
        if self._meter is not None and not self._forward.is_running:
            self._meter.begin_evaluation()

    def _begin_measuring(self, model: nn.Module) -> StepMeter:
        resident_bytes, waited_s, state = self._engine.resident_bytes, self._overhead.seconds, self._state
        meter = StepMeter(model, resident_bytes, waited_s, state.nbytes, state.note)
        meter.begin(self._engine.resident_storages())
        return meter

    def end_step(self) -> None:
        """A training step has ended.

        Raises :class:`~hf_offload.errors.OffloadPlanError` if the budget is too small for the first plan of the run.
        """
        if self._decisions.is_unplanned():
            return
        times = self._clock.stop()
        meter = self._stop_measuring()
        self._overhead.end_step(is_measured=meter is not None)
        if times is None:
            return
        peaks = self._peaks(meter)
        measured = [
            (one, one.plan, peaks[one.metered])
            for one in self._micro_batches
            if one.metered is not None and one.metered < len(peaks)
        ]
        self._model_state.let_few_stay(False)
        try:
            self._decisions.after_step(self._micro_batches, meter, times)
        except OffloadPlanError as error:
            raise self._over_budget.refusal(error, max(peaks, default=0)) from None
        finally:
            self._overhead.begin_step()
        if self._decisions.is_unplanned():
            return
        # What the decisions have not said themselves.
        within = [one for one in measured if one[0].plan is None or not one[0].plan.exceeds]
        for message in self._over_budget.of_step((micro_batch.shape, plan, peak) for micro_batch, plan, peak in within):
            say(self._ranks, logging.WARNING, "%s", message)

    def _give_step_up(self) -> None:
        """A forward or backward was broken off, by an error or by Ctrl-C: how much such a micro-batch needs, and how long it
        takes, is not known. What comes next is a step by itself, whether it is the same one again or another.
        """
        self._micro_batches = []
        self._peaks(self._stop_measuring())
        self._clock.stop()
        self._model_state.let_few_stay(False)

    def close(self) -> None:
        """Stop observing, whatever happened, and remove everything from the model."""
        self._stop_measuring()
        self._state.close()
        self._recompute.remove()

    def leave_thread(self) -> None:
        """The model has gone in the middle of whatever this thread does: stop looking at it. Takes no lock."""
        if self._meter is not None:
            self._meter.leave()

    def _stop_measuring(self) -> StepMeter | None:
        with signals_deferred:
            meter, self._meter = self._meter, None
            if meter is not None:
                meter.end()
                self._engine.observer = None
            return meter

    def _peaks(self, meter: StepMeter | None) -> Sequence[int]:
        """Of all micro-batches that were measured, the most that any process has taken. Those without a backward were
        forwards for their results alone: evaluation, which is taken out of the step.
        """
        if meter is None:
            return ()
        # Of a step that threads share, a backward may not have been seen.
        own = tuple(
            (meter.taken_bytes(one), meter.measured[one].has_backward or meter.is_shared)
            for one in range(meter.micro_batches)
        )
        found = [tuple(zip(*each, strict=True)) for each in zip(*self._ranks.gather(own), strict=True)]
        peaks = [max(taken) for taken, _ in found]
        measured = {one.metered for one in self._micro_batches if one.plan is None and one.is_measured}
        evaluated = {one for one, (_, has_backward) in enumerate(found) if one in measured and not any(has_backward)}
        self._micro_batches = [one for one in self._micro_batches if one.metered not in evaluated]
        for number, peak in enumerate(peaks):
            if number not in evaluated:
                self.most_measured_bytes = max(self.most_measured_bytes or 0, peak)
        return peaks


class OneForward:
    """Tells a forward that begins while another thread runs one, and one that was broken off: by an error, or by Ctrl-C."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None  # in which one has begun
        self._handled = 0  # id of the error that this thread was handling then
        self._is_broken_off = False

    @property
    def is_running(self) -> bool:
        """Whether one runs now."""
        return self._thread is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether one runs in another thread now."""
        thread = self._thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def refusal(self) -> OffloadConfigError:
        """What is said of another one meanwhile, under a plan that cannot have both."""
        return OffloadConfigError(
            f"tier='auto' plans for one forward at a time, and {threading.current_thread().name} has begun one while "
            "another thread runs one: set tier='ram' or tier='ssd' where several threads train a model at once."
        )

    def begin(self) -> bool:
        """A forward begins in this thread. Returns whether the one before it was broken off."""
        this = threading.current_thread()
        is_broken_off = self._is_broken_off or self._thread is not None
        self._thread, self._handled, self._is_broken_off = this, id(sys.exception()), False
        return is_broken_off

    def end(self) -> None:
        """A forward has ended in this thread, maybe by an error, which is being handled then."""
        if self._thread is threading.current_thread():
            self._thread = None
            self._is_broken_off = id(sys.exception()) != self._handled
