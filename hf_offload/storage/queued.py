"""What tiers with worker threads share: futures, cancellation, and the life of a slot."""

import abc
import ctypes
import dataclasses
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from hf_offload.errors import StandstillError, StorageError
from hf_offload.interrupts import signals_deferred
from hf_offload.storage.buffers import PAGE
from hf_offload.storage.service import RunStorage
from hf_offload.storage.tier import Slot, Tier
from hf_offload.storage.workers import WorkerPool

logger = logging.getLogger(__name__)

_PyBUF_WRITE = 0x200
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.restype = ctypes.py_object
_view_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def memory(address: int, nbytes: int) -> memoryview:
    """A writable view of raw memory, which the caller keeps alive."""
    return _view_of(address, nbytes, _PyBUF_WRITE)


@dataclasses.dataclass(slots=True, eq=False)
class QueuedSlot(Slot):
    """A slot with its state; the tier's lock guards every field."""

    room_bytes: int = 0
    pending: int = 0  # transfers that have not ended; the room is kept until they have
    writing: list[range] = dataclasses.field(default_factory=list)  # the parts that are being written
    filled: bool = False
    freed: bool = False


class QueuedTransfer:
    """One write or read, run in parts by several workers; the part that ends last resolves the future.

    The buffer is held here and nowhere else, and released before the future resolves: a callback of the future finds the
    memory released. Parts work on its address.
    """

    def __init__(self, tier: "QueuedTier", kind: str, slot: QueuedSlot, buffer: torch.Tensor, begin: int):
        self.tier = tier
        self.kind = kind
        self.slot = slot
        self.buffer: torch.Tensor | None = buffer
        self.address = buffer.data_ptr()
        self.part = range(begin, begin + buffer.numel())  # of the slot's bytes
        self.payload: Any = None  # what the tier wants to remember between preparing, running and ending
        self.future: Future[None] = Future()
        self._lock = threading.Lock()
        self._state = "queued"
        self._left = 0
        self._error: BaseException | None = None

    def enqueue(self, pool: WorkerPool, parts: Sequence[Any], urgent: bool) -> None:
        self._left = len(parts)
        # First in the list of callbacks, so that a cancelled transfer releases its buffer before other callbacks run.
        # It holds the transfer, and that the tier, only weakly: a future that has ended keeps its callbacks.
        self.future.add_done_callback(functools.partial(_call, weakref.WeakMethod(self._when_cancelled)))
        pool.submit(*[functools.partial(self.run, part) for part in parts], urgent=urgent)

    def run(self, part: Any) -> None:
        """Run one part in a worker."""
        with self._lock:
            if self._state == "queued":
                # From here on cancel() fails; if it came first, no part ever runs.
                self._state = "running" if self.future.set_running_or_notify_cancel() else "cancelled"
                if self._state == "running":
                    self.tier._started(self)
            if self._state == "cancelled":
                return
        error = None
        if self._error is None:  # after a failure the remaining parts are only counted
            try:
                self.tier._work(self, part)
            except BaseException as raised:
                error = raised
        with self._lock:
            self._error = self._error or error
            error = None  # or the exception, its traceback and this frame would hold one another
            self._left -= 1
            last = self._left == 0
        if last:
            self._finish()

    def _finish(self) -> None:
        error, self._error = self._error, None
        self.buffer = None
        self.tier._ended(self, "done" if error is None else "failed")
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)

    def _when_cancelled(self, future: "Future[None]") -> None:
        if future.cancelled():
            with self._lock:
                if self._state == "queued":
                    # Now rather than when a worker takes it: concurrent.futures.wait() waits for this notice.
                    self._state = "cancelled"
                    future.set_running_or_notify_cancel()
            self.buffer = None
            self.tier._ended(self, "cancelled")


def _call(method: "weakref.WeakMethod[Callable[[Future[None]], None]]", future: "Future[None]") -> None:
    found = method()
    if found is not None:
        found(future)


class QueuedTier(Tier):
    """A tier that moves bytes in worker threads. Store and load have separate pools and wait for no other task."""

    def __init__(self, name: str, storage: RunStorage, account: str, *, write_threads: int, read_threads: int):
        self.name = name
        self.storage = storage
        self.stats = storage.open_account(account, name)
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._live: set[QueuedTransfer] = set()
        self._closed = False
        self._owner_pid = os.getpid()
        self._pools = {
            "write": WorkerPool(f"hf_offload-{name}-store", write_threads),
            "read": WorkerPool(f"hf_offload-{name}-load", read_threads),
        }
        # A tier that is dropped without close() must not leave threads behind. Queued transfers hold the tier, so
        # nothing is in flight when this runs; it may run in a worker, hence no joining.
        pools = list(self._pools.values())
        weakref.finalize(self, _reap_pools, pools, self._owner_pid).atexit = False

    def write(self, slot: Slot, buffer: torch.Tensor, begin: int = 0) -> "Future[None]":
        return self._submit("write", slot, buffer, False, begin)

    def read(self, slot: Slot, into: torch.Tensor, urgent: bool = False, begin: int = 0) -> "Future[None]":
        return self._submit("read", slot, into, urgent, begin)

    @signals_deferred
    def free(self, slot: Slot) -> None:
        assert isinstance(slot, QueuedSlot)
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            if not slot.freed:
                slot.freed = True
                if slot.pending == 0:
                    self._give_back(slot)

    def close(self) -> None:
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            live = list(self._live)
        for transfer in live:
            transfer.future.cancel()
        del live
        try:
            self.wait_for(self._is_quiet)
        except BaseException as error:  # Ctrl-C, too
            # A thread sits in a system call on a file that is open: closed now, the number could soon be another file's.
            threading.Thread(target=self._finish_closing, name=f"hf_offload-{self.name}-close", daemon=True).start()
            if not isinstance(error, StandstillError):
                raise
            logger.error("Closing while transfers are pending, which are abandoned: %s", error)
        else:
            self._finish_closing()

    def _is_quiet(self, timeout_s: float | None = None) -> bool:
        with self._quiet:
            return self._quiet.wait_for(lambda: not self._live, timeout_s)

    def _finish_closing(self) -> None:
        self._is_quiet()
        for pool in self._pools.values():
            pool.close()
        try:
            self._shut()
        except StandstillError as error:
            logger.error("Closing without waiting for the files, which a thread will close: %s", error)

    def _submit(self, kind: str, slot: Slot, buffer: torch.Tensor, urgent: bool, begin: int) -> "Future[None]":
        assert isinstance(slot, QueuedSlot)
        self._check_usable(kind)
        if (
            buffer.dtype != torch.uint8
            or buffer.dim() != 1
            or not buffer.is_contiguous()
            or buffer.device.type != "cpu"
        ):
            raise ValueError(
                f"The {self.name} tier moves one-dimensional contiguous uint8 CPU tensors, not {buffer.dtype} of shape "
                f"{tuple(buffer.shape)} on {buffer.device}: pass buffers.whole_storage(tensor)."
            )
        transfer = QueuedTransfer(self, kind, slot, buffer, begin)
        is_whole = transfer.part == range(slot.nbytes)
        ends_well = transfer.part.stop % PAGE == 0 or transfer.part.stop == slot.nbytes
        if not is_whole and (
            begin % PAGE or transfer.address % PAGE or not ends_well or transfer.part.stop > slot.nbytes
        ):
            raise ValueError(
                f"The buffer has {buffer.numel()} bytes for those from {begin} on of a slot that was reserved for "
                f"{slot.nbytes}: parts are whole pages, in memory, too."
            )
        self._begin(transfer, urgent)
        return transfer.future

    @signals_deferred
    def _begin(self, transfer: QueuedTransfer, urgent: bool) -> None:
        kind, slot = transfer.kind, transfer.slot
        with self._lock:
            self._check_usable(kind)  # again: close() may have come in between
            if slot.freed:
                raise StorageError(f"{kind} on a slot of the {self.name} tier that was freed: reserve a new one.")
            if any(part.start < transfer.part.stop and transfer.part.start < part.stop for part in slot.writing):
                raise StorageError(f"{kind} on {slot.location} before its write has ended: wait for that future first.")
            if kind == "read" and not slot.filled:
                raise StorageError(f"Nothing is stored in {slot.location}: its write failed, or there was none.")
            parts = self._prepare(transfer)
            slot.pending += 1
            if kind == "write":
                slot.writing.append(transfer.part)
            self._live.add(transfer)
        transfer.enqueue(self._pools[kind], parts, urgent)

    def _check_usable(self, action: str) -> None:
        if os.getpid() != self._owner_pid:
            raise StorageError(
                f"{action} on the {self.name} tier in a forked process (pid {os.getpid()}, opened by "
                f"{self._owner_pid}): its "
                "threads did not survive the fork. Open a tier of your own, or start the process with 'spawn'."
            )
        if self._closed:
            raise StorageError(f"{action} on the {self.name} tier after close(): the run it belonged to has ended.")

    def _started(self, transfer: QueuedTransfer) -> None:
        if transfer.kind == "write":
            with self._lock:
                transfer.slot.filled = transfer.slot.filled and len(transfer.part) < transfer.slot.nbytes

    def _ended(self, transfer: QueuedTransfer, outcome: str) -> None:
        slot = transfer.slot
        with self._lock:
            self._live.discard(transfer)
            slot.pending -= 1
            if transfer.kind == "write":
                slot.writing.remove(transfer.part)
                self._written(transfer, outcome)
                slot.filled = slot.filled or outcome == "done"
            if slot.freed and slot.pending == 0:
                self._give_back(slot)
            if not self._live:
                self._quiet.notify_all()

    @abc.abstractmethod
    def _prepare(self, transfer: QueuedTransfer) -> Sequence[Any]:
        """The transfer's parts, at least one. Called under the lock, in the caller's thread."""

    @abc.abstractmethod
    def _work(self, transfer: QueuedTransfer, part: Any) -> None:
        """Move one part. Called in a worker without the lock; raises StorageError."""

    def _written(self, transfer: QueuedTransfer, outcome: str) -> None:
        """A write has ended: ``done``, ``failed`` or ``cancelled``. Called under the lock."""

    @abc.abstractmethod
    def _give_back(self, slot: QueuedSlot) -> None:
        """Return the slot's room. Called once a slot, under the lock."""

    @abc.abstractmethod
    def _shut(self) -> None:
        """Release everything. Called once, with no transfer left. May raise StandstillError if that goes on in a thread."""


def _reap_pools(pools: list[WorkerPool], owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # in a forked child a lock of the pool may be held by a thread that is not there
        for pool in pools:
            pool.close(wait=False)
