"""``python -m benchmarks large``, in small."""

import json
import statistics

import pytest

from benchmarks.large.forecast import forecast
from benchmarks.large.memory import KINDS
from benchmarks.large.shape import Shape
from tests.helpers.command_line import benchmark

SMALL = "--layers 6 --width 128 --vocabulary 512 --tokens 32 --steps 2 --budget 1MiB"
ROOFLINE = {"compute_s": 60.0, "both_bytes_per_s": 2e9, "write_bytes_per_s": 1e9, "read_bytes_per_s": 2e9}


def _run(arguments: str, *more: str):
    return benchmark("large", *arguments.split(), *more)


def test_a_small_model_is_trained_with_table_picture_and_figures(tmp_path):
    directory, results = tmp_path / "drive", tmp_path / "results"
    directory.mkdir()
    result = _run(SMALL, "--directory", str(directory), "--output", str(results), "--json")
    assert result.exit_code == 0, result.output
    assert "It will write about" in result.stderr
    assert list(directory.iterdir()) == []
    found = json.loads(result.stdout)
    assert found == json.loads((results / "large.json").read_text())
    assert (results / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert found["weights"] == found["made"]["weights"]
    assert len(found["steps_taken"]) == 2
    step = found["steps_taken"][1]
    weights = 4 * found["weights"]
    assert step["weights read_bytes"] > 0
    # What is still in memory when it is updated again is written once.
    assert weights // 3 < step["weights written_bytes"] <= weights
    assert step["gradients written_bytes"] == 0  # each weight is updated in backward
    assert step["optimizer state written_bytes"] > weights
    assert 0 < step["most_weight_bytes"] < weights // 2
    measured = found["measured"]
    assert measured["roofline_ratio"] == pytest.approx(measured["step_s"] / measured["roofline_s"])
    assert measured["read_bytes"] == step["read_bytes"]
    # Libraries alone are more than 100 MB of mapped files.
    assert 100e6 < measured["anonymous_bytes"] < measured["peak_bytes"] - 100e6
    assert all(set(KINDS) < set(one) for one in found["memory"])


def test_a_plan_is_made_within_a_budget_alone_and_its_prediction_is_that_of_before(tmp_path):
    small = SMALL.replace("--steps 2", "--steps 5").replace("1MiB", "4GiB")
    result = _run(small, "--auto", "--directory", str(tmp_path), "--output", str(tmp_path / "results"), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    steps = found["steps_taken"]
    first = next(number for number, step in enumerate(steps) if step["planned"] is not None)
    assert found["predicted"]["peak_bytes"] == steps[first]["planned"]["peak_bytes"]
    assert found["predicted"]["step_s"] == steps[first]["planned"]["step_s"]
    # Those before are learned from.
    assert found["measured"]["step_s"] == statistics.median(step["seconds"] for step in steps[first + 1 :])
    assert found["measured"]["written_bytes"] == 0  # the budget is far above what the run needs
    refused = _run(SMALL, "--auto", "--output", str(tmp_path / "other"))
    assert refused.exit_code == 2
    assert "learns from the first" in refused.stderr


def test_the_announced_bytes_of_gpt2_xl_are_within_its_limits():
    shape = Shape()
    expected = forecast(shape, ROOFLINE)
    assert shape.weights == pytest.approx(1.557e9, rel=1e-3)
    assert 16 * shape.weights > 24e9  # weights, gradients and state: more than the machine's memory
    assert expected.peak_bytes < shape.budget_bytes
    assert expected.total_written_bytes < 150e9
    assert f"write about {expected.total_written_bytes / 1e9:.0f} GB to /nvme" in expected.text(shape, "/nvme")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--most-written 1KB", "--most-written allows"),
        ("--budget many", "--budget"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_made(tmp_path, arguments, message):
    result = _run(f"{SMALL} {arguments}", "--directory", str(tmp_path / "."), "--output", str(tmp_path / "results"))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("way", ["", "--auto --steps 5 --budget 4GiB"])
def test_a_run_that_ends_before_a_step_is_measured_is_an_error(tmp_path, way):
    result = _run(f"{SMALL} --minutes 0 {way}", "--directory", str(tmp_path), "--output", str(tmp_path / "results"))
    assert result.exit_code == 1
    assert "give more --minutes, or more --steps" in " ".join(result.output.split())
    assert not (tmp_path / "results").exists()
