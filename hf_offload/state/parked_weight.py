"""The storage of a weight, which may owe an update or a move that was put off."""

import torch
from torch import Tensor

from hf_offload.state import guard
from hf_offload.state.parked import Parked


class ParkedWeight(Parked):
    """The storage of a weight."""

    compares = True

    def be_away(self, must: bool = False) -> bool:
        """See :meth:`Parked.be_away`: with all updates."""
        owed = [debt for tensor in self.tensors for debt in guard.debts_of(tensor) if debt is not self]
        if owed:
            self.wait_until_written()
        for debt in owed:
            debt.settle(unseen=False)
        return super().be_away(must)

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
