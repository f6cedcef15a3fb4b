"""The batch shapes of a run: how far each has come from its first step to a plan that was corrected, and warnings about those
over budget.
"""

import dataclasses
import enum
from collections.abc import Iterable

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.problem import smallest_budget
from hf_offload.planning.batch_shape import BatchShape
from hf_offload.planning.shape_plan import ShapePlan
from hf_offload.settings.sizes import format_bytes


class Stage(enum.Enum):
    """How far a batch shape has come. Where other weights or state are in memory, every shape is unknown again."""

    UNKNOWN = "everything moves in its next step, which is measured"
    PLANNED = "it has a plan, whose second step is measured"
    CHECKED = "that step was measured"
    CORRECTED = "another plan was made of what steps have shown, whose second step is measured, too"


_NEXT = {
    Stage.UNKNOWN: {Stage.PLANNED},
    Stage.PLANNED: {Stage.PLANNED, Stage.CHECKED, Stage.CORRECTED},
    Stage.CHECKED: {Stage.PLANNED, Stage.CORRECTED},
    Stage.CORRECTED: {Stage.PLANNED, Stage.CHECKED, Stage.CORRECTED},
}


@dataclasses.dataclass
class _Life:
    """What is known of one shape."""

    stage: Stage = Stage.UNKNOWN
    plan: ShapePlan | None = None

    def enter(self, stage: Stage) -> None:
        assert stage in _NEXT[self.stage], f"{self.stage.name} does not become {stage.name}"
        self.stage = stage


class Shapes:
    """All shapes of a run of which anything is known, and those that are to be measured when they come again.

    Attributes:
        in_force: The plan of the running micro-batch; None where everything moves.
        latest: The plan of the last step, where its peak was predicted; None before the first one.
    """

    def __init__(self) -> None:
        self.in_force: ShapePlan | None = None
        self.latest: ShapePlan | None = None
        self._lives: dict[BatchShape, _Life] = {}

    def forget(self) -> None:
        """What is known is of a run that had something else in memory."""
        self._lives.clear()
        self.in_force = self.latest = None

    def stage(self, shape: BatchShape) -> Stage:
        """How far it has come."""
        life = self._lives.get(shape)
        return Stage.UNKNOWN if life is None else life.stage

    @property
    def plans(self) -> dict[BatchShape, ShapePlan]:
        """The plans that there are."""
        return {shape: life.plan for shape, life in self._lives.items() if life.plan is not None}

    def plan_for(self, shape: BatchShape) -> ShapePlan | None:
        """A plan that ``shape`` can run under: its own, or that of a larger one."""
        plans = self.plans
        larger = [other for other in plans if shape.fits_into(other)]
        if not larger:
            return None
        same = [other for other in larger if shape.begins(other)]
        # How many forwards come is not known: the plan for most of them suits fewer.
        if same:
            return plans[max(same, key=lambda one: (len(one.forwards), one.gradient_bytes))]
        return plans[min(larger, key=lambda other: other.elements)]

    # -- transitions --------------------------------------------------------------------------------------------------

    def want(self, shape: BatchShape) -> None:
        """Measure it when it comes again: it went on as one that has no plan."""
        self._lives.setdefault(shape, _Life())

    def is_wanted(self, shape: BatchShape) -> bool:
        """Whether one that begins so is to be measured."""
        return any(life.stage is Stage.UNKNOWN and shape.begins(one) for one, life in self._lives.items())

    def drop_wanted(self, shape: BatchShape) -> None:
        """Of shapes that begin so, or as which it begins, none is to be measured any more."""
        for one, life in list(self._lives.items()):
            if life.stage is Stage.UNKNOWN and (shape.begins(one) or one.begins(shape)):
                del self._lives[one]

    def planned(self, plan: ShapePlan) -> None:
        """Its plan was made of a measured step."""
        self.drop_wanted(plan.shape)
        self._adopt(plan, Stage.PLANNED)

    def corrected(self, plan: ShapePlan) -> None:
        """Another plan was made of what steps under the one before have shown."""
        self._adopt(plan, Stage.CORRECTED)

    def _adopt(self, plan: ShapePlan, stage: Stage) -> None:
        life = self._lives.setdefault(plan.shape, _Life())
        life.enter(stage)
        life.plan = plan

    def is_to_be_checked(self, plan: ShapePlan) -> bool:
        """Whether its next step is measured. The first one under a plan still learns which records need not leave."""
        return plan.steps > 0 and self.stage(plan.shape) in (Stage.PLANNED, Stage.CORRECTED)

    def checked(self, plan: ShapePlan) -> None:
        """A step under its plan was measured."""
        self._lives[plan.shape].enter(Stage.CHECKED)

    def outgrown(self, plan: ShapePlan) -> None:
        """There is more optimizer state than its plan was made for: its shape is unknown again."""
        del self._lives[plan.shape]


class OverBudget:
    """Warnings about steps over budget: for each batch shape the first one, of which nothing was known, and one after it."""

    def __init__(self, budget_bytes: int):
        self._budget = budget_bytes
        self._has_warned: dict[BatchShape, bool] = {}  # of shapes that were measured: of a step after the first

    def of_step(self, micro_batches: Iterable[tuple[BatchShape, ShapePlan | None, int]]) -> list[str]:
        """Each had this peak, under this plan or measured to make one: what is to be said of them, if anything. Nothing that
        comes more than once was known before the step ended.
        """
        found = [(shape, self._warning(shape, plan, peak)) for shape, plan, peak in micro_batches]
        for shape, _ in found:
            self._has_warned.setdefault(shape, False)
        return list(dict.fromkeys(message for _, message in found if message))

    def _warning(self, shape: BatchShape, plan: ShapePlan | None, peak_bytes: int) -> str:
        if peak_bytes <= self._budget or self._has_warned.get(shape):
            return ""
        took = f"took {format_bytes(peak_bytes)}, {format_bytes(peak_bytes - self._budget)} more than the budget of"
        if shape not in self._has_warned:
            return (
                f"The first step of its kind {took} {format_bytes(self._budget)}: what it needs is known once it has been "
                "measured, with all that can be moved moved and nothing recomputed. Steps after it are planned within the "
                "budget."
            )
        self._has_warned[shape] = True
        why = "it was measured, with all that can be moved moved"
        if plan is not None:
            why = f"its plan was predicted to take {format_bytes(plan.prediction.peak_bytes)}"
        return (
            f"A step {took} {format_bytes(self._budget)}: {why}. If it is to be within the budget, set memory_budget to "
            f"{smallest_budget(peak_bytes) >> 20} MiB, or have smaller batches."
        )

    def refusal(self, refusal: OffloadPlanError, peak_bytes: int) -> OffloadPlanError:
        """``refusal`` after a step with this peak."""
        if peak_bytes <= self._budget:
            return refusal
        text = f"{refusal} The step that was measured took {format_bytes(peak_bytes)}."
        return OffloadPlanError(text, refusal.smallest_bytes)
