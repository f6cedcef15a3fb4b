"""Measured steps that take more than the budget: what is said of them."""

from collections.abc import Iterable

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.problem import smallest_budget
from hf_offload.planning.known import Known
from hf_offload.planning.situation import Situation
from hf_offload.settings.sizes import format_bytes


class Excess:
    """What is said of steps over the budget: of the first one of each situation, of which nothing was known, and once of
    those after it.
    """

    def __init__(self, budget_bytes: int):
        self._budget = budget_bytes
        self._measured: set[Situation] = set()  # at least once
        self._said: set[Situation] = set()

    def of_step(self, micro_batches: Iterable[tuple[Situation, Known | None, int]]) -> list[str]:
        """Each had this peak, under the plan of what was known, or measured to make one: what is to be said of them, if
        anything. Nothing that comes more than once was known before the step ended.
        """
        found = [(one, self._note(*one)) for one in micro_batches]
        self._measured.update(situation for (situation, _, _), _ in found)
        return list(dict.fromkeys(message for _, message in found if message))

    def _note(self, situation: Situation, known: Known | None, peak_bytes: int) -> str:
        is_first = situation not in self._measured
        if peak_bytes <= self._budget or situation in self._said:
            return ""
        took = f"took {format_bytes(peak_bytes)}, {format_bytes(peak_bytes - self._budget)} more than the budget of"
        if is_first:
            return (
                f"The first step of its kind {took} {format_bytes(self._budget)}: what it needs is known once it has been "
                "measured, with all that can be moved moved and nothing recomputed. Steps after it are planned within the "
                "budget."
            )
        self._said.add(situation)
        why = "it was measured, with all that can be moved moved"
        if known is not None:
            why = f"its plan was predicted to take {format_bytes(known.prediction.peak_bytes)}"
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
