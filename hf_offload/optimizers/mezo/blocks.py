"""Both losses of a step with one visit to each block, where weights leave memory.

Note: for which models
    The blocks are one ``ModuleList`` of ``GradientCheckpointingLayer``: by that class a model says that a block keeps nothing
    for another one. Hooks see that each pass uses them in order, once each. A first step of two plain passes has shown that
    the model draws no random numbers, and changes neither weights nor buffers.

Note: two threads, of which one runs
    A forward pass is Python code, which stops nowhere in the middle, but a thread can wait there. The second pass runs in a
    thread of its own; it uses each block right after the first pass has, one move further, and puts its weights back as they
    were. So what the first pass reads does not depend on the second one, which is dropped where blocks are used in another
    way, and repeated after the first.
"""

import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_offload.errors import OffloadError
from hf_offload.generators import are_equal, process_states, set_process_states
from hf_offload.interrupts import signals_deferred
from hf_offload.optimizers.mezo.trajectory import Trajectory
from hf_offload.state.contexts import is_outside
from hf_offload.state.units import Units
from hf_offload.structure.units import one_stack

logger = logging.getLogger(__name__)


class Passes:
    """Computes both losses of each step."""

    def __init__(self) -> None:
        self._fits: bool | None = None  # unknown until a step was seen

    def losses(self, trajectory: Trajectory, model: nn.Module, compute: Callable[[], Tensor]) -> list[Tensor]:
        """What ``compute`` returns where weights are, and one move further, with the same random numbers."""
        drawn = process_states(all_devices=True)
        blocks = one_stack(model) if self._fits is not False and _leaves(trajectory.units()) else []
        if not blocks or trajectory.is_read or not is_outside():
            return [compute(), self._second(trajectory, compute, drawn)]
        buffers = [(one, one._version) for one in model.buffers() if not one.is_inference()]
        visit = OneVisit(trajectory, blocks)
        first, second = visit.run(compute) if self._fits else (compute(), None)
        draws = not are_equal(process_states(all_devices=True), drawn)
        if self._fits and (draws or visit.is_shared):
            set_process_states(drawn)
            first = compute()
        if second is None or draws or visit.is_shared:
            second = self._second(trajectory, compute, drawn)
        changes = any(one._version != version for one, version in buffers)
        if self._fits and changes:
            self._fits = False
            raise OffloadError(
                "The model has changed a buffer in a forward pass, as it did not in its first step, while both losses of a "
                "step of MeZO were computed at once. The weights have gone back, and no update was made; later steps take "
                "two passes."
            )
        if draws or changes or trajectory.has_changed:
            self._say("draws random numbers, or changes weights or buffers")
        elif visit.is_shared or visit.why is not None:
            self._say(visit.why or "computes in threads of its own")
        elif self._fits is None:
            self._fits = True
            logger.info("MeZO computes both losses of a step with one visit to each block from the next step on.")
        return [first, second]

    def _second(self, trajectory: Trajectory, compute: Callable[[], Tensor], drawn: Any) -> Tensor:
        with signals_deferred:
            trajectory.advance(1)
        set_process_states(drawn)
        return compute()

    def _say(self, why: str) -> None:
        self._fits = False
        logger.info("MeZO computes the losses of a step in two passes over the weights, as the model %s.", why)


def _leaves(units: Units | None) -> bool:
    """Whether not all weights are in memory at once, and hooks see each block."""
    return units is not None and not units.is_compiled and units.total_bytes > (units.limit_bytes or units.total_bytes)


class _DroppedError(BaseException):
    """The second pass is not needed any more. Not an ``Exception``, which the model's own code may catch."""


class OneVisit:
    """Two passes, of which the second uses each block right after the first one.

    Attributes:
        why: What the model does for which the second pass was dropped.
        is_shared: A thread of neither pass has used a block.
    """

    def __init__(self, trajectory: Trajectory, blocks: list[nn.Module]):
        self.why: str | None = None
        self.is_shared = False
        self._trajectory = trajectory
        self._blocks = blocks
        self._reached = [0, 0]  # how many blocks each pass has come to
        self._threads: list[int | None] = [threading.get_ident(), None]
        self._may_run = threading.Semaphore(0), threading.Semaphore(0)
        self._has_ended = False  # the second pass
        self._result: Tensor | None = None

    def run(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None]:
        """What ``compute`` returns in both passes; None for a second one that was dropped. Raises what the first raises."""
        context, as_here = contextvars.copy_context(), _state_of_thread()
        thread = threading.Thread(target=context.run, args=(self._second, compute, as_here), daemon=True)
        handles: list[RemovableHandle] = []
        try:
            with signals_deferred:
                thread.start()
                handles += [block.register_forward_pre_hook(self._in_front, prepend=True) for block in self._blocks]
                handles.append(self._blocks[-1].register_forward_hook(self._behind))
            first = compute()
            if self._reached[0] == len(self._blocks):
                self._let_second_run()
        finally:
            with signals_deferred:
                for handle in handles:
                    handle.remove()
                if thread.ident is not None:
                    if not self._has_ended:
                        self.why = self.why or "has not used all of its blocks"
                        self._may_run[1].release()
                    thread.join()
        return first, self._result

    def _in_front(self, block: nn.Module, args: Any) -> None:
        which = self._which()
        if which is None or (which == 0 and self._has_ended):
            return
        place = self._reached[which]
        self._reached[which] += 1
        if place < len(self._blocks) and self._blocks[place] is block:
            self._pass_on(which)
        else:
            self.why = self.why or "has used its blocks in another order"
            if which == 1:
                raise _DroppedError
            self._let_second_run()  # to its end

    def _behind(self, block: nn.Module, args: Any, output: Any) -> None:
        which = self._which()
        if which is not None:
            self._pass_on(which)

    def _which(self) -> int | None:
        """Of which pass this thread is."""
        thread = threading.get_ident()
        if thread in self._threads:
            return self._threads.index(thread)
        self.is_shared = True
        return None

    def _pass_on(self, which: int) -> None:
        if which == 0:
            self._let_second_run()
            return
        self._end_turn()
        self._may_run[0].release()
        self._wait_for_turn()

    def _let_second_run(self) -> None:
        """Until it has come as far as this pass."""
        if not self._has_ended:
            with signals_deferred:  # what they raise comes when this pass may run
                self._trajectory.lend()
                self._may_run[1].release()
                self._may_run[0].acquire()

    def _end_turn(self) -> None:
        if self._trajectory.is_lent and not self._trajectory.take_back():
            self.why = self.why or "changes weights, or keeps views of them"
        if self.why is not None:
            raise _DroppedError

    def _wait_for_turn(self) -> None:
        self._may_run[1].acquire()
        if self.why is not None:
            raise _DroppedError

    def _second(self, compute: Callable[[], Tensor], as_here: Callable[[], None]) -> None:
        self._threads[1] = threading.get_ident()
        try:
            as_here()
            self._wait_for_turn()
            result = compute()
            if self._reached[1] < len(self._blocks):
                self.why = "has not used all of its blocks"
            self._end_turn()
            self._result = result
        except _DroppedError:
            pass
        except BaseException as error:  # which comes again, where it belongs, after the first pass
            self.why = f"has raised {type(error).__name__}"
        finally:
            try:
                if self._trajectory.is_lent:
                    self._trajectory.take_back()
            finally:
                self._has_ended = True
                self._may_run[0].release()


def _state_of_thread() -> Callable[[], None]:
    """Makes another thread compute as this one does, outside of modes."""
    denormals = _flushes_denormals()
    device, stream = None, None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        device, stream = torch.accelerator.current_device_index(), torch.accelerator.current_stream()

    def set_here() -> None:
        torch.set_grad_enabled(False)
        if denormals != _flushes_denormals():
            torch.set_flush_denormal(denormals)
        if device is not None and stream is not None:
            torch.accelerator.set_device_index(device)
            torch.accelerator.set_stream(stream)

    return set_here


def _flushes_denormals() -> bool:
    return not bool(torch.full((), 2.0**-120, dtype=torch.float32, device="cpu").mul(2.0**-20))
