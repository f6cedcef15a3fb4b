"""Writes that have begun and not ended, in their order."""

import collections
import threading

from hf_offload.engine.record import Settling


class WritesInFlight:
    """``nbytes`` is how much they write. Changed under ``lock``."""

    def __init__(self, lock: "threading.RLock"):
        self.nbytes = 0
        self._lock = lock
        self._ends: collections.deque[Settling] = collections.deque()

    def begin(self, end: Settling, nbytes: int) -> None:
        """Another one."""
        self.nbytes += nbytes
        self._forget_ended()
        self._ends.append(end)

    def oldest(self) -> Settling | None:
        """The end of the oldest of them."""
        with self._lock:
            self._forget_ended()
            return self._ends[0] if self._ends else None

    def _forget_ended(self) -> None:
        while self._ends and self._ends[0].done():
            self._ends.popleft()
