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
from hf_offload.methods.mezo.trajectory import Trajectory
from hf_offload.state.contexts import is_outside
from hf_offload.state.units import Units
from hf_offload.structure.units import one_stack

logger = logging.getLogger(__name__)


class Passes:
    """Computes both losses of each step."""

    def __init__(self) -> None:
        self._fits: bool | None = None  # unknown until a step was seen

    def losses(self, trajectory: Trajectory, model: nn.Module, compute: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """What ``compute`` returns where weights are, and one move further, with the same random numbers."""
        drawn = process_states(all_devices=True)

        def compute_second() -> Tensor:
            with signals_deferred:
                trajectory.advance(1)
            set_process_states(drawn)
            return compute()

        blocks = one_stack(model) if self._fits is not False and _leaves(trajectory.units()) else []
        if not blocks or trajectory.is_read or not is_outside() or _flushes_denormals():
            return compute(), compute_second()
        buffers = [(one, one._version) for one in model.buffers() if not one.is_inference()]
        visit = OneVisit(trajectory, blocks)
        first, second = visit.run(compute) if self._fits else (compute(), None)
        draws = not are_equal(process_states(all_devices=True), drawn)
        if self._fits and draws:
            set_process_states(drawn)
            first, second = compute(), None
        if second is None:
            second = compute_second()
        changes = any(one._version != version for one, version in buffers)
        if self._fits and changes:
            self._fits = False
            raise OffloadError(
                "The model has changed a buffer in a forward pass, as it did not in its first step, while both losses of a "
                "step of MeZO were computed at once. The weights have gone back, and no update was made; later steps take "
                "two passes."
            )
        if draws or changes or trajectory.has_changed or visit.is_dropped:
            self._fits = False
            logger.info(
                "MeZO computes the losses of a step in two passes over the weights: the model draws random numbers, changes "
                "weights or buffers, keeps views of weights, or does not use its blocks in order, once each."
            )
        elif self._fits is None:
            self._fits = True
            logger.info("MeZO computes both losses of a step with one visit to each block from the next step on.")
        return first, second


def _leaves(units: Units | None) -> bool:
    """Whether not all weights are in memory at once, and hooks see each block."""
    return units is not None and not units.is_compiled and units.total_bytes > (units.limit_bytes or units.total_bytes)


def _flushes_denormals() -> bool:
    """Whether ``torch.set_flush_denormal`` is on, which holds for one thread."""
    return not bool(torch.full((), 2.0**-120, dtype=torch.float32, device="cpu").mul(2.0**-20))


class _DroppedError(BaseException):
    """The second pass is not needed any more. Not an ``Exception``, which the model's own code may catch."""


class OneVisit:
    """Two passes, of which the second uses each block right after the first one.

    Attributes:
        is_dropped: The second pass was given up: the model uses its blocks in another way.
    """

    def __init__(self, trajectory: Trajectory, blocks: list[nn.Module]):
        self.is_dropped = False
        self._trajectory = trajectory
        self._blocks = blocks
        self._reached = [0, 0]  # how many blocks each pass has come to
        self._threads: list[int | None] = [threading.get_ident(), None]
        self._may_run = threading.Semaphore(0), threading.Semaphore(0)
        self._has_ended = False  # the second pass
        self._result: Tensor | None = None

    def run(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None]:
        """What ``compute`` returns in both passes; None for a second one that was dropped. Raises what the first raises."""
        context, set_device = contextvars.copy_context(), _device_of_thread()
        thread = threading.Thread(target=context.run, args=(self._second, compute, set_device), daemon=True)
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
                        self.is_dropped = True
                        self._may_run[1].release()
                    thread.join()
        return first, self._result

    def _in_front(self, block: nn.Module, args: Any) -> None:
        thread = threading.get_ident()
        if thread in self._threads:  # of another one, the passes that wait for it are dropped
            which = self._threads.index(thread)
            place = self._reached[which]
            self._reached[which] += 1
            if place >= len(self._blocks) or self._blocks[place] is not block:
                self.is_dropped = True
            self._pass_on(which)

    def _behind(self, block: nn.Module, args: Any, output: Any) -> None:
        thread = threading.get_ident()
        if thread in self._threads:
            self._pass_on(self._threads.index(thread))

    def _pass_on(self, which: int) -> None:
        if which == 0:
            self._let_second_run()
        else:
            self._end_turn()
            self._may_run[0].release()
            self._wait_for_turn()

    def _let_second_run(self) -> None:
        """Until it has come as far as the first pass, or to its end."""
        if not self._has_ended:
            with signals_deferred:  # what they raise comes when this pass may run
                self._trajectory.lend()
                self._may_run[1].release()
                self._may_run[0].acquire()

    def _end_turn(self) -> None:
        if self._trajectory.is_lent and not self._trajectory.take_back():
            self.is_dropped = True  # it changes weights, or keeps views of them
        if self.is_dropped:
            raise _DroppedError

    def _wait_for_turn(self) -> None:
        self._may_run[1].acquire()
        if self.is_dropped:
            raise _DroppedError

    def _second(self, compute: Callable[[], Tensor], set_device: Callable[[], None]) -> None:
        self._threads[1] = threading.get_ident()
        try:
            torch.set_grad_enabled(False)
            set_device()
            self._wait_for_turn()
            result = compute()
            self.is_dropped |= self._reached[1] < len(self._blocks)
            self._end_turn()
            self._result = result
        except BaseException:  # it comes again, where it belongs, after the first pass
            self.is_dropped = True
        finally:
            try:
                if self._trajectory.is_lent:
                    self._trajectory.take_back()
            finally:
                self._has_ended = True
                self._may_run[0].release()


def _device_of_thread() -> Callable[[], None]:
    """Gives another thread the accelerator and the stream of this one."""
    if torch.accelerator.current_accelerator() is None:
        return lambda: None
    device, stream = torch.accelerator.current_device_index(), torch.accelerator.current_stream()

    def set_device() -> None:
        torch.accelerator.set_device_index(device)
        torch.accelerator.set_stream(stream)

    return set_device
