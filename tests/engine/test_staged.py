"""Device memory, pinned ring, tier: the accelerator's path, on a simulated device that runs copies as late as it may."""

import gc
import threading
import time

import pytest
import torch
from torch import nn

from hf_offload.engine import ring as rings
from hf_offload.errors import OffloadError, StorageError
from hf_offload.storage.buffers import PAGE
from hf_offload.storage.ram import RamTier
from tests.helpers.controlled_tier import ControlledTier, Rig
from tests.helpers.simulated_device import SimulatedDevice


@pytest.fixture(autouse=True)
def unpinned(monkeypatch):
    """Pinned memory needs a driver; the ring's logic does not."""
    original = rings.PinnedRing.__init__
    monkeypatch.setattr(rings.PinnedRing, "__init__", lambda ring, capacity, pinned: original(ring, capacity, False))


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32)) for _ in range(5)]
    return nn.Sequential(*blocks)


@pytest.mark.parametrize(("pace", "timed", "stalls"), [(0.0, True, True), (0.0, False, False), (1.0, True, False)])
def test_what_streams_wait_for_copies_is_no_compute(pace, timed, stalls):
    """The simulated device takes a second for each: only a copy that has not ended when compute needs it is waited for."""
    model, x = network(), torch.randn(16, 32)
    rig = Rig(RamTier(), model, device=SimulatedDevice(0, paces=(pace,)))
    if timed:
        rig.transfer.mover.time_stalls()
    with rig:
        y = model(x).square().sum()
    y.backward()
    in_streams_s = rig.engine.waited_s() - rig.engine.stats.waited_s
    assert (in_streams_s >= 1) is stalls
    assert rig.engine.waited_s() - rig.engine.stats.waited_s == pytest.approx(in_streams_s)  # and counted once
    rig.engine.close()


def test_source_memory_is_given_back_during_forward():
    rig = Rig(ControlledTier(), device=SimulatedDevice(0))
    x = torch.randn(64, 64, requires_grad=True)
    one = x.nbytes
    with rig:
        h = x
        for _ in range(30):
            h = h.sin()
        del h
    assert rig.stats.peak_resident_bytes <= 5 * one


def test_a_failed_write_is_served_from_the_staging_copy(caplog):
    tier = ControlledTier()
    tier.fail_writes = True
    rig = Rig(tier, device=SimulatedDevice(0))
    x = torch.randn(64, 64, requires_grad=True)
    expected = torch.autograd.grad(x.sin().cos().exp().tanh().sigmoid().sum(), x)[0]
    rig.engine.unit = "layers.3.mlp"
    with rig:
        y = x.sin().cos().exp().tanh().sigmoid().sum()
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    (message,) = [record.message for record in caplog.records if "No space left" in record.message]
    assert "refused layers.3.mlp (16.00 KiB)" in message
    del y
    gc.collect()
    rig.transfer.reap()
    rig.engine.close()


def test_a_failed_write_without_memory_for_its_bytes_is_an_error_of_backward(monkeypatch, caplog):
    tier = ControlledTier()
    tier.fail_writes = True
    rig = Rig(tier, device=SimulatedDevice(0))
    x = torch.randn(64, 64, requires_grad=True)

    def no_memory(tensor):
        raise RuntimeError("cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", no_memory)
        with rig:
            y = x.sin().cos().exp().tanh().sigmoid().sum()
        rig.settle()
    assert "cannot allocate memory" in caplog.text
    with pytest.raises(OffloadError, match=r"could not be read back.*[Nn]othing is stored"):
        torch.autograd.grad(y, x)
    assert rig.transfer.mover._ring._used == 0
    del y
    rig.engine.close()


def test_unpack_waits_for_the_end_of_a_store_and_does_not_ask_again_and_again(monkeypatch):
    """A future wakes who waits for it before the callback that changes the state has run."""
    rig = Rig(ControlledTier(), device=SimulatedDevice(0))
    x = torch.randn(64, 64, requires_grad=True)
    expected = torch.autograd.grad(x.sin().cos().sum(), x)[0]
    go, ended, asked, found = threading.Event(), [], [], []
    stored, wait = rig.transfer._stored, rig.transfer._await

    def end(*arguments):
        ended.append(arguments)
        assert len(ended) == 1 or go.wait(60)  # the second is that of sin(x), which nobody else holds
        stored(*arguments)

    monkeypatch.setattr(rig.transfer, "_stored", end)
    monkeypatch.setattr(rig.transfer, "_await", lambda *arguments: asked.append(arguments) or wait(*arguments))
    with rig:
        y = x.sin().cos().sum()
    rig.transfer.mover.advance(0)
    while len(ended) < 2:
        time.sleep(0.001)
    backward = threading.Thread(target=lambda: found.append(torch.autograd.grad(y, x)[0]), daemon=True)
    backward.start()
    while not asked:
        time.sleep(0.001)
    backward.join(0.3)
    asked_in_vain = len(asked)
    go.set()
    backward.join(60)
    assert asked_in_vain == 1
    assert torch.equal(found[0], expected)


def test_a_failed_read_can_be_repeated(monkeypatch):
    """What was to be filled is not taken for the record's bytes, however long it lives on, in an error's frames for one."""
    tier = ControlledTier()
    rig = Rig(tier, device=SimulatedDevice(0), read_ahead_bytes=32 << 10)
    x = torch.randn(64, 64, requires_grad=True)
    expected = torch.autograd.grad(x.sin().cos().exp().tanh().sigmoid().exp().sum(), x)[0]
    for _ in range(2):  # what backward needs first stays from the second step on, and the rest is read ahead
        with rig:
            y = x.sin().cos().exp().tanh().sigmoid().exp().sum()
        rig.settle()
        if not tier.fail_reads:
            torch.autograd.grad(y, x)
        tier.fail_reads = True
    targets, allocate = [], rig.transfer._device.allocate
    with monkeypatch.context() as patch:
        patch.setattr(rig.transfer._device, "allocate", lambda *size: targets.append(allocate(*size)) or targets[-1])
        with pytest.raises(OffloadError, match="Input/output error"):
            torch.autograd.grad(y, x, retain_graph=True)
    ahead = [cleanup.future for cleanup in rig.transfer._cleanups if cleanup.ahead]
    assert any(isinstance(future.exception(timeout=60), StorageError) for future in ahead)
    tier.fail_reads = False
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    assert len(targets) > 1


def test_a_write_that_fails_after_its_record_is_gone_leaves_nothing():
    tier = ControlledTier()
    tier.write_gate.clear()
    tier.fail_writes = True
    rig = Rig(tier, device=SimulatedDevice(0))
    x = torch.randn(64, 64, requires_grad=True)
    with rig:
        y = x.sin().cos().sum()
    assert tier.writes_begun.acquire(timeout=60)
    del y
    rig.transfer.reap()
    assert not tier.live
    tier.write_gate.set()
    rig.settle()
    assert not rig.transfer.mover._rescued
    rig.engine.close()


def test_a_demand_load_has_room_that_prefetches_leave_alone():
    half = 2 * PAGE
    ring = rings.PinnedRing(2 * half, False)
    stored = ring.acquire(half)
    prefetched = []
    thread = threading.Thread(target=lambda: prefetched.append(ring.acquire(half)), daemon=True)
    thread.start()
    while not prefetched and not ring._room._waiters:
        time.sleep(0.001)
    demanded = ring.acquire(half, urgent=True)  # would wait for ever behind a prefetch that nobody takes
    ring.release(stored)
    ring.release(demanded)
    thread.join()
    ring.release(prefetched.pop())
    ring.close()


@pytest.fixture
def narrow(monkeypatch):
    """An engine whose ring has room for one tensor of :func:`ones`, and for another only if it is urgent."""
    monkeypatch.setattr("hf_offload.plan.rules.RING_BYTES", 2 * ones(1).nbytes)
    return Rig(ControlledTier(), device=SimulatedDevice(0))


def ones(times: float) -> torch.Tensor:
    return torch.full((64, 64), float(times))


def unpacked_in_time(rig, handle):
    found = []
    thread = threading.Thread(target=lambda: found.append(rig.engine.unpack(handle)), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits for somebody who waits for it"
    return found[0]


def test_a_demand_load_is_not_behind_a_prefetch_that_waits_for_room(narrow):
    early, late = [narrow.pack(ones(times)) for times in (1, 2)]
    narrow.transfer.mover.advance(0)
    narrow.settle()
    ring = narrow.transfer.mover._ring
    stored = ring.acquire(ones(1).nbytes)
    with narrow.transfer.lock:
        narrow.transfer.start_load(early.record)
    while not ring._room._waiters:
        time.sleep(0.001)
    unpacked_in_time(narrow, late)
    ring.release(stored)
    assert torch.equal(narrow.engine.unpack(early), ones(1))
    narrow.engine.close()


def test_a_load_that_waits_for_room_does_not_hold_up_the_store_that_makes_it(narrow):
    early = narrow.pack(ones(1))
    mover = narrow.transfer.mover
    mover.advance(0)
    narrow.settle()
    go = threading.Event()
    for pool in (mover._store_workers, mover._load_workers):
        pool.submit(go.wait)
    with narrow.transfer.lock:
        narrow.transfer.start_load(early.record)
    narrow.pack(ones(2))  # takes the room, after the load was queued and before it is served
    go.set()
    assert torch.equal(unpacked_in_time(narrow, early), ones(1))
    narrow.engine.close()
