"""``python -m benchmarks state``."""

import json

from typer.testing import CliRunner

from benchmarks.__main__ import app

SMALL = "--layers 1 --width 64 --vocabulary 2048 --tokens 32 --steps 3 --rounds 1"


def test_each_way_is_measured_and_state_on_a_drive_has_the_same_bits(tmp_path):
    result = CliRunner().invoke(app, ["state", *SMALL.split(), "--directory", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    memory, ssd, in_backward = found["rows"]
    assert [row["way"] for row in found["rows"]] == ["memory", "ssd", "ssd-in-backward"]
    assert memory["moved_mb"] == 0
    assert ssd["same_bits"] is True
    assert ssd["moved_by_account"]["gradients"] > 0
    assert in_backward["moved_by_account"]["gradients"] == 0
    assert in_backward["moved_by_account"]["optimizer state"] > 0


def test_a_comparison_needs_the_run_in_memory():
    result = CliRunner().invoke(app, ["state", "--ways", "ssd"])
    assert result.exit_code == 2
    assert "memory must be among them" in result.output
