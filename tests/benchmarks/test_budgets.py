"""``python -m benchmarks budgets``: real runs, in processes of their own."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app

RECIPE = """
model:
  architecture: gpt2
  config: {n_layer: 6, n_embd: 128, n_head: 4, n_positions: 128, vocab_size: 512}
data:
  source: random-tokens
  sequence_length: 128
training:
  output_dir: out
  seed: 7
  max_steps: 8
  per_device_train_batch_size: 8
  save_strategy: no
  disable_tqdm: true
offload: {min_bytes: 4KiB}
"""


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["budgets", *arguments])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budgets")
    (folder / "shape.yaml").write_text(RECIPE)
    result = run(
        str(folder / "shape.yaml"), "--shares", "80,1", "--steps", "8", "--output", str(folder / "out"),
        f"offload.directory={folder}",
    )  # fmt: skip
    return result, json.loads((folder / "out" / "budgets.json").read_text())


@pytest.mark.full
def test_a_budget_that_fits_is_kept_and_compared(done):
    result, (row, _) = done
    assert row["problem"] is None, result.stderr
    assert row["share"] == 0.8
    assert 0 < row["measured_peak_bytes"] <= 1.02 * row["budget_bytes"]
    assert row["predicted_peak_bytes"] == pytest.approx(row["measured_peak_bytes"], rel=0.1)
    assert row["best"] in ("recompute", "ours:ssd")  # the baseline needs more than the budget
    assert row["step_ratio"] > 0
    assert row["residency_bytes"] > 0


@pytest.mark.full
def test_a_budget_that_does_not_fit_says_what_would(done):
    result, (_, row) = done
    assert "is too small: the least this run can do with is" in row["problem"]
    assert result.exit_code == 0, "a refusal is a result, and the tables after it are still to be made"
    assert "80%" in result.stdout
    assert "refused" in result.stdout
    assert "too small" in " ".join(result.stderr.split())


@pytest.mark.parametrize("shares", ["", "much", "0", "80,-5", "300"])
def test_shares_that_are_none_are_refused(shares, tmp_path):
    result = run("gpt2-small", "--shares", shares, "--output", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "give per cent with commas between" in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()
