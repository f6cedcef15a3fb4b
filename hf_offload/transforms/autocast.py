"""The autocast settings of a forward, for what runs again in backward, where autocast is off."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch


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
