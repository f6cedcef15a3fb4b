"""Counters of a tier that is made of tiers: whoever moves the bytes, they are counted where they are."""

import pytest
import torch

from hf_offload.engine import ring as rings
from hf_offload.storage.ram import RamTier
from hf_offload.storage.spill import SpillTier
from tests.helpers.controlled_tier import ControlledTier, Rig
from tests.helpers.simulated_device import SimulatedDevice


@pytest.fixture
def rig(monkeypatch):
    """A device's engine over RAM for one tensor, and another tier for the rest."""
    original = rings.PinnedRing.__init__
    monkeypatch.setattr(rings.PinnedRing, "__init__", lambda ring, capacity, pinned: original(ring, capacity, False))
    return Rig(SpillTier(RamTier(16 << 10, arena_bytes=16 << 10), ControlledTier()), device=SimulatedDevice(0))


def test_bytes_that_a_device_moves_behind_a_spill_tier_count(rig):
    x = torch.randn(64, 64, requires_grad=True)
    with rig:
        y = x.sin().cos().exp().sum()
    rig.transfer.mover.advance(0)
    rig.transfer.settle()
    torch.autograd.grad(y, x)
    ram, other = rig.tier.first.stats, rig.tier.then.stats
    assert ram.written_bytes == 16 << 10
    assert other.written_bytes == 2 * (16 << 10)
    assert rig.stats.written_bytes == 3 * (16 << 10)
    assert rig.stats.read_bytes == ram.read_bytes + other.read_bytes > 0


def test_a_bandwidth_is_that_of_the_tier_that_was_timed(rig):
    """A copy of the device's own is counted when it is queued: what was timed of the other tier says nothing of it."""
    x = torch.randn(64, 64, requires_grad=True)
    with rig:
        y = x.sin().cos().exp().sum()
    rig.transfer.settle()
    torch.autograd.grad(y, x)
    found = rig.engine.bandwidth()
    assert found.keys() == {"ram", rig.tier.then.name}
    assert found["ram"] == (0.0, 0.0)
    other = rig.tier.then.stats
    assert found[rig.tier.then.name] == pytest.approx(
        (other.written_bytes / other.write_busy_s, other.read_bytes / other.read_busy_s)
    )


def test_the_bandwidth_of_both_tiers_together_is_over_the_time_in_which_either_ran(monkeypatch):
    ram, disk = ControlledTier(), ControlledTier()
    both = SpillTier(ram, disk)
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    ram.stats.begin("write")
    disk.stats.begin("write")
    now = 2.0
    ram.stats.end("write", 200)
    now = 4.0
    disk.stats.end("write", 100)
    ram.stats.count("write", 1000)  # by a device, at an unknown speed
    assert both.stats.written_bytes == 1300
    assert both.stats.bytes_per_s[0] == 300 / 4
    assert (ram.stats.bytes_per_s[0], disk.stats.bytes_per_s[0]) == (100, 25)
