"""``python -m benchmarks weights``."""

import json

import pytest

from tests.helpers.command_line import benchmark

pytestmark = pytest.mark.usefixtures("loaded_cells")
SMALL = "--layers 6 --width 256 --vocabulary 512 --batch 1 --sequence 32 --steps 2 --rounds 1"


def _run(*arguments: str):
    return benchmark("weights", *SMALL.split(), *arguments)


def test_weights_on_a_drive_have_the_same_bits_and_frozen_ones_are_not_written(tmp_path):
    result = _run("--directory", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    assert list(tmp_path.iterdir()) == []
    rows = {(row["task"], row["way"]): row for row in json.loads(result.stdout)["rows"]}
    assert list(rows) == [(task, way) for task in ("full", "lora") for way in ("memory", "ssd")]
    assert all(row["same_bits"] for row in rows.values())
    assert rows["full", "memory"]["read_mb"] == 0
    moved = rows["full", "ssd"]["rounds"][0]["moved_bytes_per_step"]
    assert moved["weights written_bytes"] > 0
    assert moved["optimizer state written_bytes"] > 0
    assert rows["lora", "ssd"]["read_mb"] > 0


def test_peers_compute_forwards_with_the_same_loss_or_say_why_not(tmp_path):
    result = _run(
        "--directory", str(tmp_path), "--tasks", "forward", "--ways", "memory,ssd,accelerate,mapped-limited", "--json"
    )
    assert result.exit_code == 0, result.output
    rows = {row["way"]: row for row in json.loads(result.stdout)["rows"]}
    assert rows["ssd"]["same_bits"]
    assert rows["accelerate"]["same_bits"], rows["accelerate"]
    assert rows["mapped-limited"].get("same_bits") or "OSError" in rows["mapped-limited"]["error"]


def test_a_peer_that_does_not_train_says_so(tmp_path):
    result = _run("--directory", str(tmp_path), "--tasks", "full", "--ways", "memory,accelerate", "--json")
    assert result.exit_code == 0, result.output
    rows = {row["way"]: row for row in json.loads(result.stdout)["rows"]}
    assert "accelerate does not train" in rows["accelerate"]["error"]


def test_a_comparison_needs_the_run_in_memory_and_a_limit_the_way_whose_memory_it_is():
    for ways, missing in (("ssd", "memory must be among them"), ("memory,mapped-limited", "ssd must be among them")):
        result = _run("--ways", ways)
        assert result.exit_code == 2
        assert missing in " ".join(result.output.split())
