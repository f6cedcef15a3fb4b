"""Several processes: each computes the losses of its part of a batch, and all make the same update.

Note: what ranks tell each other
    All have the same weights and draw the same directions, so that the losses of all parts are all that a rank has to know:
    a few bytes a step, and no gradients. What is different before the first step comes from rank 0, as with
    ``DistributedDataParallel``. Nothing is sent within a forward pass, so that an error in one rank's closure reaches the
    others, whose weights go back, too.

Note: whose bits
    Losses are added up micro-batch by micro-batch, and each in the order of ranks: as in one process that has the same
    micro-batches in this order.
"""

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.methods.mezo.directions import checksum
from hf_offload.methods.mezo.log import Trained, differences
from hf_offload.ranks import Ranks
from hf_offload.state.storages import moves

Losses = tuple[Tensor, Tensor]
"""Those of ``w + eps z`` and of ``w - eps z``, of each micro-batch ``[micro-batches]``."""


class Processes:
    """The ranks that train one model with MeZO. Methods are called by all of them, in the same order."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._has_met = False  # and all have the same weights

    def end(self) -> None:
        """The training is over: talk no more, until :meth:`begin`. Idempotent."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks, self._has_met = None, False

    def begin(
        self, model: nn.Module, setup: Mapping[str, Any], now: Mapping[str, Any], check: Callable[[], None]
    ) -> None:
        """Before weights move: ``check`` all ranks, let what they are ``now`` be the same, and weights when the first step
        begins.

        Raises what ``check`` raises, :class:`~hf_offload.errors.OffloadError` where it raises in another rank, and
        :class:`~hf_offload.errors.OffloadConfigError` for ranks that train something else.
        """
        self._ranks = self._ranks or Ranks()
        self._everyone(check)
        if not self._ranks.connected:
            return
        self.check_same({**now, **({} if self._has_met else {**setup, **_facts_of(model)})})
        if not self._has_met:
            self._take_first_weights(model, self._ranks)
            self._has_met = True

    def check_same(self, mine: Mapping[str, Any]) -> None:
        """Raise :class:`~hf_offload.errors.OffloadConfigError` in all ranks where not all have the same."""
        first, *others = self._everyone(lambda: mine)
        for rank, other in enumerate(others, 1):
            wrong = differences(first, other, "rank 0")
            if wrong:
                raise OffloadConfigError(
                    f"MeZO makes the same update in all processes, and rank {rank} has {wrong}: give all ranks the same "
                    "model, settings and schedule, on the same kind of device, and let all of them make each step."
                )

    def losses(self, compute: Callable[[], Losses], sums: bool) -> Losses:
        """The losses ``[]`` of the whole batch, of what ``compute`` returns in each rank: the mean of all micro-batches, or
        over ranks of their sums. Raises what it raises, and :class:`~hf_offload.errors.OffloadError` where it raises in
        another rank.
        """
        found = self._everyone(lambda: tuple(one.cpu() for one in compute()))
        return _total([plus for plus, _ in found], sums), _total([minus for _, minus in found], sums)

    def _everyone(self, call: Callable[[], Any]) -> list[Any]:
        """What ``call`` returns in each rank. An error in one is an error in all."""
        if self._ranks is None or not self._ranks.connected:
            return [call()]
        try:
            value = call()
        except BaseException as own:
            self._ranks.gather((textwrap.shorten(f"{type(own).__name__}: {own}", 200), None))
            raise
        found = self._ranks.gather((None, value))
        for rank, (error, _) in enumerate(found):
            if error is not None:
                raise OffloadError(
                    f"Rank {rank} has raised an error in a step of MeZO, which no rank makes then: {error}. Weights "
                    "have gone back."
                )
        return [value for _, value in found]

    @torch.no_grad()
    def _take_first_weights(self, model: nn.Module, ranks: Ranks) -> None:
        """Parameters and buffers that differ become those of rank 0."""
        named = _tensors_of(model)
        everyone = self._everyone(lambda: {name: checksum(one) for name, one in named.items()})
        for name, one in named.items():
            if any(other[name] != everyone[0][name] for other in everyone):
                value = one.detach().clone(memory_format=torch.contiguous_format).cpu()
                ranks.copy_first(value.view(-1).view(torch.uint8))
                if not ranks.is_first:
                    one.copy_(value)


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: one for name, one in itertools.chain(model.named_parameters(), model.named_buffers()) if moves(one)}


def _facts_of(model: nn.Module) -> dict[str, Any]:
    """What has to be the same before the first step: shapes, and the random numbers of the device."""
    weight = next(one for one in model.parameters() if one.requires_grad)
    drawn = torch.empty(1024, device=weight.device).normal_(generator=torch.Generator(weight.device).manual_seed(0))
    tensors = tuple(Trained.of(name, one, 0) for name, one in _tensors_of(model).items())
    return {"random numbers": checksum(drawn), "tensors": tensors}


def _total(by_rank: Sequence[Tensor], sums: bool) -> Tensor:
    """The sum, micro-batch by micro-batch and each in the order of ranks, or their mean."""
    count = len(by_rank) if sums else sum(len(parts) for parts in by_rank)
    rounds = itertools.zip_longest(*by_rank)
    parts: list[Tensor] = [part if count == 1 else part / count for each in rounds for part in each if part is not None]
    return sum(parts[1:], parts[0])
