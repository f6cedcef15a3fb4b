"""What moves bytes between an accelerator and a tier has to wait: one rule at a time, while streams are as late as can be."""

import errno
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from hf_offload.engine.device import AcceleratorDevice
from hf_offload.engine.staged import StagedMover
from hf_offload.errors import StorageError
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.ram import RamTier
from tests.faults.failing_calls import ALL, Faults

DEVICE = torch.device("late:1")  # the main thread's own is the other
NBYTES = 1 << 14
BUFFERS = 6


@pytest.fixture
def mover(late) -> Iterator[StagedMover]:
    tier = RamTier(pinned=True, arena_bytes=1 << 18)
    mover = StagedMover(AcceleratorDevice(DEVICE), tier, 1 << 18, lambda nbytes, unit, error: None)
    late.reseed(0, pace=0.0)
    yield mover
    mover.close()
    tier.close()


def filled(value: int) -> torch.Tensor:
    return torch.full((NBYTES,), value, dtype=torch.uint8, device=DEVICE)


def test_whoever_works_for_a_mover_has_its_device(mover):
    found = {}
    for name in ("_store_workers", "_load_workers", "_urgent_workers", "_arrival_workers"):
        ended = threading.Event()

        def ask(name: str = name, ended: threading.Event = ended) -> None:
            try:
                found[name] = torch.accelerator.current_device_index()
            finally:
                ended.set()

        getattr(mover, name).submit(ask)
        assert ended.wait(60)
    assert found == dict.fromkeys(found, DEVICE.index)
    assert len(found) == 4


def test_memory_goes_back_to_the_stream_that_had_it_once_that_stream_is_behind_the_copy(mover):
    """Another one may be current when the engine lets go of it."""
    own, other = (torch.Stream(device=DEVICE) for _ in range(2))
    slot = mover.reserve(NBYTES)
    with own:
        buffer = filled(3)
        mover.store(buffer, slot, lambda: None)
    address = buffer.data_ptr()
    del buffer
    with other:
        mover.advance(0)
    with own:
        assert filled(7).data_ptr() == address
    mover.store_stream.synchronize()
    assert bool((mover._tier.host_view(slot) == 3).all())
    mover.free(slot)


def test_a_load_for_one_stream_waits_for_the_copy_that_another_one_has_sent(mover):
    own, other = (torch.Stream(device=DEVICE) for _ in range(2))
    slot = mover.reserve(NBYTES)
    with own:
        mover.store(filled(3), slot, lambda: None)
        mover.advance(0)
    with other:
        target = torch.empty(NBYTES, dtype=torch.uint8, device=DEVICE)
        mover.arrive(mover.load(slot, target, urgent=True), target.untyped_storage())
        assert bool((target == 3).all())
    mover.free(slot)


def test_the_memory_of_a_slot_is_filled_again_only_after_the_copy_out_of_it(mover):
    slot, targets = mover.reserve(NBYTES), [torch.empty(NBYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    mover.store(filled(3), slot, lambda: None)
    mover.advance(0)
    load = mover.load(slot, targets[0], urgent=True)
    memory = mover._tier.host_view(slot).data_ptr()
    mover.free(slot)
    again = mover.reserve(NBYTES)
    assert mover._tier.host_view(again).data_ptr() == memory
    mover.store(filled(7), again, lambda: None)
    mover.store_stream.synchronize()
    mover.arrive(load, targets[0].untyped_storage())
    assert bool((targets[0] == 3).all())
    mover.free(again)


def test_a_mover_is_closed_once_nothing_is_on_its_way_out(mover):
    slots = [mover.reserve(NBYTES) for _ in range(BUFFERS)]
    for value, slot in enumerate(slots):
        mover.store(filled(value), slot, lambda: None)
    assert not mover.store_stream.query()
    mover.close()
    assert mover.store_stream.query()


def test_a_mover_is_closed_once_nothing_is_on_its_way_in(mover):
    """What is queued behind the one copy that a thread waits for holds its target no longer."""
    slots = [mover.reserve(NBYTES) for _ in range(BUFFERS)]
    for value, slot in enumerate(slots):
        mover.store(filled(value), slot, lambda: None)
    mover.advance(0)
    mover.store_stream.synchronize()
    for slot in slots:
        mover.load(slot, torch.empty(NBYTES, dtype=torch.uint8, device=DEVICE), urgent=False).result(20)
    mover.close()
    assert mover.load_stream.query()
    assert [bool((filled(9) == 9).all()) for _ in slots] == [True] * BUFFERS


def test_the_error_of_a_load_holds_no_memory(late, tmp_path, monkeypatch):
    tier = DiskTier(tmp_path)
    mover = StagedMover(AcceleratorDevice(DEVICE), tier, 1 << 18, lambda nbytes, unit, error: None)
    slot = mover.reserve(NBYTES)
    mover.store(filled(3), slot, lambda: None).result(20)
    mover.advance(0)
    before = torch.accelerator.memory_allocated(DEVICE)
    Faults(monkeypatch, "read_once", errno.EIO, ALL)
    gc.disable()
    try:
        target = torch.empty(NBYTES, dtype=torch.uint8, device=DEVICE)
        assert isinstance(mover.load(slot, target, urgent=False).exception(20), StorageError)
        del target
        ended = threading.Event()
        mover._arrival_workers.submit(ended.set)  # the thread that told of the error has left what it was in
        assert ended.wait(60)
        assert torch.accelerator.memory_allocated(DEVICE) == before
    finally:
        gc.enable()
        mover.close()
        tier.close()


@pytest.fixture(params=["ram", "ssd"])
def either(request, late, tmp_path) -> Iterator[StagedMover]:
    """A mover whose tier is memory that is copied to and from directly, or drives behind a ring."""
    tier = RamTier(pinned=True, arena_bytes=1 << 18) if request.param == "ram" else DiskTier(tmp_path)
    mover = StagedMover(AcceleratorDevice(DEVICE), tier, 1 << 18, lambda nbytes, unit, error: None)
    late.reseed(0, pace=0.5)
    yield mover
    mover.close()
    tier.close()


def test_a_target_goes_in_stream_order_once_compute_is_behind_its_load(late, either):
    """Not when the host has seen the copy end: it may be a whole backward ahead, and would fill the device with targets."""
    slot = either.reserve(NBYTES)
    with torch.accelerator.device_index(DEVICE.index):
        either.store(filled(3), slot, lambda: None).result(20)
        either.advance(0)
        torch.accelerator.synchronize()
        either.advance()
        before = torch.accelerator.memory_allocated(DEVICE)
        late.reseed(0, pace=0.0)
        target = torch.empty(NBYTES, dtype=torch.uint8, device=DEVICE)
        address = target.data_ptr()
        load = either.load(slot, target, True)
        load.result(20)
        either.arrive(load, target.untyped_storage())
        del target
        assert torch.accelerator.memory_allocated(DEVICE) == before
        after = [filled(7) for _ in range(64)]
        assert address in [one.data_ptr() for one in after]
        torch.accelerator.synchronize()
        assert all(bool((one.cpu() == 7).all()) for one in after)
    either.free(slot)


def test_a_target_that_compute_never_waited_for_stays_until_its_copy_has_ended(late, either):
    slot = either.reserve(NBYTES)
    with torch.accelerator.device_index(DEVICE.index):
        either.store(filled(3), slot, lambda: None).result(20)
        torch.accelerator.synchronize()
        either.advance()
        late.reseed(0, pace=0.0)
        target = torch.empty(NBYTES, dtype=torch.uint8, device=DEVICE)
        either.load(slot, target, True).result(20)
        del target
        after = [filled(7) for _ in range(64)]  # whoever gets its memory, nothing comes in after them
        torch.accelerator.synchronize()
        assert all(bool((one.cpu() == 7).all()) for one in after)
    either.free(slot)


def test_memory_of_a_slot_outlives_a_copy_into_it(mover):
    """Else what is unmapped, for another arena needs its room, is still written to."""
    slot = mover.reserve(NBYTES)
    memory = weakref.ref(mover._tier.host_view(slot).untyped_storage())
    with torch.accelerator.device_index(DEVICE.index):
        mover.store(filled(3), slot, lambda: None)
    mover.free(slot)
    mover._tier._drop_idle(0)
    assert mover._tier.occupied_bytes == 0
    assert memory() is not None
    mover.advance()
    assert memory() is not None
    mover.store_stream.synchronize()
    mover.advance()
    assert memory() is None


def test_a_mover_that_has_closed_copies_into_no_tier(mover):
    slot = mover.reserve(NBYTES)
    with torch.accelerator.device_index(DEVICE.index):
        mover.store(filled(3), slot, lambda: None)
        mover.advance(0)  # compute is behind the copy, and the host is not
    mover.close()
    assert bool((mover._tier.host_view(slot) == 3).all())
