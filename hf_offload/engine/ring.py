"""The pinned memory through which records pass between a device and a drive, in chunks, each with a slot of its own.

While one chunk is written, the next is copied. A record as large as the ring would leave drive and link waiting for each
other, and a larger one would pin as much memory as it has bytes.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

from hf_offload.errors import TierFullError
from hf_offload.plan.rules import has_ring_room, ring_bytes_shared
from hf_offload.storage.buffers import PAGE
from hf_offload.storage.ram import RamTier
from hf_offload.storage.tier import Slot, Tier

T = TypeVar("T")


class PinnedRing:
    """Pinned staging buffers of any size, cut from one piece of memory; acquiring one waits until there is room.

    Demand loads (``urgent``) may use the last part, which stores and prefetches leave alone: a prefetch that waits for room
    never starves the load that backward needs.
    """

    behind: Tier | None = None
    """The tier whose transfers make room: a thread that waits for room stops waiting when it comes to a standstill."""

    def __init__(self, capacity_bytes: int, pinned: bool = True):
        self._capacity = -(-capacity_bytes // PAGE) * PAGE
        self._memory = RamTier(pinned=pinned, budget_bytes=self._capacity, arena_bytes=self._capacity)
        self._slots: dict[int, Slot] = {}
        self._used = 0
        self._released = 0
        self._room = threading.Condition()

    def acquire(self, nbytes: int, urgent: bool = False) -> torch.Tensor:
        limit = self._capacity if urgent else ring_bytes_shared(self._capacity)
        with self._room:
            slot = self._take(nbytes, limit)
            view = self._memory.host_view(slot)
            if view is None:
                raise TierFullError("The pinned ring has no memory of its own to copy to.")
            self._slots[view.data_ptr()] = slot
            self._used += nbytes
            return view

    def _take(self, nbytes: int, limit_bytes: int) -> Slot:
        tried = -1  # how often room had been given back then

        def may_fit() -> bool:
            return self._released != tried and has_ring_room(self._used, nbytes, limit_bytes)

        while True:
            (self.behind or self._memory).wait_for(lambda seconds: self._room.wait_for(may_fit, seconds))
            try:
                return self._memory.reserve(nbytes)
            except TierFullError:  # there is room, but in several pieces
                if not self._used:
                    raise
                tried = self._released

    def release(self, buffer: torch.Tensor) -> None:
        with self._room:
            self._memory.free(self._slots.pop(buffer.data_ptr()))
            self._used -= buffer.numel()
            self._released += 1
            self._room.notify_all()

    def close(self) -> None:
        self._memory.close()


@dataclasses.dataclass(slots=True, eq=False)
class ChunkedSlot(Slot):
    """Room for a buffer that is moved in chunks: their slots, in order."""

    chunks: list[Slot]


def chunks_of(slot: Slot) -> list[tuple[Slot, int, int]]:
    """The slots of a buffer's chunks, and where in the buffer each begins and ends, in bytes."""
    if not isinstance(slot, ChunkedSlot):
        return [(slot, 0, slot.nbytes)]
    ends = list(itertools.accumulate(chunk.nbytes for chunk in slot.chunks))
    return list(zip(slot.chunks, [0, *ends[:-1]], ends, strict=True))


class ChunkedTransfer(Generic[T]):
    """A buffer on its way: :attr:`done`, with what ``result`` gives, when all its chunks are, or one has failed."""

    def __init__(self, chunks: int, result: Callable[[], T]):
        self.done: Future[T] = Future()
        self._result = result
        self._left = chunks
        self._goes_on: bool | None = None
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """A chunk is about to be moved. Whether it still should be: not if the transfer was cancelled or has failed."""
        with self._lock:
            if self._goes_on is None:
                self._goes_on = self.done.set_running_or_notify_cancel()
            return self._goes_on and not self.done.done()

    def end(self, error: BaseException | None = None) -> None:
        """A chunk has been moved, or never will be."""
        with self._lock:
            if self.done.done():
                return
            self._left -= 1
            if error is None and self._left > 0:
                return
            result = self._result() if error is None else None
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(result)  # type: ignore[arg-type]  # there is one without an error
