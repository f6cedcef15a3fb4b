"""Keeps fork() and direct I/O apart.

open(2) forbids fork() while direct reads run into private memory: the first of the two processes that touches such a
page gets a copy, and the bytes from the disk may land in the other's. So before a fork the running system calls are
waited for and new ones are held; afterwards the parent goes on and the child's copies of the files are closed.
"""

import contextlib
import errno
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hf_offload.forks import ForkHandler, watch_forks

if TYPE_CHECKING:
    from hf_offload.storage.disk import DiskTier


class Gate:
    """Counts the system calls that run, and holds new ones back before a fork.

    A call that does not end within ``limit_s`` is not waited for any longer. Should it end after all, it counts as failed:
    :meth:`passing` raises OSError, since its bytes may have landed in the other process.
    """

    limit_s = 120.0

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._holds = 0
        self._overtaken = 0

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        with self._changed:
            while self._holds:
                self._changed.wait()
            self._running += 1
            overtaken = self._overtaken
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                if not self._running:
                    self._changed.notify_all()
        if overtaken != self._overtaken:
            raise OSError(errno.EIO, "the process was forked meanwhile, and could not wait for this call any longer")

    def hold(self) -> None:
        """Let no new call pass and return when none runs, or those that run have had their time."""
        with self._changed:
            self._holds += 1
            if not self._changed.wait_for(lambda: not self._running, self.limit_s):
                self._overtaken += 1

    def release(self) -> None:
        with self._changed:
            self._holds -= 1
            self._changed.notify_all()


class _Held(threading.local):
    """The tiers that a fork of this thread holds back."""

    tiers: "tuple[DiskTier, ...]" = ()


class _Watch(ForkHandler):
    """The tiers that are open in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tiers: weakref.WeakSet[DiskTier] = weakref.WeakSet()
        self.held = _Held()

    def add(self, tier: "DiskTier") -> None:
        with self.lock:
            self.tiers.add(tier)
        watch_forks(self)

    def before(self) -> None:
        with self.lock:
            self.held.tiers = tuple(self.tiers)
        for tier in self.held.tiers:
            tier.gate.hold()

    def after_in_parent(self) -> None:
        for tier in self.held.tiers:
            tier.gate.release()
        self.held.tiers = ()

    def after_in_child(self) -> None:
        self.lock = threading.Lock()  # another thread may have held the old one
        tiers, self.held.tiers = self.held.tiers, ()
        self.tiers = weakref.WeakSet()
        for tier in tiers:
            tier.abandon_in_child()


_watch = _Watch()


def guard(tier: "DiskTier") -> None:
    """Keep forks away from the tier's system calls for as long as the tier lives."""
    _watch.add(tier)
