"""``python -m benchmarks state``."""

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.kernel import memory_group
from benchmarks.state.peers import LIMITED
from tests.helpers.command_line import benchmark

SMALL = "--layers 1 --width 64 --vocabulary 2048 --tokens 32 --steps 3 --rounds 1"


@pytest.mark.usefixtures("loaded_cells")
def test_each_way_is_measured_and_state_on_a_drive_has_the_same_bits(tmp_path):
    result = benchmark("state", *SMALL.split(), "--directory", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    memory, ssd, in_backward = found["rows"]
    assert [row["way"] for row in found["rows"]] == ["memory", "ssd", "ssd-in-backward"]
    assert memory["moved_mb"] == 0
    assert ssd["same_bits"] is True
    assert ssd["moved_by_account"]["gradients"] > 0
    assert in_backward["moved_by_account"]["gradients"] == 0
    assert in_backward["moved_by_account"]["optimizer state"] > 0


def _rows(directory: Path, ways: str) -> dict[str, dict]:
    result = benchmark("state", *SMALL.split(), "--directory", str(directory), "--json", "--ways", ways)
    assert result.exit_code == 0, result.output
    assert list(directory.iterdir()) == []
    return {row["way"]: row for row in json.loads(result.stdout)["rows"]}


@pytest.mark.usefixtures("loaded_cells")
def test_a_peer_that_is_not_installed_is_a_row_with_its_reason_and_others_run(tmp_path):
    rows = _rows(tmp_path, "mapped,memory,deepspeed-2-cpu,torchao")
    assert list(rows) == ["mapped", "memory", "deepspeed-2-cpu", "torchao"]
    assert rows["memory"]["same_bits"] is rows["mapped"]["same_bits"] is True
    assert rows["mapped"]["loss_difference"] == rows["mapped"]["weight_difference"] == 0
    for way in ("deepspeed-2-cpu", "torchao"):
        package = way.partition("-")[0]
        if importlib.util.find_spec(package) is None:
            assert f"{package} is not installed: docs/benchmarks.md says how." in rows[way]["error"]


@pytest.mark.usefixtures("loaded_cells")
def test_ways_with_a_limit_keep_it_or_say_why_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))  # no mkswap: the machine's swap is left alone
    rows = _rows(tmp_path, "memory,ssd,swap,mapped-limited")
    refusal = _refusal_of_groups()
    if refusal is not None:
        assert all(refusal in rows[way]["error"] for way in LIMITED)
        return
    assert "No such file or directory: 'mkswap'" in rows["swap"]["error"]
    assert rows["mapped-limited"]["same_bits"] is True
    limited = rows["mapped-limited"]["rounds"][0]
    assert 0 < limited["group_peak"] <= limited["group_limit"] == rows["ssd"]["rounds"][0]["group_peak"]


def _refusal_of_groups() -> str | None:
    try:
        with memory_group() as group:
            made = group
    except OSError as error:
        return str(error)
    assert not made.exists()
    return None


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        ("ssd", "memory must be among them"),
        ("memory,swap", "ssd must be among them"),
        ("memory,deepspeed", "deepspeed-2-cpu"),
    ],
)
def test_ways_that_cannot_be_compared_are_refused(ways, message):
    result = benchmark("state", "--ways", ways)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
