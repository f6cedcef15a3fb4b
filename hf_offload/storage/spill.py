"""Two tiers as one: the faster one first, the other for what does not fit."""

from concurrent.futures import Future

import torch

from hf_offload.errors import TierFullError
from hf_offload.storage.tier import KeptSlot, Slot, Tier, TierStats


class SpillTier(Tier):
    """Reserves in ``first``, and in ``then`` what ``first`` has no room for: slots are theirs, and know of which. It owns
    both: :meth:`close` closes them.
    """

    def __init__(self, first: Tier, then: Tier):
        self.first = first
        self.then = then
        self.name = f"{first.name}+{then.name}"
        self.stats = TierStats()
        first.stats.wholes.append(self.stats)
        then.stats.wholes.append(self.stats)

    @property
    def where(self) -> str:
        return f"{self.first.where}, {self.then.where}"

    def reserve(self, nbytes: int, place: str | None = None) -> Slot:
        try:
            if place == self.then.name:
                raise TierFullError(f"The plan keeps {self.first.name} for others.")
            slot, tier = self.first.reserve(nbytes), self.first
        except TierFullError as first_full:
            try:
                slot, tier = self.then.reserve(nbytes), self.then
            except TierFullError as then_full:
                raise TierFullError(f"Both tiers are full. {first_full} {then_full}") from then_full
        slot.tier = tier
        return slot

    def write(self, slot: Slot, buffer: torch.Tensor, begin: int = 0) -> "Future[None]":
        return _of(slot).write(slot, buffer, begin)

    def read(self, slot: Slot, into: torch.Tensor, urgent: bool = False, begin: int = 0) -> "Future[None]":
        return _of(slot).read(slot, into, urgent, begin)

    def map(self, slot: Slot, private: bool = False) -> torch.Tensor | None:
        return _of(slot).map(slot, private)

    def free(self, slot: Slot) -> None:
        _of(slot).free(slot)

    def phase(self, slot: Slot) -> int:
        return _of(slot).phase(slot)

    def keep(self, slot: Slot) -> KeptSlot | None:
        return _of(slot).keep(slot)

    def host_view(self, slot: Slot) -> torch.Tensor | None:
        return _of(slot).host_view(slot)

    def copied(self, slot: Slot, kind: str) -> None:
        _of(slot).copied(slot, kind)

    @property
    def parts(self) -> tuple[Tier, Tier]:
        return self.first, self.then

    def close(self) -> None:
        try:
            self.first.close()
        finally:
            self.then.close()


def _of(slot: Slot) -> Tier:
    assert slot.tier is not None, "a slot of two tiers is one's of them"
    return slot.tier
