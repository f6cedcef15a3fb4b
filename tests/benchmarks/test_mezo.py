"""``python -m benchmarks mezo``, in small."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app

pytestmark = pytest.mark.usefixtures("loaded_cells")
SMALL = "--layers 6 --width 256 --vocabulary 512 --tokens 32 --steps 3"


def test_a_small_model_is_trained_with_table_and_figures(tmp_path):
    directory, results = tmp_path / "drive", tmp_path / "results"
    directory.mkdir()
    arguments = ["mezo", *SMALL.split(), "--directory", str(directory), "--output", str(results), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert list(directory.iterdir()) == []
    found = json.loads(result.stdout)
    assert found == json.loads((results / "mezo.json").read_text())
    measured = found["measured"]
    assert measured["roofline_ratio"] == pytest.approx(measured["step_s"] / measured["roofline_s"])
    assert measured["cores_ratio"] == pytest.approx(measured["step_cores_s"] / measured["cores_s"])
    assert 0 < measured["written_bytes_per_weight"] <= 4
    again = 512 * 256 + 3 * 256 * 256  # the head, which is the embedding, and a weight that makes room for it
    assert 0 < measured["read_bytes_per_weight"] <= 4 * (1 + again / found["weights"])
    assert all(one["most_weight_bytes"] < 4 * found["weights"] / 2 for one in found["steps_taken"])
