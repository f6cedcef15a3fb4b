"""Memory and host time that are measured on an accelerator are its own, and reports say which one it was."""

import json
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.measure import now_s, peak_bytes
from hf_offload.cli.main import app
from hf_offload.settings.recipes import load_recipe
from hf_offload.training.gauges import choose_gauge
from hf_offload.training.report import TrainingReport
from hf_offload.training.run import run_recipe

MIB = 1 << 20


def block(device: torch.device | str) -> torch.Tensor:
    return torch.empty(64 * MIB, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("device", ["late:0", "late:1"])
def test_the_gauge_reads_the_allocator_of_its_device(late, device):
    gauge = choose_gauge(torch.device(device))
    gauge.settle()
    before = gauge.level()
    gauge.reset_peak()
    first, second = block(device), block(device)
    other = block("late:1" if device == "late:0" else "late:0")
    assert gauge.level() - before == gauge.in_use() - before == 128 * MIB
    del first, second
    gauge.synchronize()
    assert gauge.level() == before
    assert gauge.peak() - before == 128 * MIB
    gauge.settle()
    gauge.reset_peak()
    assert gauge.peak() == before
    del other


def test_a_device_without_an_index_is_the_one_of_who_asks(late):
    """Samples come from a thread of their own, whose current device is the first one."""
    torch.accelerator.set_device_index(1)
    try:
        gauge = choose_gauge(torch.device("late"))
        before, seen = gauge.level(), []
        held = block("late")
        sampler = threading.Thread(target=lambda: seen.append(gauge.level()))
        sampler.start()
        sampler.join()
    finally:
        torch.accelerator.set_device_index(0)
    assert seen == [before + 64 * MIB]
    del held


def test_a_device_that_pytorch_does_not_count_is_measured_as_the_process(late, caplog):
    gauge = choose_gauge(torch.device("meta"))
    assert gauge.level() > 0
    assert "does not count the memory of meta" in caplog.text


def test_benchmarks_count_on_the_device_that_they_are_given(late):
    device = torch.device("late:1")
    held = block(device)
    assert peak_bytes(lambda: block(device).add_(1), device) == 64 * MIB
    assert now_s(device) > 0
    del held


def report(path: Path) -> TrainingReport:
    return run_recipe(load_recipe(str(path), ()), measure=True, save=False, evaluate=False)


def test_a_report_says_the_device_and_counts_its_memory(late, tiny_recipe, monkeypatch):
    # accelerate knows backends by name, and takes any other one that it is told.
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "late:0")
    result = report(tiny_recipe)
    assert result.machine["device"] == "late"
    memory = result.memory
    assert memory["device"] == "late:0"
    assert memory["peak_source"] == "torch.accelerator.max_memory_allocated"
    assert memory["baseline_bytes"] > 4 * result.parameter_count  # the weights, in 32 bits
    assert memory["baseline_bytes"] < max(memory["step_peak_bytes"]) == memory["peak_bytes"] < 1 << 30


def test_what_a_tensor_costs_the_host_of_a_device_has_a_row(late):
    before = torch.accelerator.memory_allocated()
    result = CliRunner().invoke(app, ["bench", "overhead", "--tensors", "8", "--repetitions", "2", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["costs"]}
    assert rows["from the device"]["pack"]["median_us"] > 0
    assert rows["from the device"]["unpack_and_free"]["median_us"] > 0
    assert torch.accelerator.memory_allocated() == before
