"""Random graphs over a device that runs everything in any order that events allow, from many seeds.

``python -m tests.races --seed N`` repeats one seed. The mutations in ``tests/mutations`` show what these tests can see.
"""

import random

import pytest
import torch

from hf_offload.storage.ram import RamTier
from tests.helpers.controlled_tier import Rig
from tests.helpers.seed_search import attempt
from tests.helpers.seeded_scheduler import Workers
from tests.helpers.simulated_device import SimulatedDevice
from tests.races.runs import expected, play, random_case, run

_SEEDS = 200
pytestmark = pytest.mark.usefixtures("one_thread")


def test_gradients_are_exact_in_every_order_that_events_allow():
    found = {seed: problems for seed in range(_SEEDS) if (problems := attempt(run, seed))}
    assert not found, f"python -m tests.races --seed {min(found)}: {found[min(found)]}"


def test_plain_autograd_is_exact_in_every_order_that_events_allow():
    """What the simulation calls legal is so: without the engine, no order makes a difference."""
    for seed in range(50):
        case = random_case(seed)
        device = SimulatedDevice(seed, late_compute=True, streams=case.streams)
        found = [gradient for scene in case.scenes for gradient in play(scene, device, None)]
        device.finish()
        assert not device.faults
        assert all(torch.equal(one, other) for one, other in zip(found, expected(case, seed), strict=True))


def test_one_seed_is_one_run():
    def trace(seed):
        events = []
        assert run(seed, events) == []
        return events

    for seed in (3, 7):
        assert len(trace(seed)) > 100
        assert trace(seed) == trace(seed)


def test_a_copy_that_was_evicted_and_is_still_alive_is_waited_for_by_every_stream():
    device = SimulatedDevice(0, late_compute=True, streams=2, paces=(0.0,))
    _, second = device.compute_streams
    workers = Workers(random.Random(0))
    with workers.installed():
        rig = Rig(RamTier(), device=device)
        rig.transfer.lock = workers.lock()
        value = device.launch(lambda output: output.fill_(1.5), (8, 8))
        handle = rig.pack(value)
        rig.transfer.mover.advance(0)
        del value
        loaded = rig.engine.unpack(handle)
        rig.transfer.evict_beyond(0)
        assert handle.record.buffer is None
        with device.on(second):
            again = rig.engine.unpack(handle)
            copied = device.launch(lambda output, value: output.copy_(value), (8, 8), again)
        assert again.data_ptr() == loaded.data_ptr()
        device.synchronize(device.record(second))
        assert torch.equal(copied, torch.full((8, 8), 1.5))
        assert rig.stats.loaded_bytes == handle.record.nbytes  # once


def test_the_memory_of_a_slot_is_written_again_only_after_the_last_copy_out_of_it():
    """Also if the next record is of another stream, which is behind nothing that the last one's did."""
    device = SimulatedDevice(0, late_compute=True, streams=2, paces=(0.0,))
    first, second = device.compute_streams
    workers = Workers(random.Random(0))
    with workers.installed():
        rig = Rig(RamTier(), device=device, read_ahead_bytes=0)
        rig.transfer.lock = workers.lock()
        with device.on(second):
            value = device.launch(lambda output: output.fill_(1.5), (8, 8))
            handle = rig.pack(value)
            rig.transfer.mover.advance(0)
            del value
            loaded = rig.engine.unpack(handle)
            copied = device.launch(lambda output, value: output.copy_(value), (8, 8), loaded)
        memory = rig.tier.host_view(handle.record.slot).data_ptr()
        del loaded, handle
        rig.transfer.reap()
        with device.on(first):
            other = rig.pack(device.launch(lambda output: output.fill_(2.5), (8, 8)))
        assert rig.tier.host_view(other.record.slot).data_ptr() == memory
        device.synchronize(device.record(rig.transfer.mover.store_stream))
        device.synchronize(device.record(second))
        assert torch.equal(copied, torch.full((8, 8), 1.5))
