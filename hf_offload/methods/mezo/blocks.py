"""Both losses of a step, where weights leave memory with one visit to each block.

Note: for which models
    The blocks are one ``ModuleList`` of ``GradientCheckpointingLayer``: by that class a model says that a block keeps nothing
    for another one. A first step of two plain passes has shown that the model draws no random numbers, and changes neither
    weights nor buffers.

Note: two threads, of which one runs
    A forward pass is Python code, which stops nowhere in the middle, but a thread can wait there. The second pass runs in a
    thread of its own; it uses each block right after the first pass has, one move further, and the weights are put back as
    they were. Where blocks are used in another way, both passes are repeated, one after the other.
"""

import contextvars
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_offload.errors import OffloadError
from hf_offload.generators import are_equal, process_states, set_process_states
from hf_offload.interrupts import signals_deferred
from hf_offload.methods.mezo.trajectory import Trajectory
from hf_offload.state.contexts import is_outside
from hf_offload.state.storages import moves
from hf_offload.structure.units import one_stack

logger = logging.getLogger(__name__)


class Passes:
    """Computes both losses of each step."""

    def __init__(self, trajectory: Trajectory):
        self._trajectory = trajectory
        self._fits: bool | None = None  # unknown until a step was seen

    def losses(self, model: nn.Module, closure: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """What ``closure`` returns where weights are, and one move further, with the same random numbers.

        Raises :class:`~hf_offload.errors.OffloadError` where a pass changes weights or buffers, and no step before has.
        """
        trajectory, changes = self._trajectory, False
        tensors = [one for one in itertools.chain(model.parameters(), model.buffers()) if moves(one)]

        def compute() -> Tensor:
            """Autocast keeps no copies of weights that leave memory."""
            nonlocal changes
            caches, before = torch.is_autocast_cache_enabled(), _versions(tensors)
            torch.set_autocast_cache_enabled(caches and not trajectory.is_lazy)
            try:
                return closure()
            finally:
                torch.set_autocast_cache_enabled(caches)
                changes |= _versions(tensors) != before

        blocks = [] if self._fits is False or trajectory.is_read else self._blocks(model)
        drawn = process_states(all_devices=True)
        if blocks and self._fits:
            visit = _Visit(trajectory, blocks)
            losses = visit.run(compute)
            self._fits = losses is not None and not changes and are_equal(process_states(all_devices=True), drawn)
            if changes:
                raise OffloadError(
                    "The model has changed a weight or a buffer in a forward pass, as it did not in its first step, while "
                    "both losses of a step of MeZO were computed at once. The weights have gone back, and no update was "
                    "made; later steps take two passes."
                )
            if losses is not None and self._fits:
                return losses
            set_process_states(drawn)
        first = compute()
        with signals_deferred:
            trajectory.advance(trajectory.end + 1)
        set_process_states(drawn)
        second = compute()
        if blocks:
            draws = not are_equal(process_states(all_devices=True), drawn)
            self._fits = self._fits is None and not (draws or changes)
            logger.info(
                "MeZO computes both losses of a step with one visit to each block from the next step on."
                if self._fits
                else "MeZO computes the losses of a step in two passes over the weights: the model draws random numbers, "
                "changes weights or buffers, keeps views of weights, or does not use its blocks in order, once each."
            )
        return first, second

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        """Those that may be visited once, where not all weights are in memory, and hooks see each block."""
        units = self._trajectory.units()
        if units is None or units.is_compiled or not is_outside() or not 0 < units.limit_bytes < units.total_bytes:
            return []
        return one_stack(model)


def _versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """They differ where a pass has changed a tensor, or has given it other memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return [(one._version, one.untyped_storage()._cdata) for one in tensors]


class _GivenUpError(BaseException):
    """The second pass is not needed any more. Not an ``Exception``, which the model's own code may catch."""


class _Visit:
    """Two passes, of which the second uses each block right after the first one."""

    def __init__(self, trajectory: Trajectory, blocks: list[nn.Module]):
        self._trajectory, self._blocks = trajectory, blocks
        self._fits = True  # so far
        self._has_ended = False  # the second pass
        self._second: Tensor | None = None
        self._places = {threading.get_ident(): 0}  # the next block of each pass, by its thread
        self._may_run = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.current_thread()

    def run(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Tensor] | None:
        """What ``compute`` returns in both passes; None if they have to be made one after the other."""
        second = functools.partial(contextvars.copy_context().run, self._run_second, compute, _device_of_thread())
        self._thread = threading.Thread(target=second, daemon=True)
        handles: list[RemovableHandle] = []
        try:
            with signals_deferred:
                self._thread.start()
                handles += [block.register_forward_pre_hook(self._in_front, prepend=True) for block in self._blocks]
                handles.append(self._blocks[-1].register_forward_hook(self._behind))
            first = compute()
            self._let_second_run()
            self._fits &= list(self._places.values()) == [len(self._blocks)] * 2
        finally:
            with signals_deferred:
                for handle in handles:
                    handle.remove()
                if not self._has_ended:
                    self._fits = False
                self._may_run[1].release()
                self._thread.join()
        return (first, self._second) if self._fits and self._second is not None else None

    def _in_front(self, block: nn.Module, args: Any) -> None:
        place = self._places.get(threading.get_ident())
        if place is not None:  # or the block is used in a thread of the user's
            self._fits &= place < len(self._blocks) and self._blocks[place] is block
            self._places[threading.get_ident()] = place + 1
            self._behind(block, args, None)

    def _behind(self, block: nn.Module, args: Any, output: Any) -> None:
        thread = threading.current_thread()
        if thread is self._thread:
            self._may_run[0].release()
            self._wait()
        elif thread.ident in self._places:
            self._let_second_run()

    def _let_second_run(self) -> None:
        """Until it has come as far as the first pass, or to its end."""
        if self._fits and not self._has_ended:
            with signals_deferred:  # what they raise comes when this pass may run
                with self._trajectory.lending():
                    self._may_run[1].release()
                    self._may_run[0].acquire()
                self._fits &= not self._trajectory.is_read

    def _wait(self) -> None:
        self._may_run[1].acquire()
        if not self._fits:
            raise _GivenUpError

    def _run_second(self, compute: Callable[[], Tensor], set_device: Callable[[], None]) -> None:
        self._places[threading.get_ident()] = 0
        try:
            torch.set_grad_enabled(False)
            set_device()
            self._wait()
            self._second = compute()
        except BaseException:  # it comes again, where it belongs, after the first pass
            self._fits = False
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
