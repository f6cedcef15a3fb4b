"""Both losses of a step whose weights leave memory: in one pass over the weights where the model allows that."""

import logging
import threading
from collections.abc import Callable

from torch import Tensor, nn

from hf_offload.generators import process_states, set_process_states
from hf_offload.optimizers.mezo.apart import Apart
from hf_offload.optimizers.mezo.course import Course
from hf_offload.optimizers.mezo.pairs import UnfitError, run_in_turns
from hf_offload.optimizers.mezo.python_state import PythonState
from hf_offload.state.contexts import is_outside
from hf_offload.state.registry import parked_of
from hf_offload.state.units import unit_with
from hf_offload.structure.units import find_blocks

logger = logging.getLogger(__name__)

_FEWEST_BLOCKS = 2


class Passes:
    """How often a step brings each weight: once for both losses, or once for each.

    The former is tried, and given up as soon as a pass would leave something to the other one: the step is then made in two
    passes, from where it began. A model that leaves something in each step is tried ever more seldom.
    """

    def __init__(self) -> None:
        self._failures = 0  # since passes last took turns to their end
        self._rests = 0  # steps until they do it next
        self._said: str | None = None

    def one_pays(self, course: Course, model: nn.Module) -> bool:
        """Whether both passes are to take turns. It keeps all weights on the tier, which pays if most of them go there."""
        found = next((unit_with(one) for one in course.parameters if parked_of(one) is not None), None)
        return (
            not course.is_seen
            and found is not None
            and found[0].limit_bytes is not None
            and found[0].total_bytes > 2 * found[0].limit_bytes
            and is_outside()
            and len(find_blocks(model)) >= _FEWEST_BLOCKS
        )

    def losses(self, course: Course, model: nn.Module, closure: Callable[[], Tensor]) -> list[Tensor]:
        """Those of weights that have made one move and two moves of the step, of which both are known."""
        if self._rests:
            self._rests -= 1
        else:
            found = self._in_turns(course, model, closure)
            if found is not None:
                return found
        before = process_states(all_devices=True)
        course.turn(1)
        losses = [closure()]
        course.turn(2)
        set_process_states(before)
        return [*losses, closure()]

    def _in_turns(self, course: Course, model: nn.Module, closure: Callable[[], Tensor]) -> list[Tensor] | None:
        """None, and everything as it was before, for a model whose passes would leave something to each other."""
        state, first = PythonState(model, closure), Apart()
        second = Apart(first)
        given_up = True

        def pass_of(mode: Apart | None) -> Tensor:
            course.turning.add(threading.get_ident())
            if mode is None:
                loss = closure()
            else:
                with mode:
                    loss = closure()
            state.check(ended=True)
            return loss

        course.turning, course.was_seen = {threading.get_ident()}, False
        whys: list[str] = []

        def found_unfit() -> bool:
            whys[:] = [one.why for one in (state, first, second) if one.why is not None]
            return bool(whys) or course.was_seen

        try:
            state.check()
            with first:  # around the second one, as PyTorch counts modes in all threads together
                found: list[Tensor] = run_in_turns(
                    (lambda: pass_of(None), lambda: pass_of(second)),
                    find_blocks(model).values(),
                    lambda which: course.turn(which + 1, inform=False),
                    state.check,
                )
            given_up = found_unfit()
        except (UnfitError, SystemExit, Exception) as error:  # a thread of the model's own may have ended before
            if not (found_unfit() or isinstance(error, UnfitError)):
                raise
        finally:
            course.turning = set()
        if not given_up:
            self._failures = self._rests = 0
            self._say("one pass over the weights")
            return found
        for each in (second, first, state):
            each.restore()
        self._failures += 1
        self._rests = (1 << min(self._failures - 1, 16)) - 1
        why = whys[0] if whys else "looks at its weights between its blocks"
        self._say(f"two passes over the weights, as the model {why}")
        return None

    def _say(self, how: str) -> None:
        if how != self._said:
            self._said = how
            logger.info("MeZO computes both losses of a step in %s.", how)
