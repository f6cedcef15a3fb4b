"""What a plan knows of an accelerator, and how a step on one is measured."""

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, OffloadConfigError, attach
from hf_offload.planning import hardware, measuring
from hf_offload.planning.hardware import measure_hardware
from hf_offload.planning.machine import probe_machine
from hf_offload.storage.host_memory import RAM_SHARE, default_ram_budget, ram_bytes

DEVICE = torch.device("late:1")
MIB = 1 << 20


@pytest.fixture
def small(late, monkeypatch, tmp_path):
    """A small device, and measurements that take no time."""
    monkeypatch.setattr(hardware, "_MATMUL_SIZE", 32)
    monkeypatch.setattr(hardware, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(hardware, "_LONG_ENOUGH_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.accelerator.empty_cache()
    late.set_capacity(1, 64 * MIB)
    yield late
    late.set_capacity(1, 1 << 40)


def test_what_the_model_has_already_is_part_of_what_it_may_use(small):
    """Else a model that takes most of the card is counted twice, and refused."""
    weights = torch.ones(40 * MIB, dtype=torch.uint8, device=DEVICE)
    facts = probe_machine([], sample_bytes=0, device=DEVICE).device
    assert facts.total_bytes == 64 * MIB
    assert facts.free_bytes == 24 * MIB
    assert facts.usable_bytes == 64 * MIB
    assert measure_hardware([], DEVICE).memory_bytes.value == 64 * MIB
    del weights


def test_the_models_device_is_measured_and_nothing_stays(small):
    torch.accelerator.empty_cache()
    before = [torch.accelerator.memory_reserved(index) for index in range(2)], small.pinned_bytes()
    found = measure_hardware([], DEVICE)
    assert found.device == "late"
    assert found.store_bytes_per_s["ram"].value > 0
    assert torch.accelerator.current_device_index() == 0
    assert ([torch.accelerator.memory_reserved(index) for index in range(2)], small.pinned_bytes()) == before
    assert torch.accelerator.max_memory_reserved(1) > before[0][1]


def test_a_device_that_is_full_says_so(small):
    torch.accelerator.empty_cache()
    rest = torch.ones(64 * MIB, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(OffloadConfigError, match=r"late:1 cannot be measured: 0 B of 64.00 MiB are free"):
        measure_hardware([], DEVICE)
    del rest


def test_copies_beside_compute_are_not_taken_for_compute(late, monkeypatch):
    """Time stands still but for waiting for the whole device, copies and all, which takes a second."""
    copies_s = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: copies_s)
    synchronize = torch.accelerator.synchronize

    def whole_device(device=None):
        nonlocal copies_s
        copies_s += 1.0  # whatever was still copied has ended now
        synchronize(device)

    monkeypatch.setattr(torch.accelerator, "synchronize", whole_device)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to("late:0")
    meter = measuring.StepMeter(model, lambda: 0, lambda: 0.0, lambda: 0)
    meter.begin()
    meter.begin_forward([], True)
    model(torch.ones(4, 8, device="late:0")).sum().backward()
    meter.end()
    assert copies_s > 0
    assert sum(segment.seconds for segment in meter.footprint(0).segments) == 0


def test_streams_that_wait_for_copies_say_how_long(late):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).to("late:0")
    session = attach(model, OffloadConfig(tier="ram", min_bytes=0))
    engine = session._engine
    engine.transfer.mover.time_stalls()
    for seed in range(4):
        late.reseed(seed)
        model(torch.ones(64, 64, device="late:0")).sum().backward()
        session.end_step()
    torch.accelerator.synchronize()
    assert engine.waited_s() > engine.stats.waited_s
    session.detach()


def test_ram_is_limited_where_no_budget_says_how(late, monkeypatch):
    monkeypatch.setattr("hf_offload.storage.host_memory.ram_bytes", lambda: (100 * MIB, 50 * MIB))
    assert default_ram_budget(2) == int(50 * MIB * RAM_SHARE) // 2
    model = nn.Linear(8, 8).to("late:0")
    session = attach(model, OffloadConfig(tier="ram"))
    assert session._engine.transfer.tier.storage.ram.limit_bytes == int(50 * MIB * RAM_SHARE)
    session.detach()
    assert ram_bytes()[1] > 0


def test_without_settings_large_tensors_go_to_ram_and_none_to_a_drive(small, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "there is none"))
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(DEVICE)
    large, less = torch.ones(8192, 64, device=DEVICE), torch.ones(8191, 64, device=DEVICE)
    model(large).sum().backward()
    expected = [parameter.grad.cpu() for parameter in model.parameters()]
    for inputs, moved in ((large, True), (less, False)):
        model.zero_grad()
        session = attach(model, OffloadConfig())  # its first step moves all that it may
        model(inputs).sum().backward()
        assert (session.stats.step.offloaded_bytes > 0) is moved
        assert session.written() == {}
        if moved:
            assert all(map(torch.equal, expected, [parameter.grad.cpu() for parameter in model.parameters()]))
        session.detach()


def test_memory_that_cannot_be_pinned_leaves_tensors_where_they_are(late, caplog):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to("late:0")
    x = torch.ones(64, 64, device="late:0")
    model(x).sum().backward()
    expected = [parameter.grad.cpu() for parameter in model.parameters()]
    model.zero_grad()
    session = attach(model, OffloadConfig(tier="ram", min_bytes=0))
    late.fail_pinning(True)
    model(x).sum().backward()
    session.detach()
    assert all(map(torch.equal, expected, [parameter.grad.cpu() for parameter in model.parameters()]))
    assert "no memory can be pinned" in caplog.text


@pytest.mark.parametrize("looks", [False, True])
def test_gradients_that_are_looked_at_before_the_step_are_measured(looks, late):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to("late:0")
    optimizer = torch.optim.AdamW(model.parameters())
    session = attach(model, OffloadConfig(tier="none", optimizer="ram", min_bytes=0))
    session.prepare_optimizer(optimizer)
    meter = measuring.StepMeter(model, lambda: 0, lambda: 0.0, lambda: 0)
    meter.begin()
    meter.begin_forward([], True)
    model(torch.ones(4, 64, device="late:0")).sum().backward()
    held = [parameter.grad.view(-1) for parameter in model.parameters() if looks]
    optimizer.step()
    meter.end()
    assert meter.footprint(0).looks_at_gradients is looks
    assert len(held) == (4 if looks else 0)
    session.detach()
