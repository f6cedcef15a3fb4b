"""What the backward of transformed operations needs: autocast as it was in forward, no signal handler in the middle, and an
error where it is differentiated again.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_offload.errors import SavedTensorModifiedError
from hf_offload.interrupts import signals_deferred


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in on ``device`` at this moment; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def autocast_as_now(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Makes contexts with autocast as it is at this moment."""
    return functools.partial(
        torch.autocast,
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,
    )


_MESSAGE = (
    b"A gradient of a gradient (create_graph=True) goes through a tiled loss, or a module that recomputes elementwise "
    b"operations in backward or samples its input, which give first gradients alone. Set tiled_loss='off' and "
    b"recompute_elementwise='off' (with tier='auto', a plan may have chosen them), and leave sampled_linear out."
)

_NOTE = (
    "Elementwise operations are recomputed in backward from this tensor, which without that need not be saved. "
    "recompute_elementwise='off' saves their results instead (with tier='auto', a plan may have chosen it)."
)


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's ``once_differentiable``, which lets a second derivative be lost where the first gradient is a constant: a
    second derivative through what ``backward`` returns is always an error. It is an entry point (``interrupts.py``).
    """

    @functools.wraps(backward)
    @signals_deferred
    def without_graph(ctx: Any, *gradients: Any) -> Any:
        try:
            with torch.no_grad():
                found = backward(ctx, *gradients)
        except (RuntimeError, SavedTensorModifiedError) as error:
            if "modified by an inplace operation" in str(error):
                error.add_note(_NOTE)
            raise
        if not torch.is_grad_enabled():
            return found
        several = found if isinstance(found, tuple) else (found,)
        there = [one.detach().requires_grad_() for one in several if isinstance(one, Tensor)]
        failing = torch._C._functions.DelayedError(_MESSAGE, len(there))
        refused = failing(*there)
        left = iter(refused if isinstance(refused, tuple) else (refused,))
        result = tuple(next(left) if isinstance(one, Tensor) else None for one in several)
        return result if isinstance(found, tuple) else result[0]

    return without_graph
