"""A drive whose calls fail, or do not end: put where the disk tier looks them up (:mod:`hf_offload.storage.disk_io`)."""

import os
import threading

from hf_offload.storage import disk_io
from hf_offload.storage.tier import Tier

TIMEOUT_S = 60
ALL = range(1 << 30)
EIO, ENOSPC = 5, 28


class Faults:
    """Makes the calls of one side fail whose numbers, from 0, are in ``which``."""

    def __init__(self, monkeypatch, side, number, which):
        self.calls = 0
        self.failed = 0
        self._real = getattr(disk_io, side)
        self._number = number
        self._which = which
        self._lock = threading.Lock()
        monkeypatch.setattr(disk_io, side, self._call)

    def _call(self, *arguments):
        with self._lock:
            fails = self.calls in self._which
            self.calls += 1
            self.failed += fails
        if fails:
            raise OSError(self._number, os.strerror(self._number))
        return self._real(*arguments)


class Hang:
    """Calls of one kind hang until :meth:`end`, and whoever waits for them is impatient as long as they do: no sooner, for
    a busy machine may take its time over a call that does end. Those that are ``done`` have done their work before.
    """

    def __init__(self, monkeypatch, side, done=False):
        self._monkeypatch = monkeypatch
        self._done = done
        monkeypatch.setattr(Tier, "stall_limit_s", 0.3)
        self.inside = threading.Event()
        self._go = threading.Event()
        self._real = getattr(disk_io, side)
        monkeypatch.setattr(disk_io, side, self._call)

    def _call(self, *arguments):
        found = self._real(*arguments) if self._done else None
        self.inside.set()
        assert self._go.wait(TIMEOUT_S)
        return found if self._done else self._real(*arguments)

    def end(self):
        self._monkeypatch.setattr(Tier, "stall_limit_s", TIMEOUT_S)
        self._go.set()
