"""PyTorch's activation checkpointing: whether a forward is a recompute, and runs that no signal handler interrupts.

It switches autocast, hooks of saved tensors and generators, when a function runs and when it runs again. Ctrl-C in the midst
of that would leave them switched (``interrupts.py``): with autocast's nesting one too deep, every later step would read casts
of weights as they were before the optimizer's.
"""

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as _torch

from hf_offload.interrupts import signals_deferred

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


@signals_deferred
def checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """:func:`torch.utils.checkpoint.checkpoint` without reentrance; both runs of ``function`` are entry points."""
    is_recompute = False

    def run(*args: Any) -> Any:
        nonlocal is_recompute
        if is_recompute or not torch.is_grad_enabled():
            return function(*args)
        is_recompute = True
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        with torch.autograd.graph.saved_tensors_hooks(pack, signals_deferred(unpack)):
            return function(*args)

    return _torch.checkpoint(run, *args, use_reentrant=False, **options)


def in_recompute() -> bool:
    """Whether PyTorch's activation checkpointing runs a forward again in this thread, inside of a backward.

    Any other forward inside of a backward (in a hook, as GradCache has it, or in a function's own backward) is an ordinary
    one, whose graph has a backward of its own.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _RUN_BACKWARD:
        code = frame.f_code
        if code.co_name in ("recompute_fn", "backward") and code.co_filename == _torch.__file__:
            return True
        frame = frame.f_back
    return False
