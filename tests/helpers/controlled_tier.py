"""A tier that does what a test tells it to, and an engine on top of it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import nn

from hf_offload.engine.device import CpuDevice, Device
from hf_offload.engine.hooks import Engine, Handle
from hf_offload.engine.transfer import Transfer
from hf_offload.errors import StorageError, TierFullError
from hf_offload.plan.plan import Keeping, Placement, Plan
from hf_offload.storage.buffers import PAGE
from hf_offload.storage.tier import Slot, Tier, TierStats
from hf_offload.storage.workers import WorkerPool


class MemorySlot(Slot):
    """A slot whose bytes lie in a clone; slots hash by identity."""

    __slots__ = ("bytes", "freed", "phase")


class ControlledTier(Tier):
    """Keeps clones. Close a gate and transfers of that kind wait before their first byte; set a failure and they fail."""

    name = "test"

    def __init__(self, room_bytes: int = 1 << 40):
        self.stats = TierStats()
        self.room_bytes = room_bytes
        self.write_gate = threading.Event()
        self.read_gate = threading.Event()
        self.write_gate.set()
        self.read_gate.set()
        self.fail_writes = False
        self.fail_reads = False
        self.live: set[MemorySlot] = set()
        self.started: list[str] = []
        self.writes_begun = threading.Semaphore(0)
        self._pools = {"write": WorkerPool("test-write", 1), "read": WorkerPool("test-read", 2)}

    def reserve(self, nbytes: int, place: str | None = None) -> MemorySlot:
        if self.stats.used_bytes + nbytes > self.room_bytes:
            raise TierFullError("the test's tier is full")
        slot = MemorySlot(nbytes)
        slot.bytes, slot.freed, slot.phase = None, False, 0
        self.live.add(slot)
        self.stats.reserve(nbytes)
        return slot

    def write(self, slot: MemorySlot, buffer: torch.Tensor, begin: int = 0) -> "Future[None]":
        assert begin == 0, "slots are written and read as a whole"
        slot.phase = buffer.data_ptr() % PAGE
        future: Future[None] = Future()
        box = [buffer]

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                box.clear()
                return
            self.writes_begun.release()
            self.write_gate.wait()
            if self.fail_writes:
                box.clear()
                future.set_exception(StorageError("/test/file at offset 0: No space left on device"))
                return
            self.stats.begin("write")
            slot.bytes = box.pop().clone()
            self.stats.end("write", slot.nbytes)
            future.set_result(None)

        self._pools["write"].submit(work)
        return future

    def read(self, slot: MemorySlot, into: torch.Tensor, urgent: bool = False, begin: int = 0) -> "Future[None]":
        assert begin == 0, "slots are written and read as a whole"
        if slot.freed:
            raise StorageError("read on a slot of the test's tier that was freed")
        if self.fail_writes and slot.bytes is None:
            raise StorageError("Nothing is stored in the test's slot: its write failed, or there was none.")
        self.started.append("urgent" if urgent else "ahead")
        future: Future[None] = Future()
        box = [into]

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                box.clear()
                return
            self.read_gate.wait()
            if self.fail_reads:
                box.clear()
                future.set_exception(StorageError("/test/file at offset 4096: Input/output error"))
                return
            self.stats.begin("read")
            box.pop().copy_(slot.bytes)
            self.stats.end("read", slot.nbytes)
            future.set_result(None)

        self._pools["read"].submit(work, urgent=urgent)
        return future

    def phase(self, slot: MemorySlot) -> int:
        return slot.phase

    def free(self, slot: MemorySlot) -> None:
        if not slot.freed:
            slot.freed = True
            self.live.discard(slot)
            self.stats.release(slot.nbytes)

    def close(self) -> None:
        self.write_gate.set()
        self.read_gate.set()
        for pool in self._pools.values():
            pool.close()


def wait_for_stores(transfer: Transfer) -> None:
    """Wait until the writes that have begun have ended, whatever became of them."""
    for write in list(transfer._writes._ends):
        assert write.wait(60)


class Rig:
    """An engine over a controlled tier; ``with rig:`` enters its hooks."""

    def __init__(
        self,
        tier: ControlledTier | None = None,
        model: nn.Module | None = None,
        *,
        min_bytes: int = 0,
        keep_units: frozenset[str] = frozenset(),
        read_ahead_bytes: int | None = None,
        write_behind_bytes: int | None = None,
        keeping: Keeping | None = None,
        device: Device | None = None,
    ):
        self.tier = tier or ControlledTier()
        device = device or CpuDevice()
        if (
            write_behind_bytes is None
        ):  # of a host's own memory nothing is held back, of a device's not much may be left
            write_behind_bytes = 1 << 40 if device.is_host else 32 << 10
        plan = Plan(
            default=Placement.SSD,
            placements=dict.fromkeys(keep_units, Placement.KEEP),
            min_bytes=min_bytes,
            read_ahead_bytes=read_ahead_bytes,
            write_behind_bytes=write_behind_bytes,
            keeping=keeping,
            reason="a test",
        )
        self.engine = Engine(model or nn.Identity(), plan, device, self.tier)
        self.transfer = self.engine.transfer

    def __enter__(self) -> "Rig":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.engine.pack, self.engine.unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.__exit__(*exc)
        self.engine.operation_ended()

    def pack(self, tensor: torch.Tensor) -> Handle:
        """What an operation that saves ``tensor`` gets, and has ended."""
        handle = self.engine.pack(tensor)
        self.engine.operation_ended()
        return handle

    @property
    def stats(self):
        return self.engine.stats.total

    def settle(self) -> None:
        """Wait until nothing is on its way out, so that the records' memory is really gone."""
        wait_for_stores(self.transfer)
        self._pool_idle()

    def _pool_idle(self) -> None:
        done = threading.Event()
        self.tier._pools["write"].submit(done.set)
        assert done.wait(60)

    def assert_nothing_left(self) -> None:
        """No record, no slot, no byte is left behind."""
        self.settle()
        self.transfer.reap()
        assert self.transfer.live_records == 0, f"{self.transfer.live_records} records"
        assert not self.tier.live, f"{len(self.tier.live)} slots"
        assert self.transfer.ledger.resident_bytes == 0, f"{self.transfer.ledger.resident_bytes} bytes"
        assert self.transfer.ledger.own_bytes == 0, f"{self.transfer.ledger.own_bytes} bytes, of the engine's own"
        assert not self.transfer._consumed, "copies that may be evicted"
        assert self.transfer.ledger.kept_bytes == 0, f"{self.transfer.ledger.kept_bytes} bytes, kept by the plan"


def leaf(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=dtype).requires_grad_()


def sines(x: torch.Tensor, count: int, during_backward: Callable[..., None] | None = None) -> torch.Tensor:
    """``count`` saved tensors in a row, each needed by one step of backward, after which ``during_backward`` is called."""
    h = x
    for _ in range(count):
        h = h.sin()
        if during_backward is not None:
            h.register_hook(during_backward)
    return h.sum()


def compare(function: Callable[..., torch.Tensor], *leaves: torch.Tensor, rig: Rig | None = None) -> Rig:
    """Gradients of ``function(*leaves)`` with and without the engine are equal to the bit. Returns the rig."""
    expected = torch.autograd.grad(function(*leaves), leaves)
    rig = rig or Rig()
    with rig:
        result = function(*leaves)
    rig.settle()  # so that everything really is gone from memory before backward asks for it
    found = torch.autograd.grad(result, leaves)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    del result
    rig.assert_nothing_left()
    assert rig.stats.offloaded_bytes > 0
    return rig
