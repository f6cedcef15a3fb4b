"""The storage of a weight, which may owe an update or a move that was put off."""

import torch
from torch import Tensor

from hf_offload.state.parked import Parked


class ParkedWeight(Parked):
    """The storage of a weight."""

    is_weight = True

    def done(self) -> None:
        """See :class:`~hf_offload.state.guard.Debt`. Its unit lets it leave."""

    def count_change(self, tensor: Tensor) -> None:
        """A change of ``tensor``, which is one of its, is counted now and made later."""
        before = self.present_version()
        torch.autograd.graph.increment_version(tensor)
        if before == self.version:
            self.version = self.present_version()
        if before == self._read_version:
            self._read_version = self.present_version()
