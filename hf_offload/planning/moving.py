"""Weights, gradients and optimizer state of a running training go where a plan has them."""

import dataclasses
from collections.abc import Callable

from torch import nn

from hf_offload.plan.holding import Held
from hf_offload.plan.places import Allowed
from hf_offload.planning.known import Known
from hf_offload.planning.model_state import ModelState
from hf_offload.ranks import Ranks

# Each is followed by a measured step.
_MOST_CHANGES = 4


class Moving:
    """Lets plans be found for what is where, and moves that where a plan has it. It keeps no model.

    All processes go the same way, where some cannot move what others can, too: that of the first one.
    """

    def __init__(self, state: ModelState, ranks: Ranks):
        self._state = state
        self._ranks = ranks
        self._changes = 0
        self._refused: set[Held] = set()

    def refuse(self, held: Held) -> None:
        """A measured step has shown that ``held`` leaves too little memory: nothing goes back there."""
        self._refused.add(held)

    @property
    def allowed(self) -> Allowed:
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
