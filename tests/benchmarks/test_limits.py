"""``python -m benchmarks limits``: the search itself, and the command with probes that are made up."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.limits import largest_that_fits
from hf_offload.bench.cell import CRASHED, DONE, OUT_OF_MEMORY, CellResult
from tests.helpers.bench_recipes import TINY_MODEL
from tests.helpers.command_line import benchmark, said

CRASH = CellResult(CRASHED, "RuntimeError: no such luck")


@pytest.mark.parametrize("capacity", [0, 1, 127, 128, 255, 256, 1000, 1024, 5000, 70_000, 131_072, 10**9])
@pytest.mark.parametrize("start", [128, 1024, 500, 200_000])
@pytest.mark.parametrize("multiple", [1, 128])
def test_the_search_finds_what_fits_to_an_eighth(capacity, start, multiple):
    asked = []

    def fits(value):
        asked.append(value)
        return value <= capacity

    low, high = largest_that_fits(fits, start=start, multiple=multiple, most=131_072)
    assert len(set(asked)) == len(asked) <= 20
    assert all(0 < value <= 131_072 and value % multiple == 0 for value in asked)
    if capacity >= 131_072:
        assert (low, high) == (131_072, None)
    else:
        assert low <= capacity < high
        assert high - low <= max(multiple, low // 8)
        assert low == max((value for value in asked if value <= capacity), default=0)


@pytest.mark.parametrize(("vary", "start", "capacity", "fits"), [("sequence", 256, 3000, 2944), ("batch", 2, 21, 20)])
def test_limits_searches_with_probes(recipe, monkeypatch, vary, start, capacity, fits):
    monkeypatch.setattr("benchmarks.limits.require_memory_limit", lambda: None)
    monkeypatch.setattr("hf_offload.bench.cell.require_memory_limit", lambda: None)
    probes = []

    def fake(spec, environment):
        setting = {"sequence": "data.sequence_length", "batch": "training.per_device_train_batch_size"}[vary]
        value = int(next(change for change in spec.overrides if change.startswith(setting)).partition("=")[2])
        probes.append((spec.strategy, value))
        assert not spec.measure
        assert spec.memory_limit_bytes == 24 << 30
        assert spec.overrides[-1] == "training.max_steps=2"
        if spec.strategy == "recompute" and value > 4 * start:
            return CRASH
        roomy = capacity * (4 if spec.strategy == "ours:ram" else 1)
        return CellResult(DONE if value <= roomy else OUT_OF_MEMORY, model=TINY_MODEL)

    monkeypatch.setattr("benchmarks.limits.run_cell", fake)
    arguments = [recipe, "--vary", vary, f"--{vary}", start, "--memory-limit", "24GiB", "--most", 4096, "--output", "l"]
    result = benchmark("limits", *arguments)
    assert result.exit_code == 0, result.stdout + result.stderr
    rows = {row["strategy"]: row for row in json.loads(Path("l/limits.json").read_text())["rows"]}
    assert capacity * 7 / 8 - 1 <= rows["baseline"]["fits"] <= capacity < rows["baseline"]["fails"]
    assert rows["baseline"]["model"] == TINY_MODEL
    assert rows["recompute"]["fits"] == 4 * start
    assert rows["recompute"]["error"] == "crashed: RuntimeError: no such luck"
    assert rows["ours:ram"]["fits"] > rows["baseline"]["fits"]
    assert len(set(probes)) == len(probes)
    assert "no such luck" in Path("l/limits.md").read_text()
    assert json.loads(benchmark("limits", *arguments, "--json").stdout) == json.loads(Path("l/limits.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--vary", "depth", "--memory-limit", "1GiB"], "vary='depth' is unknown"),
        ([], "give --memory-limit"),
        (["--memory-limit", "1GiB", "--most", "100"], "--most 100: give 128 or more"),
    ],
)
def test_limits_refuses_what_makes_no_sense(recipe, arguments, part):
    result = benchmark("limits", recipe, *arguments, "--dry-run")
    assert result.exit_code == 2
    assert part in said(result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_memory_limit_needs_cuda(recipe, monkeypatch):
    monkeypatch.setattr("benchmarks.limits.run_cell", lambda *_: pytest.fail("a probe ran"))
    result = benchmark("limits", recipe, "--memory-limit", "24GiB")
    assert result.exit_code == 2
    assert "needs a CUDA device, and this machine has none" in said(result)
