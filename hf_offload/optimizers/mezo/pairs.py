"""Two forward passes that take turns, a block at a time, so that what each block needs is there for both.

Note: two threads, of which one runs
    A forward pass is Python code, which stops nowhere in the middle, but a thread can wait there. So the second pass runs in
    a thread of its own, and each waits in front of a block until the other one has come as far. What PyTorch and Python keep
    for each thread is set in the second one as it is in the first. What a model keeps on itself is not: a model that lets one
    block leave something there for another block, or that draws random numbers, may compute something else than it does in
    one pass after the other. That is tried before (:mod:`~hf_offload.optimizers.mezo.passes`).
"""

import contextvars
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hf_offload.interrupts import signals_deferred


class UnfitError(BaseException):
    """The model cannot be used this way. Not an ``Exception``, which the model's own code may catch."""


class _GivenUpError(BaseException):
    """The other pass has raised."""


class _Turns:
    """Which of the passes 0 and 1 runs."""

    def __init__(self, begin: Callable[[int], None], check: Callable[[], None]):
        self._begin = begin
        self._check = check
        self._may_run = (threading.Semaphore(0), threading.Semaphore(0))
        self._ended = [False, False]
        self._threads: list[int | None] = [threading.get_ident(), None]
        self.given_up = False

    def pass_on(self) -> None:
        """This pass is in front of a block: let the other one come as far."""
        thread = threading.get_ident()
        if thread not in self._threads:
            return
        self._check()
        this = self._threads.index(thread)
        if not self._ended[1 - this]:
            with signals_deferred:  # what they raise comes when this pass may run
                self._let_run(1 - this)
                self._may_run[this].acquire()
        if self.given_up:
            raise _GivenUpError

    def wait_for_first_turn(self) -> None:
        """In the thread of pass 1."""
        self._threads[1] = threading.get_ident()
        self._may_run[1].acquire()
        if self.given_up:
            raise _GivenUpError

    def end(self, this: int) -> None:
        """Pass ``this`` has ended: let the other one run to its end."""
        self._ended[this] = True
        if not self._ended[1 - this]:
            self._let_run(1 - this)

    def _let_run(self, which: int) -> None:
        self._begin(which)
        self._may_run[which].release()


@torch._disable_dynamo
def run_in_turns(
    passes: tuple[Callable[[], Any], Callable[[], Any]],
    blocks: Iterable[nn.Module],
    begin: Callable[[int], None],
    check: Callable[[], None],
) -> list[Any]:
    """What ``passes`` return, of which the first runs in this thread and the second in another, and which take turns in front
    of ``blocks``.

    ``begin`` is called with 0 or 1 before that pass runs, and ``check`` before a pass lets the other one run. Pass 1 never
    gets ahead of pass 0. Raises what a pass or a check raises: that of pass 0 comes first, as if they ran one after the
    other, except for :class:`UnfitError`.
    """
    turns = _Turns(begin, check)
    results: list[Any] = [None, None]
    errors: list[BaseException] = []
    as_here = _state_of_thread()

    def second() -> None:
        try:
            as_here()
            turns.wait_for_first_turn()
            results[1] = passes[1]()
        except _GivenUpError:
            pass
        except BaseException as error:
            errors.append(error)
            turns.given_up = turns.given_up or isinstance(error, UnfitError)
        finally:
            turns.end(1)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(second,), daemon=True)
    handles = [block.register_forward_pre_hook(lambda *_: turns.pass_on(), prepend=True) for block in blocks]
    try:
        thread.start()
        begin(0)
        try:
            results[0] = passes[0]()
        except _GivenUpError:
            pass
        except BaseException:
            turns.given_up = True
            raise
        finally:
            with signals_deferred:
                turns.end(0)
                thread.join()
    finally:
        for handle in handles:
            handle.remove()
    if errors:
        raise errors.pop()
    return results


def _state_of_thread() -> Callable[[], None]:
    """Makes another thread compute as this one does, outside of modes."""
    cache, denormals = torch.is_autocast_cache_enabled(), _flushes_denormals()
    device, stream = None, None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        device, stream = torch.accelerator.current_device_index(), torch.accelerator.current_stream()

    def set_here() -> None:
        torch.set_grad_enabled(False)
        torch.set_autocast_cache_enabled(cache)
        if denormals != _flushes_denormals():
            torch.set_flush_denormal(denormals)
        if device is not None and stream is not None:
            torch.accelerator.set_device_index(device)
            torch.accelerator.set_stream(stream)

    return set_here


def _flushes_denormals() -> bool:
    return not bool(torch.full((), 2.0**-120, dtype=torch.float32, device="cpu").mul(2.0**-20))
