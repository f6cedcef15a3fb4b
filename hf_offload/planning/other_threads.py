"""Backward in another thread than the forward: a dispatch mode that counts a step is on the stack of one thread only."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hf_offload.interrupts import signals_deferred


class Follower(TorchDispatchMode):
    """A mode that sees backward.

    Attributes:
        is_broken_off: Whether one has ended with an error.
    """

    is_broken_off = False


_lock = threading.Lock()
_following: list[Follower] = []
_installed: list[tuple[Callable[..., Any], Callable[..., Any]]] = []  # the function of PyTorch's, and what replaces it


def follow_backward(mode: Follower) -> None:
    """Let ``mode`` see operations of every backward that begins from now on, in whichever thread, until
    :func:`let_backward_go`, and note those that end with an error. Autograd takes the stack of the thread that calls
    it along to its own.
    """
    with _lock:
        _following.append(mode)
        if not _installed:
            own = torch.autograd._engine_run_backward
            _installed.append((own, _seen_in(own)))
            torch.autograd._engine_run_backward = _installed[0][1]


def let_backward_go(mode: Follower) -> None:
    """A backward that begins from now on is not seen. Idempotent. Takes no lock, and may be called wherever the garbage
    collector may run: PyTorch's function is put back by :func:`put_back`, or by the next backward.
    """
    with contextlib.suppress(ValueError):
        _following.remove(mode)


def put_back() -> None:
    """Let PyTorch's function run backward if no mode follows it any more."""
    with signals_deferred, _lock:
        if _following or not _installed:
            return
        own, seen = _installed[0]
        if torch.autograd._engine_run_backward is seen:  # else something else goes on calling it
            torch.autograd._engine_run_backward = own
            _installed.clear()


def _seen_in(own: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _following:
            put_back()
        here = _get_current_dispatch_mode_stack()
        elsewhere = [mode for mode in tuple(_following) if not any(one is mode for one in here)]
        entered: list[Follower] = []
        try:
            try:
                with signals_deferred:
                    for mode in elsewhere:
                        mode.__enter__()
                        entered.append(mode)
                return own(*args, **kwargs)
            except BaseException:
                for mode in tuple(_following):
                    mode.is_broken_off = True
                raise
            finally:
                _leave(entered)
        finally:
            _leave(entered)  # a signal may have come before the section in which it is done

    return run


def _leave(entered: list[Follower]) -> None:
    with signals_deferred:
        while entered:
            entered.pop().__exit__(None, None, None)
