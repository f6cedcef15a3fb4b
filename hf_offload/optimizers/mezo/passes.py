"""Both losses of a step whose weights leave memory: in one pass over the weights where the model allows that."""

import logging
from collections.abc import Callable

from torch import Tensor, nn

from hf_offload.optimizers.mezo.course import NOT_A_NUMBER, Course
from hf_offload.optimizers.mezo.pairs import (
    UnfitError,
    are_equal,
    random_states,
    run_in_turns,
    set_random_states,
)
from hf_offload.parameters.contexts import is_outside
from hf_offload.parameters.waiting import residence_of
from hf_offload.structure.units import find_blocks

logger = logging.getLogger(__name__)

_FEWEST_BLOCKS = 2


class Passes:
    """How often a step brings each weight: once for both losses, or once for each.

    Whether a model allows the former is tried in the first step: a pass has to have the same bits while it takes turns
    with one that computes with weights that are not numbers, whichever goes first. So neither leaves anything to the other.
    """

    def __init__(self) -> None:
        self._fits: bool | None = None

    def one_pays(self, course: Course, model: nn.Module) -> bool:
        """Whether both passes are to take turns. It keeps all weights on the tier, which pays if most of them go there."""
        residences = [found for one in course.parameters if (found := residence_of(one)) is not None]
        return (
            self._fits is not False
            and not course.is_seen
            and bool(residences)
            and residences[0].is_mostly_away
            and is_outside()
            and len(find_blocks(model)) >= _FEWEST_BLOCKS
        )

    def losses(self, course: Course, model: nn.Module, closure: Callable[[], Tensor]) -> list[Tensor]:
        """Those of weights that have made one move and two moves of the step, of which both are known."""
        before = random_states()
        if self._fits:
            found = self._in_turns(course, model, closure, (1, 2))
            if found is not None and are_equal(before, random_states()):
                return found
            set_random_states(before)
        course.turn(1)
        losses = [closure()]
        course.turn(2)
        set_random_states(before)
        losses.append(closure())
        after = random_states()
        why = "draws random numbers"
        self._fits = are_equal(before, after)
        if self._fits:
            self._fits = self._try(course, model, closure, losses[0])
            why = "looks at its weights, or keeps something on itself, between its blocks"
            set_random_states(after)
        if self._fits:
            logger.info("MeZO computes both losses of a step in one pass over the weights.")
        else:
            logger.info("MeZO computes the losses of a step in two passes over the weights, as the model %s.", why)
        return losses

    def _try(self, course: Course, model: nn.Module, closure: Callable[[], Tensor], expected: Tensor) -> bool:
        for first, second in ((1, NOT_A_NUMBER), (NOT_A_NUMBER, 1)):
            try:
                found = self._in_turns(course, model, closure, (first, second))
            except Exception:  # of a model that refuses what is not a number
                return False
            if found is None or not _same_bits(found[first != 1], expected):
                return False
        return True

    def _in_turns(
        self, course: Course, model: nn.Module, closure: Callable[[], Tensor], moves: tuple[int, int]
    ) -> list[Tensor] | None:
        course.takes_turns = True
        try:
            found: list[Tensor] = run_in_turns(
                closure, find_blocks(model).values(), lambda which: course.turn(moves[which], inform=False)
            )
            return found
        except UnfitError:
            return None
        finally:
            course.takes_turns = False


def _same_bits(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and bool(((one == other) | (one.isnan() & other.isnan())).all())
