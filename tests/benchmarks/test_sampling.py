"""The count of what sampling and elementwise recompute save at the paper's shapes."""

import json

import pytest

from benchmarks import sampling
from benchmarks.sampling import BASELINE, FAIR
from tests.helpers.command_line import benchmark


def test_ways_of_one_shape(tmp_path, monkeypatch):
    chosen = (BASELINE, FAIR, "lora, sampled 0.3, elementwise")
    monkeypatch.setattr(sampling, "WAYS", {way: sampling.WAYS[way] for way in chosen})
    result = benchmark("sampling", "t5-base", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    for part in ("t5-base, batch 128 x 128 tokens", "lora, sampled 0.3, elementwise", "eager : it"):
        assert part in result.output
    rows = {row["way"]: row for row in json.loads((tmp_path / "sampling.json").read_text())["rows"]}
    peaks = {way: row["peak_bytes"] for way, row in rows.items()}
    # The paper's claim for a T5-base at this ratio, against the baseline that it has.
    assert peaks[BASELINE] > peaks[FAIR] > 2.5 * peaks["lora, sampled 0.3, elementwise"]
    assert peaks[BASELINE] > 2.7 * peaks["lora, sampled 0.3, elementwise"]
    assert peaks[BASELINE] > 6 * rows["lora, sampled 0.3, elementwise"]["offloaded_peak_bytes"]
    assert f"{peaks[BASELINE] / peaks['lora, sampled 0.3, elementwise']:.2f}" in (tmp_path / "sampling.md").read_text()


def test_classification_has_one_label_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "WAYS", {way: sampling.WAYS[way] for way in (BASELINE, FAIR)})
    monkeypatch.setitem(sampling.SHAPES, "bert-base", {"batch": 2, "task": "sequence-classification"})
    result = benchmark("sampling", "bert-base", "--json", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert [row["shape"] for row in json.loads(result.stdout)] == ["bert-base"] * 2


@pytest.mark.parametrize(("arguments", "part"), [(("t5-bas",), "t5-base"), (("t5-base", "--gpu", "a1000"), "a1000")])
def test_wrong_questions(arguments, part, tmp_path):
    result = benchmark("sampling", *arguments, "--output", tmp_path)
    assert result.exit_code == 2
    assert part in result.output
