"""Parameters whose memory comes and goes, and ``torch.utils.checkpoint``.

Note: what a checkpoint saves
    Its forward saves nothing, and counts what would be saved. Backward calls the function again, keeps what that saves until
    it is used, and looks at no version: it computes with the parameters as they are by then. So hooks for one operation give
    a checkpoint what they would note of a parameter. What it keeps of one holds no memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as checkpointing
from torch import Tensor

from hf_offload.parameters.saved import SavedWeight

_FORWARD = "_checkpoint_hook."
_RECOMPUTE = "_recomputation_hook."


class _KeptWeight:
    """What a checkpoint that is called again keeps of a parameter, or a view of one."""

    requires_grad = False

    def __init__(self, weight: SavedWeight):
        self.weight = weight
        self.shape, self.dtype, self.device = weight.size, weight.dtype, weight.parameter.device  # which are compared

    def detach(self) -> "_KeptWeight":
        return self


def is_of_checkpoint(pack: Callable[..., Any]) -> bool:
    """Whether ``pack`` is the hook of a checkpoint."""
    name = getattr(pack, "__qualname__", "")
    return name.startswith((_FORWARD, _RECOMPUTE)) and pack.__module__ == checkpointing.__name__


def what_checkpoint_keeps(pack: Callable[..., Any], tensor: Tensor, weight: SavedWeight) -> Any:
    """What to give to ``pack``, the hook of a checkpoint, for ``tensor``, which is a parameter or a view of one."""
    if pack.__qualname__.startswith(_FORWARD):
        return tensor  # of which it takes the shape
    weight.version = None
    return _KeptWeight(weight)


def as_tensor(kept: Any) -> Any:
    """The tensor, in memory, for what the hook of a checkpoint has kept."""
    return kept.weight.unpack() if isinstance(kept, _KeptWeight) else kept


def resolve_in_checkpoints() -> None:
    """Let what checkpoints have counted before a parameter's memory could leave find what they keep now. Idempotent."""
    hook = getattr(checkpointing, _FORWARD[:-1], None)
    if hook is None or hasattr(hook.__init__, "__wrapped__"):
        return
    own = hook.__init__

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        unpack = self.unpack_hook
        self.unpack_hook = lambda holder: as_tensor(unpack(holder))

    hook.__init__ = init
