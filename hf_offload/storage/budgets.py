"""Limits in bytes that several tiers share."""

import collections
import threading


class Budget:
    """Bytes that may be taken together. Thread-safe; :meth:`give` takes no lock, so finalizers may call it.

    Attributes:
        limit_bytes: Most bytes taken at any time; None for no limit. May change: what was taken stays taken.
        refused: Whether a request was refused since :meth:`restart`.
    """

    def __init__(self, limit_bytes: int | None = None):
        self.limit_bytes = limit_bytes
        self.refused = False
        self._lock = threading.Lock()
        self._taken = 0
        self._given: collections.deque[int] = collections.deque()

    @property
    def taken_bytes(self) -> int:
        with self._lock:
            return self._settle()

    @property
    def left_bytes(self) -> int | None:
        """None without a limit."""
        return None if self.limit_bytes is None else self.limit_bytes - self.taken_bytes

    def take(self, nbytes: int) -> bool:
        """Whether ``nbytes`` were left; they are taken then."""
        return self.take_up_to(nbytes, nbytes) is not None

    def take_up_to(self, most: int, least: int, granule: int = 1) -> int | None:
        """Take as many bytes as are left between ``least`` and ``most``, in multiples of ``granule``, and return how many;
        None, and nothing is taken, if fewer than ``least`` are left.
        """
        with self._lock:
            taken, size = self._settle(), most
            if self.limit_bytes is not None:
                size = min(most, (self.limit_bytes - taken) // granule * granule)
            if size < least:
                self.refused = True
                return None
            self._taken += size
            return size

    def give(self, nbytes: int) -> None:
        """Return bytes that were taken."""
        self._given.append(nbytes)

    def restart(self, limit_bytes: int | None) -> None:
        """Count from zero, up to another limit."""
        with self._lock:
            self._taken, self.limit_bytes, self.refused = 0, limit_bytes, False
            self._given.clear()

    def _settle(self) -> int:
        while self._given:
            self._taken -= self._given.popleft()
        return self._taken
