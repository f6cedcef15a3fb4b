"""Two tiers as one: the faster one first, the other for what does not fit."""

import dataclasses
from concurrent.futures import Future

import torch

from hf_offload.errors import TierFullError
from hf_offload.storage.tier import KeptSlot, Slot, Tier, TierStats


@dataclasses.dataclass(slots=True, eq=False)
class SpillSlot(Slot):
    """A slot of one of the two tiers."""

    tier: Tier
    inner: Slot

    @property
    def location(self) -> str:
        return self.inner.location


class SpillTier(Tier):
    """Reserves in ``first``, and in ``then`` what ``first`` has no room for. It owns both: :meth:`close` closes
    them.
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

    def reserve(self, nbytes: int, place: str | None = None) -> SpillSlot:
        try:
            if place == self.then.name:
                raise TierFullError(f"The plan keeps {self.first.name} for others.")
            return SpillSlot(nbytes, self.first, self.first.reserve(nbytes))
        except TierFullError as first_full:
            try:
                return SpillSlot(nbytes, self.then, self.then.reserve(nbytes))
            except TierFullError as then_full:
                raise TierFullError(f"Both tiers are full. {first_full} {then_full}") from then_full

    def write(self, slot: Slot, buffer: torch.Tensor, begin: int = 0) -> "Future[None]":
        assert isinstance(slot, SpillSlot)
        return slot.tier.write(slot.inner, buffer, begin)

    def read(self, slot: Slot, into: torch.Tensor, urgent: bool = False, begin: int = 0) -> "Future[None]":
        assert isinstance(slot, SpillSlot)
        return slot.tier.read(slot.inner, into, urgent, begin)

    def map(self, slot: Slot, private: bool = False) -> torch.Tensor | None:
        assert isinstance(slot, SpillSlot)
        return slot.tier.map(slot.inner, private)

    def free(self, slot: Slot) -> None:
        assert isinstance(slot, SpillSlot)
        slot.tier.free(slot.inner)

    def phase(self, slot: Slot) -> int:
        assert isinstance(slot, SpillSlot)
        return slot.tier.phase(slot.inner)

    def keep(self, slot: Slot) -> KeptSlot | None:
        assert isinstance(slot, SpillSlot)
        return slot.tier.keep(slot.inner)

    def host_view(self, slot: Slot) -> torch.Tensor | None:
        assert isinstance(slot, SpillSlot)
        return slot.tier.host_view(slot.inner)

    def copied(self, slot: Slot, kind: str) -> None:
        assert isinstance(slot, SpillSlot)
        slot.tier.copied(slot.inner, kind)

    @property
    def parts(self) -> tuple[Tier, Tier]:
        return self.first, self.then

    def close(self) -> None:
        try:
            self.first.close()
        finally:
            self.then.close()
