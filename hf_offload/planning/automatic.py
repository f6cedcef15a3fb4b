"""The tier ``auto`` of a session: measured steps decide about the plan, and the plan about what is moved and recomputed."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from hf_offload.engine.device import device_of
from hf_offload.engine.hooks import Engine
from hf_offload.engine.recompute import Recompute
from hf_offload.engine.unsupported import check_eager
from hf_offload.interrupts import signals_deferred
from hf_offload.plan.hardware import BUDGET_SHARE
from hf_offload.plan.plan import Plan
from hf_offload.planning.decisions import Decisions
from hf_offload.planning.feedback import Feedback
from hf_offload.planning.model_state import ModelState
from hf_offload.planning.ranks import hardware_of_all
from hf_offload.planning.shape_plan import ShapePlan
from hf_offload.planning.step_time import Overhead
from hf_offload.ranks import Ranks
from hf_offload.settings.schema import OffloadConfig
from hf_offload.transforms.rematerialization.apply import ElementwiseBlocks

_SAFE_WINDOW_SHARE = 1 / 16
"""Of the budget: most bytes that wait to be written, and that are read ahead, before the first step has been measured."""


class AutomaticPlan:
    """The plan of a running training, which an engine follows. It does not keep the model alive.

    Attributes:
        budget_bytes: Most memory that the training may take.
        hardware: What it runs on.
        plan: The present one: ``safest`` until a step has been measured.
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
        overhead = Overhead(engine, model_state, hardware.device)
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
        self._feedback = Feedback(model, self._decisions, engine, model_state, overhead, ranks)

    @property
    def planned(self) -> ShapePlan | None:
        """The current plan and the measured step that it was made of; None before the first one."""
        return self._decisions.planned

    @property
    def most_measured_bytes(self) -> int | None:
        """The highest peak of all steps that were measured; None before the first one."""
        return self._feedback.most_measured_bytes

    @property
    def most_evaluated_bytes(self) -> int | None:
        """The highest peak of evaluation that was measured; None before the first one."""
        return self._feedback.most_evaluated_bytes

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
        """The model's forward begins, with these inputs. It may have been ``compiled`` since."""
        check_eager(model, compiled)
        self._feedback.begin_forward(args, kwargs)

    def end_forward(self) -> None:
        """The model's forward has ended, in this thread."""
        self._feedback.end_forward()

    def begin_evaluation(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], compiled: bool) -> None:
        """A forward of the model without gradients begins."""
        if not compiled:
            self._feedback.begin_evaluation(args, kwargs)

    def end_evaluation(self) -> None:
        """It has ended."""
        self._feedback.end_evaluation()

    def end_step(self) -> None:
        """A step has ended."""
        self._feedback.end_step()

    def leave_thread(self) -> None:
        """The model has gone in the middle of whatever this thread does: stop looking at it. Takes no lock."""
        self._feedback.leave_thread()

    def close(self) -> None:
        """Remove everything from the model."""
        self._feedback.close()
        self._recompute.remove()
