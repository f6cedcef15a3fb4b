"""Backward that is called with parameters whose memory comes and goes, and what checkpoints save of them.

These replace functions of the process, once and for good. For tensors that are no such parameters, they do nothing.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing

from hf_offload.parameters.recompute import is_of_checkpoint


class _Called(threading.local):
    with_parameters = False


_called = _Called()


@contextlib.contextmanager
def asking_in_backward() -> Iterator[None]:
    """A backward inside the block asks for parameters, although the function that it is in has been asked for already."""
    _called.with_parameters = True
    try:
        yield
    finally:
        _called.with_parameters = False


def ask_in_backward(using: Any) -> None:
    """Let :func:`asking_in_backward` work, and let gradients that backward begins with be parameters that are there while it
    runs, by ``using``. Idempotent.
    """
    own = torch.autograd._engine_run_backward
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        with using(args[1:2]):
            if not _called.with_parameters:
                return own(*args, **kwargs)
            _called.with_parameters = False  # it may run another one
            with torch._C._EnableTorchFunction():  # type: ignore[attr-defined]
                return own(*args, **kwargs)

    torch.autograd._engine_run_backward = run


def keep_inputs_of_checkpoints(is_demanded: Any, complete: Any) -> None:
    """Checkpoints keep parameters, after ``complete``, which may change them, and no alias of their memory that hooks around
    the model would return. One inside of another keeps no version: the outer one would give it what it computes with by then.
    Idempotent.
    """
    own = getattr(checkpointing, "_make_saved_tensor", None)  # of late
    if own is None or hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def make(value: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_demanded(value):
            return own(value, *args, **kwargs)
        complete(value)
        around = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
        if around is not None and is_of_checkpoint(around[0]):
            return value
        with _without_hooks():
            return own(value, *args, **kwargs)

    setattr(checkpointing, "_make_saved_tensor", make)  # noqa: B010


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    autograd: Any = torch._C._autograd
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        autograd._pop_saved_tensors_default_hooks()
        hooks.append(top)
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
