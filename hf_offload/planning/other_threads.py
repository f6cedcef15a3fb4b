"""Backward in another thread than the forward: a dispatch mode that counts a step is on the stack of one thread only."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

_lock = threading.Lock()
_following: list[TorchDispatchMode] = []
_installed: list[tuple[Callable[..., Any], Callable[..., Any]]] = []  # the function of PyTorch's, and what replaces it


def follow_backward(mode: TorchDispatchMode) -> None:
    """Let ``mode`` see operations of every backward that begins from now on, in whichever thread, until
    :func:`let_backward_go`. Autograd takes the stack of the thread that calls it along to its own.
    """
    with _lock:
        _following.append(mode)
        if not _installed:
            own = torch.autograd._engine_run_backward
            _installed.append((own, _seen_in(own)))
            torch.autograd._engine_run_backward = _installed[0][1]


def let_backward_go(mode: TorchDispatchMode) -> None:
    """A backward that begins from now on is not seen. Idempotent."""
    with _lock:
        _following[:] = [one for one in _following if one is not mode]
        if _following or not _installed:
            return
        own, seen = _installed[0]
        if torch.autograd._engine_run_backward is seen:  # else something else goes on calling it
            torch.autograd._engine_run_backward = own
            _installed.clear()


def _seen_in(own: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        here, following = _get_current_dispatch_mode_stack(), tuple(_following)  # which others may change
        with contextlib.ExitStack() as stack:
            for mode in following:
                if not any(one is mode for one in here):
                    stack.enter_context(mode)
            return own(*args, **kwargs)

    return run
