"""The one contract every storage tier fulfils.

A tier knows nothing of models, tensors' shapes or streams: it moves plain bytes of host memory. Buffers are
one-dimensional contiguous ``torch.uint8`` CPU tensors; they own their memory, so a transfer that holds one keeps it
alive.

Life of a slot::

    slot = tier.reserve(nbytes)          # room, or TierFullError at once
    tier.write(slot, buffer)             # -> Future[None]
    tier.read(slot, into)                # -> Future[None], any number of times
    tier.free(slot)                      # at any time, from any thread, twice if need be
"""

import abc
import concurrent.futures
import dataclasses
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from hf_offload.errors import StandstillError
from hf_offload.interrupts import signals_deferred

T = TypeVar("T")

_LOOKS = 10
# How long a wait may leave a signal unanswered.
_SIGNAL_DELAY_S = 0.1


@dataclasses.dataclass(slots=True, eq=False)
class Slot:
    """Room for ``nbytes`` bytes in a tier. Tiers subclass it with what they need to find the bytes again. ``tier`` is the one
    of several that has it.
    """

    nbytes: int
    tier: "Tier | None" = dataclasses.field(default=None, kw_only=True)

    @property
    def location(self) -> str:
        """Where the bytes are, for error messages: a file and an offset, or "RAM"."""
        return type(self).__name__


class KeptSlot:
    """Bytes on a drive that stay there as they are while this object is there, whatever becomes of their slot; ``let_go`` is
    called once it is not.

    What is written after its slot was held gets another slot. So a state as of a step needs no copy, and its room is free
    once it is not needed any more.
    """

    def __init__(self, let_go: Callable[[], object]):
        weakref.finalize(self, let_go).atexit = False


class TierStats:
    """Counters of one tier; bandwidth is bytes over the time in which at least one transfer of that kind ran.

    What is counted here is counted in ``wholes``, too: where the tier is a part of another, or one of several that a run has.
    """

    def __init__(self, *wholes: "TierStats") -> None:
        self.wholes = list(wholes)
        self._lock = threading.Lock()
        self.used_bytes = 0
        self.peak_used_bytes = 0
        self.written_bytes = 0
        self.read_bytes = 0
        self.timed_written_bytes = 0  # without those that a device moved
        self.timed_read_bytes = 0
        self.write_busy_s = 0.0
        self.read_busy_s = 0.0
        self.ended_calls = 0
        self._active = {"write": 0, "read": 0, "other": 0}
        self._since = {"write": 0.0, "read": 0.0, "other": 0.0}

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the counts so far."""
        with self._lock:
            return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def reserve(self, nbytes: int) -> None:
        with self._lock:
            self.used_bytes += nbytes
            self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
        for whole in self.wholes:
            whole.reserve(nbytes)

    def release(self, nbytes: int) -> None:
        with self._lock:
            self.used_bytes -= nbytes
        for whole in self.wholes:
            whole.release(nbytes)

    @property
    def running_calls(self) -> int:
        """System calls that have begun and not ended."""
        return sum(self._active.values())

    def count(self, kind: str, nbytes: int) -> None:
        """Count bytes that a device moved by itself, at an unknown speed."""
        with self._lock:
            if kind == "write":
                self.written_bytes += nbytes
            else:
                self.read_bytes += nbytes
        for whole in self.wholes:
            whole.count(kind, nbytes)

    def begin(self, kind: str) -> None:
        """Count the start of one system call; ``kind`` is ``"write"``, ``"read"`` or ``"other"``."""
        with self._lock:
            if self._active[kind] == 0:
                self._since[kind] = time.perf_counter()
            self._active[kind] += 1
        for whole in self.wholes:
            whole.begin(kind)

    def end(self, kind: str, nbytes: int) -> None:
        with self._lock:
            self.ended_calls += 1
            self._active[kind] -= 1
            busy_s = time.perf_counter() - self._since[kind] if self._active[kind] == 0 else 0.0
            if kind == "write":
                self.written_bytes += nbytes
                self.timed_written_bytes += nbytes
                self.write_busy_s += busy_s
            elif kind == "read":
                self.read_bytes += nbytes
                self.timed_read_bytes += nbytes
                self.read_busy_s += busy_s
        for whole in self.wholes:
            whole.end(kind, nbytes)

    @property
    def bytes_per_s(self) -> tuple[float, float]:
        """Bandwidth of writes and of reads; zero where nothing was timed."""
        write = self.timed_written_bytes / self.write_busy_s if self.write_busy_s else 0.0
        return write, self.timed_read_bytes / self.read_busy_s if self.read_busy_s else 0.0


class Tier(abc.ABC):
    """A place for bytes. Every method may be called from any thread; none but ``close`` waits for a transfer."""

    name: str
    stats: TierStats
    stall_limit_s: float = 120.0
    """How long transfers may run without one system call of theirs ending, before waiting for them is given up.

    A working drive ends one in a second, and the kernel gives up on a drive after 30 s: this is for a drive that is neither
    working nor known to be broken. It ends before other processes of the run time out (ten minutes).
    """
    _stood_still_after = -1

    def wait_for(self, wait: Callable[[float], bool]) -> None:
        """Call ``wait(seconds)`` until it returns True.

        Raises :class:`~hf_offload.errors.StandstillError` if system calls run and none of them ends for
        ``stall_limit_s``. Whatever they still read into or write from must not be used again.
        """
        seen, idle = -1, 0
        while not self._look(wait, self.stall_limit_s / _LOOKS):
            # Looks are counted, not seconds: a process that was stopped for an hour has not waited for an hour.
            stats = self.stats
            idle = idle + 1 if stats.ended_calls == seen and stats.running_calls else 0
            seen = stats.ended_calls
            if idle >= _LOOKS - 1 or (idle and seen == self._stood_still_after):
                self._stood_still_after = seen
                raise StandstillError(
                    f"The {self.name} tier ({self.where}) has not finished a single call for "
                    f"{self.stall_limit_s:.0f} s, so the drive hangs. Look at the kernel's log (dmesg), and name a "
                    "directory on another drive."
                )

    def _look(self, wait: Callable[[float], bool], seconds: float) -> bool:
        """Whether ``wait`` returns True within ``seconds``. Ctrl-C ends the wait, also where signals are deferred."""
        parts = math.ceil(seconds / _SIGNAL_DELAY_S) if signals_deferred.is_on else 1
        for _ in range(parts):
            if wait(seconds / parts):
                return True
            signals_deferred.deliver()
        return False

    def wait_until_done(self, *futures: "Future[Any]") -> None:
        """Wait for transfers, whatever becomes of them. Raises as :meth:`wait_for` does."""
        self.wait_for(lambda seconds: not concurrent.futures.wait(futures, seconds).not_done)

    def call_with_watchdog(self, call: Callable[[], T], undo: Callable[[T], None] = lambda result: None) -> T:
        """What ``call`` returns, which opens, enlarges or closes files: on a drive that hangs it would never end.

        It runs in a thread of its own. Raises :class:`~hf_offload.errors.StandstillError` if it comes to a standstill; should
        it end after all, ``undo`` is called with what it returned.
        """
        done: Future[T] = Future()
        work = threading.Thread(
            target=_call, args=(self.stats, call, undo, done), name=f"hf_offload-{self.name}-files", daemon=True
        )
        work.start()
        try:
            self.wait_until_done(done)
        except BaseException:  # Ctrl-C, too
            if not done.cancel() and done.exception() is None:  # it has ended just now
                undo(done.result())
            raise
        work.join()
        try:
            return done.result()
        finally:
            del done  # the traceback of an error holds this frame, and the error would hold itself

    @property
    def where(self) -> str:
        """Where the tier keeps its bytes, for messages."""
        return "memory"

    @abc.abstractmethod
    def reserve(self, nbytes: int, place: str | None = None) -> Slot:
        """Set room aside; ``place`` names the part to prefer in a tier that has several.

        Raises :class:`~hf_offload.errors.TierFullError`, which names the limit that was met.
        """

    @abc.abstractmethod
    def write(self, slot: Slot, buffer: torch.Tensor, begin: int = 0) -> "Future[None]":
        """Store ``buffer`` in the slot's bytes from ``begin`` on. The caller leaves it unchanged until the future is done.

        A part of a slot begins at a multiple of ``buffers.PAGE``, in the slot and in memory, and ends at one or at the end
        of the slot. Parts that do not overlap may be written at the same time.

        ``future.cancel()`` succeeds until the first byte is on its way; a cancelled slot may be freed or written again.
        A failure is set on the future as :class:`~hf_offload.errors.StorageError` and names file, offset and cause.
        """

    @abc.abstractmethod
    def read(self, slot: Slot, into: torch.Tensor, urgent: bool = False, begin: int = 0) -> "Future[None]":
        """Load the slot's bytes from ``begin`` on ``into`` a buffer, ahead of everything queued if ``urgent``. Parts as in
        :meth:`write`.

        Fast when ``into.data_ptr() % buffers.PAGE == phase(slot)``; right in any case.
        """

    @abc.abstractmethod
    def free(self, slot: Slot) -> None:
        """Give the room back, once the transfers in flight on the slot have ended. Idempotent; never raises."""

    def phase(self, slot: Slot) -> int:
        """Address modulo ``buffers.PAGE`` that a read target should have, so that nothing is copied."""
        return 0

    def host_view(self, slot: Slot) -> torch.Tensor | None:
        """The slot's own memory, where the tier is host memory a device can copy to and from directly."""
        return None

    def map(self, slot: Slot, private: bool = False) -> torch.Tensor | None:
        """The slot's bytes as host memory, which reads and writes them where they are; None where that cannot be. What is
        written to a ``private`` mapping is seen there alone.

        The slot was written in whole pages. A write to it is seen once its future is done.
        """
        return None

    def keep(self, slot: Slot) -> KeptSlot | None:
        """Hold the bytes of a slot that was written, also when it is freed; None where they are not on a drive."""
        return None

    def copied(self, slot: Slot, kind: str) -> None:
        """Count that a device has copied to (``"write"``) or from (``"read"``) the slot's :meth:`host_view`."""
        self.stats.count(kind, slot.nbytes)

    @property
    def parts(self) -> Sequence["Tier"]:
        """The tiers that this one is made of, each with counters of its own."""
        return (self,)

    @abc.abstractmethod
    def close(self) -> None:
        """Cancel what is queued, wait for what runs, give everything back. Idempotent.

        What comes to a standstill is left to a thread, which gives everything back should it ever end.
        """


def _call(stats: TierStats, call: Callable[[], T], undo: Callable[[T], None], done: "Future[T]") -> None:
    stats.begin("other")
    try:
        result = call()
    except BaseException as error:  # the waiting thread raises it
        stats.end("other", 0)
        if done.set_running_or_notify_cancel():
            done.set_exception(error)
    else:
        stats.end("other", 0)
        if done.set_running_or_notify_cancel():
            done.set_result(result)
        else:
            undo(result)
    finally:
        del done  # as above
