"""Lives of records: they go with their graph, and every store and load ends in one of few ways."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch

from hf_offload.errors import OffloadError
from tests.helpers.controlled_tier import ControlledTier, Rig, compare, leaf


def test_records_die_with_the_graph_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        rig = Rig(min_bytes=256)
        with rig:
            h = leaf(64, 64) * 2
            small = h[:1, :8].tanh()  # kept, and the output of what saves it; the rest is offloaded
            y = (h.sin() * small.sum()).sum()
            kept = [weakref.ref(h), weakref.ref(small)]
        rig.settle()
        del h, small, y
        rig.assert_nothing_left()
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()


def test_copies_do_not_pile_up_under_retain_graph():
    x = leaf(64, 64)
    rig = Rig(read_ahead_bytes=0)
    with rig:
        h = x
        for _ in range(50):
            h = h.sin()
        y = h.sum()
        del h
    rig.settle()
    one = 64 * 64 * 4
    for _ in range(2):
        torch.autograd.grad(y, x, retain_graph=True)
        assert rig.transfer.ledger.resident_bytes <= 4 * one
    torch.autograd.grad(y, x)
    del y
    rig.assert_nothing_left()


def test_a_session_that_ended_serves_the_graphs_that_are_left():
    x = leaf(64, 64)
    expected = torch.autograd.grad((x * 2).sin().sum(), x)[0]
    rig = Rig()
    with rig:
        y = (x * 2).sin().sum()
        rig.settle()
        rig.engine.close()
        offloaded_bytes = rig.stats.offloaded_bytes
        late = (x * 5).sin().sum()  # packed after the end: only detached
        assert rig.stats.offloaded_bytes == offloaded_bytes
    (last,) = [thread for thread in threading.enumerate() if thread.name == "hf_offload-outlive"]
    assert rig.tier.live
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    late.backward()
    del y
    last.join(60)
    assert not last.is_alive()
    assert not rig.tier.live


def test_finalizers_take_no_lock():
    rig = Rig()
    with rig:
        y = (leaf(64, 64) * 2).sin().sum()
    rig.settle()
    graphs = [y]
    del y
    with rig.transfer.lock:
        thread = threading.Thread(target=graphs.clear, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "a finalizer waits for a lock that this thread holds"
    rig.assert_nothing_left()


def test_a_record_that_is_gone_cannot_be_found_again():
    """By an I/O thread, say, whose write has ended at that moment: it would count the bytes a second time."""
    rig = Rig()
    with rig:
        y = (leaf(64, 64) * 2).sin().sum()
    rig.settle()
    references = [reference for one in rig.engine._records._identities.values() for reference in one.records]
    assert all(reference() is not None for reference in references)
    found = []

    class Finalized:
        def put(self, cleanup):
            found.append([reference() for reference in references])

    for reference in references:
        record = reference()
        record.cleanup = type(record.cleanup)(record, Finalized())
        del record
    cleanups = [reference().cleanup for reference in references]
    del y
    assert len(cleanups) == 1
    assert found == [[None]]


def being_stored(function):
    """The sum of ``function(x * 2)``, of whose saved tensors the first is on its way out, behind a gate that is closed."""
    x, tier = leaf(64, 64), ControlledTier()
    tier.write_gate.clear()
    rig = Rig(tier)
    with rig:
        y = function(x * 2).sum()
    assert tier.writes_begun.acquire(timeout=60)
    return tier, rig, x, y


def test_a_store_in_flight_is_forwarded_from_memory():
    tier, rig, x, y = being_stored(torch.sin)
    expected = torch.autograd.grad((x * 2).sin().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)  # would hang if it waited for the store
    assert rig.stats.forwarded_bytes == 64 * 64 * 4
    assert rig.stats.loaded_bytes == 0
    tier.write_gate.set()
    del y
    rig.assert_nothing_left()


def test_a_store_that_has_not_begun_is_cancelled():
    tier, rig, x, y = being_stored(lambda h: h.sin().cos())  # the second waits in the queue
    torch.autograd.grad(y, x, retain_graph=True)  # or the end of the records would cancel their stores
    tier.write_gate.set()
    rig.settle()
    assert rig.stats.written_bytes == 64 * 64 * 4
    del y
    rig.assert_nothing_left()


def test_a_store_that_ends_does_not_drop_what_backward_has_kept():
    tier, rig, x, y = being_stored(torch.sin)
    torch.autograd.grad(y, x, retain_graph=True)
    tier.write_gate.set()
    rig.settle()
    assert rig.stats.written_bytes == 64 * 64 * 4
    torch.autograd.grad(y, x)
    assert rig.stats.loaded_bytes == 0
    del y
    rig.assert_nothing_left()


def test_an_original_that_is_still_alive_is_used():
    x = leaf(64, 64)
    rig = Rig()
    with rig:
        h = x * 2
        y = h.sin().sum()
    rig.settle()
    y.backward()
    assert rig.stats.loaded_bytes == 0
    assert rig.stats.aliased_bytes == 64 * 64 * 4
    assert torch.equal(x.grad, torch.autograd.grad((x * 2).sin().sum(), x)[0])


def test_backpressure_bounds_memory_and_a_slow_disk_only_costs_time():
    one = 64 * 64 * 4
    tier = ControlledTier()
    tier.write_gate.clear()
    rig = Rig(tier, write_behind_bytes=2 * one)
    x = leaf(64, 64)
    done = threading.Event()
    results = []

    def forward():
        with rig:
            h = x
            for _ in range(20):
                h = (h * 1.01).sin()
            results.append(h.sum())
        done.set()

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    assert tier.writes_begun.acquire(timeout=60)
    assert not done.wait(0.5), "forward ran on although nothing was written"
    tier.write_gate.set()
    assert done.wait(60)
    assert rig.stats.peak_resident_bytes <= 4 * one
    assert rig.stats.store_stall_s > 0
    results[0].backward()


def test_a_full_tier_keeps_tensors_and_says_so_once(caplog):
    one = 64 * 64 * 4
    rig = compare(lambda x: x.sin().cos().exp().tanh().sum(), leaf(64, 64), rig=Rig(ControlledTier(room_bytes=2 * one)))
    assert rig.stats.offloaded_bytes == 2 * one
    assert rig.stats.refused_bytes > 0
    assert len([record for record in caplog.records if "refused" in record.message]) == 1
    (room,) = [record.message for record in caplog.records if "This forward saved" in record.message]
    assert "saved 64.00 KiB" in room
    assert "took 32.00 KiB" in room


def test_a_failed_store_gives_its_room_back():
    tier = ControlledTier()
    tier.fail_writes = True
    rig = Rig(tier)
    with rig:
        y = (leaf(64, 64) * 2).sin().sum()
    rig.settle()
    assert not tier.live
    assert rig.transfer.ledger.own_bytes == 0
    assert rig.transfer.ledger.resident_bytes == 64 * 64 * 4
    y.backward()


@pytest.mark.parametrize("side", ["store", "load"])
def test_nobody_waits_under_the_lock(side):
    tier = ControlledTier()
    rig = Rig(tier, write_behind_bytes=0)
    if side == "store":
        tier.write_gate.clear()

    def step():
        with rig:
            y = (leaf(64, 64) * 2).sin().cos().sum()
        rig.settle()
        tier.read_gate.clear()
        y.backward()

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    if side == "store":
        assert tier.writes_begun.acquire(timeout=60)
    else:
        while not tier.started:
            thread.join(0.01)
    thread.join(0.1)  # until it waits
    free = rig.transfer.lock.acquire(timeout=60)
    assert free, "a thread that waits for a transfer holds the lock"
    rig.transfer.lock.release()
    tier.write_gate.set()
    while thread.is_alive():
        tier.read_gate.set()
        thread.join(0.01)


def test_a_failed_load_names_file_offset_and_module_and_can_be_repeated():
    tier = ControlledTier()
    rig = Rig(tier)
    x = leaf(64, 64)
    with rig:
        rig.engine.unit = "transformer.h.3"
        y = (x * 2).sin().sum()
    rig.settle()
    tier.fail_reads = True
    with pytest.raises(OffloadError, match=r"transformer\.h\.3.*no weight was changed.*/test/file at offset 4096"):
        torch.autograd.grad(y, x, retain_graph=True)
    tier.fail_reads = False
    assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad((x * 2).sin().sum(), x)[0])
    del y
    gc.collect()  # the error and the frames it came through
    rig.assert_nothing_left()


def test_several_threads_ask_for_one_record():
    rig = Rig()
    with rig:
        handle = rig.pack(leaf(64, 64).detach() * 2)
    rig.settle()
    # Whoever begins a load waits a little for the other, so that both would begin one if nothing kept them apart.
    both = threading.Barrier(2)
    allocate = rig.engine._device.allocate

    def slow(nbytes, phase):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return allocate(nbytes, phase)

    rig.engine._device.allocate = slow
    found = []
    threads = [threading.Thread(target=lambda: found.append(rig.engine.unpack(handle))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(one, leaf(64, 64) * 2) for one in found)
    assert rig.stats.loaded_bytes == 64 * 64 * 4
