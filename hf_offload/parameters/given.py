"""Copies that others were given where a run in memory gives them the tensors themselves."""

import weakref

import torch
from torch import Tensor


class GivenCopy:
    """A copy that others have, of which this holds the count of changes, and no memory."""

    def __init__(self, copy: Tensor):
        self._copy = weakref.ref(copy)
        self._probe = copy.detach()
        self._probe.data = torch.empty(0, dtype=copy.dtype, device=copy.device)
        self._version = copy._version

    @property
    def was_changed(self) -> bool:
        """Whether it was changed in place."""
        return self._probe._version != self._version

    @property
    def is_alive(self) -> bool:
        """Whether others still have it, or it was changed."""
        return self.was_changed or self._copy() is not None

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is this copy, or a view of it."""
        copy = self._copy()
        if copy is None or tensor.layout != torch.strided:
            return False
        return copy is tensor or copy.untyped_storage()._cdata == tensor.untyped_storage()._cdata
