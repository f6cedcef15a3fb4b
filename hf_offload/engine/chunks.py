"""Records that pass through the pinned ring are moved in chunks, each with a slot of its own.

While one chunk is written, the next is copied. A record as large as the ring would leave drive and link waiting for each
other, and a larger one would pin as much memory as it has bytes.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from hf_offload.storage.tier import Slot

T = TypeVar("T")


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
