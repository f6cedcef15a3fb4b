"""Weights, gradients and optimizer state of a running training go where a plan has them."""

import dataclasses
from collections.abc import Callable

from torch import nn

from hf_offload.plan.hardware import Hardware
from hf_offload.plan.holding import Held
from hf_offload.plan.places import Allowed
from hf_offload.planning.known import Known, Terms
from hf_offload.planning.model_state import ModelState
from hf_offload.planning.overhead import Overhead
from hf_offload.planning.situation import Situation
from hf_offload.ranks import Ranks

# Each is followed by a measured step.
_MOST_CHANGES = 4


class Moving:
    """Lets plans be found for what is where, and moves that where a plan has it. It keeps no model.

    All processes go the same way, where some cannot move what others can, too: that of the first one.

    Attributes:
        most_demanding: Of all micro-batches that were measured, the one that needs most: weights and state are where its plan
            has them.
    """

    def __init__(
        self,
        state: ModelState,
        ranks: Ranks,
        budget_bytes: int,
        hardware: Hardware,
        overhead: Overhead,
        on_infeasible: Callable[[], bool],
    ):
        self._state = state
        self._ranks = ranks
        self._budget_bytes = budget_bytes
        self._hardware = hardware
        self._overhead = overhead
        self._on_infeasible = on_infeasible
        self._changes = 0
        self._refused: set[Held] = set()
        self.most_demanding: Situation | None = None

    def on_infeasible(self) -> bool:
        """No plan fits, or a measured step did not: let the model need less memory; whether that was possible."""
        before = self._state.held
        has_changed = any(self._ranks.gather(self._on_infeasible()))
        if self._state.held != before:
            self._refused.add(before)  # nothing goes back there
        return has_changed

    @property
    def terms(self) -> Terms:
        """Of the present: with the rates that tiers have reached, and what may still be moved."""
        return Terms(self._budget_bytes, self._overhead.on(self._hardware), self._allowed, self._ranks)

    def terms_for(self, situation: Situation) -> Terms:
        """The same for a micro-batch, for whose sake nothing may be moved where another one needs more."""
        terms = self.terms
        if self.may_decide(situation):
            return terms
        return dataclasses.replace(terms, allowed=dataclasses.replace(terms.allowed, must_stay=True))

    def may_decide(self, situation: Situation) -> bool:
        """Whether weights and state are where its plan has them. One that needs less than another would take the room for
        them that the other one needs, and each of both would move what the other has moved.
        """
        return self.most_demanding is None or situation.demand >= self.most_demanding.demand

    @property
    def _allowed(self) -> Allowed:
        """What a plan may do with them: once they have been moved several times, nothing any more, but let state stay again
        that has left for a step.
        """
        allowed = dataclasses.replace(self._state.allowed, refused=frozenset(self._refused))
        if self._changes < _MOST_CHANGES:
            return allowed
        return dataclasses.replace(
            allowed, state=allowed.state if self._state.left_for_a_step else "none", weights="none"
        )

    def settle(self, model: nn.Module, find: Callable[[], Known | None]) -> tuple[Known | None, str | None]:
        """The plan that is found, and, if weights and state had to be moved for it, why: what was measured is then of a run
        that had something else in memory.
        """
        while True:
            known = find()
            if known is None or known.plan is not None:
                return known, None
            is_there = self._ranks.gather(known.held == self._state.held)[0]
            if any(self._ranks.gather(self._state.hold(model, known.held))):
                self._changes += 1
                return known, f"The plan: {known.reason}."
            if is_there:
                return known, None
            self._changes += 1
