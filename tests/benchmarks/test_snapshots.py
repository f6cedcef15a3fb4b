"""``python -m benchmarks snapshots``."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app

SMALL = "--layers 1 --width 64 --vocabulary 128 --batch 1 --sequence 16 --rounds 1 --json"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_all_ways_end_with_the_same_weights_and_the_stalls_of_each_are_known():
    result = CliRunner().invoke(app, ["snapshots", *SMALL.split()])
    assert result.exit_code == 0, result.output
    rows = {row["way"]: row for row in json.loads(result.stdout)["rows"]}
    assert list(rows) == ["none", "snapshots", "save_steps", "async_save"]
    assert all(row["same_bits"] for row in rows.values())
    assert rows["none"]["stall_s"] == 0
    assert all(row["stall_s"] > 0 for way, row in rows.items() if way != "none")
