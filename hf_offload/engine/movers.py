"""How a buffer gets from the device into a tier and back: what the transfer layer asks for, and the way without copies."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from hf_offload.storage.tier import Slot, Tier


class Mover:
    """Moves bytes for the transfer layer: the tier reads and writes the tensors' own memory, without a copy.

    Where that cannot be, a subclass copies. A load's future gives what :meth:`arrive` needs, or None.
    """

    drops_early = False
    """Whether buffers go through ``drop``. If not, the buffer is free when the store's future is done."""

    def __init__(self, tier: Tier):
        self._tier = tier

    def reserve(self, nbytes: int, place: str | None = None) -> Slot:
        """Room for a buffer, in the part of the tier named ``place``. Raises as the tier does."""
        return self._tier.reserve(nbytes, place)

    def free(self, slot: Slot) -> None:
        """Give the room back, as the tier does."""
        self._tier.free(slot)

    def store(
        self, buffer: torch.Tensor, slot: Slot, drop: Callable[[], None], unit: str = "a tensor"
    ) -> "Future[None]":
        """Start writing. ``drop`` is called in a training thread as soon as the engine may let go of ``buffer``, unless
        the future already says so (see :attr:`drops_early`). ``unit`` is the module that saved it, for messages.
        """
        return self._tier.write(slot, buffer)

    def load(self, slot: Slot, target: torch.Tensor, urgent: bool) -> "Future[Any]":
        """Start reading into ``target``."""
        return self._tier.read(slot, target, urgent)

    def arrive(self, there: "Future[Any]", storage: torch.UntypedStorage) -> None:
        """Order the calling thread's compute behind the last transfer to or from ``storage``, which is done."""

    def advance(self, limit_bytes: int | None = None) -> None:
        """Let go of device buffers that have been copied, without waiting. Called in training threads.

        Beyond ``limit_bytes``, compute waits for copies that have not ended, oldest first, and those buffers go, too.
        """

    def time_stalls(self) -> None:
        """Find out from now on how long streams wait for copies, which their host does not see."""

    def stalled_s(self) -> float:
        """Seconds for which compute streams have waited for copies, as far as they have computed yet."""
        return 0.0

    def close(self) -> None:
        """Wait for what runs. The tier is closed by its owner."""
