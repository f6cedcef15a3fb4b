"""How long a training's own threads are busy with bytes that move, by kind: what they do not compute meanwhile."""

import collections
import threading
import time

WAITS = "waits"
"""For a transfer to end: whatever it moves, that is not what handling it takes."""

_thread = threading.local()


class Handling:
    """Seconds of one run, by kind: the names of :mod:`~hf_offload.storage.service`'s accounts, and :data:`WAITS`.

    ``with handling.of(kind):`` counts what runs in it, in whichever thread. Where these are nested, in any number of runs, a
    second counts once: for the innermost.
    """

    def __init__(self) -> None:
        self._seconds: collections.defaultdict[str, float] = collections.defaultdict(float)

    def of(self, kind: str | None) -> "_Section":
        """A section that handles this kind; None: that computes, and is not counted."""
        return _Section(self._seconds, kind)

    def seconds(self, kind: str) -> float:
        """What this kind has taken so far."""
        return self._seconds[kind]

    @property
    def total_s(self) -> float:
        """What all kinds have taken so far, with waits and with this thread's section that runs."""
        section: _Section | None = getattr(_thread, "section", None)
        is_counted = section is not None and section._seconds is self._seconds and section._kind is not None
        running = time.perf_counter() - section._begin if section is not None and is_counted else 0.0
        return sum(self._seconds.values()) + running


class _Section:
    __slots__ = ("_begin", "_kind", "_outer", "_seconds")

    def __init__(self, seconds: collections.defaultdict[str, float], kind: str | None):
        self._seconds = seconds
        self._kind = kind

    def __enter__(self) -> None:
        self._outer: _Section | None = getattr(_thread, "section", None)
        self._begin = time.perf_counter()
        if self._outer is not None:
            self._outer._count(self._begin)
        _thread.section = self

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        self._count(now)
        _thread.section = outer = self._outer
        if outer is not None:
            outer._begin = now

    def _count(self, now: float) -> None:
        if self._kind is not None:
            self._seconds[self._kind] += now - self._begin
