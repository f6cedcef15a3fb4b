"""The benchmark of accuracy: whole runs on a tiny model, what is kept of them, and its arithmetic."""

import dataclasses
import json

import numpy as np
import pytest
import transformers

from benchmarks.accuracy import Run, accuracy_rows, paired_difference, score
from tests.helpers.command_line import benchmark

WORDS = ["good", "bad", "film", "very", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its tokenizer, and sentences whose class is that of their first word."""
    folder = tmp_path_factory.mktemp("accuracy")
    (folder / "vocabulary").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = transformers.BertTokenizer(str(folder / "vocabulary"))
    tokenizer.save_pretrained(folder / "model")
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "model")
    (folder / "data" / "cola").mkdir(parents=True)
    for part, count in (("train", 64), ("validation", 20)):
        rows = [
            {"idx": row, "sentence": f"{WORDS[row % 2]} {' '.join(WORDS[2 : 3 + row % 3])}", "label": 1 - row % 2}
            for row in range(count)
        ]
        text = "\n".join(json.dumps(row) for row in rows)
        (folder / "data" / "cola" / f"{part}.jsonl").write_text(text)
    return folder


def call(folder, *options):
    arguments = ["--data-dir", folder / "data", "--model", folder / "model", "--output", folder / "out", *options]
    return benchmark("accuracy", *arguments)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft still uses the older name
def test_runs_are_made_once_and_compared(folder):
    options = ("--tasks", "cola", "--ways", "exact,wta-crs-0.3,lora+wta-crs-0.3", "--seeds", "0,1")
    first = call(folder, *options)
    assert first.exit_code == 0, first.output
    runs = sorted((folder / "out").glob("cola_*.json"))
    assert len(runs) == 6
    made = [file.stat().st_mtime_ns for file in runs]
    kept = {file.name: json.loads(file.read_text()) for file in runs}
    assert kept["cola_exact_seed0.json"]["sampled_layers"] == 0
    assert all("labels" not in run for run in kept.values())  # others' data is not copied
    assert kept["cola_wta-crs-0.3_seed0.json"]["sampled_layers"] == 2 * 5
    assert kept["cola_lora+wta-crs-0.3_seed0.json"]["sampled_layers"] == 2 * 3
    assert kept["cola_exact_seed0.json"]["train_loss"] != kept["cola_wta-crs-0.3_seed0.json"]["train_loss"]
    assert kept["cola_exact_seed0.json"]["train_loss"] != kept["cola_exact_seed1.json"]["train_loss"]
    again = call(folder, *options, "--json")
    assert [file.stat().st_mtime_ns for file in runs] == made
    rows = json.loads(again.stdout)
    assert [row["way"] for row in rows] == ["exact", "wta-crs-0.3", "lora+wta-crs-0.3"]
    assert rows[0]["difference"] is None
    assert rows[1]["difference"][1] <= rows[1]["difference"][0] <= rows[1]["difference"][2]
    assert "wta-crs-0.3" in (folder / "out" / "accuracy.md").read_text()
    assert not list((folder / "model").parent.glob("unused"))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--tasks", "sst2"), "holds no train.jsonl and no validation.jsonl"),
        (("--tasks", "colla"), "cola"),
        (("--tasks", "cola", "--ways", "wta-crs-0.33"), "wta-crs-0.3"),
        (("--tasks", "cola", "--seeds", "one"), "--seeds 'one'"),
    ],
)
def test_wrong_questions(folder, options, part):
    result = call(folder, *options)
    assert result.exit_code == 2
    assert part in " ".join(result.output.split())


# ------------------------------------------------------------------------------------------------------------ arithmetic


def test_matthews_correlation_is_that_of_the_table():
    labels = np.array([1] * 6 + [0] * 4)
    predicted = np.array(
        [1, 1, 1, 1, 0, 0, 1, 0, 0, 0]
    )  # 4 true positives, 2 false negatives, 1 false positive, 3 true
    expected = 100 * (4 * 3 - 1 * 2) / (5 * 6 * 4 * 5) ** 0.5
    assert score("matthews", predicted, labels) == pytest.approx(expected)
    assert score("matthews", np.ones(10), labels) == 0
    assert score("accuracy", np.stack([predicted, labels]), labels).tolist() == [70, 100]


LABELS = np.array([row % 2 for row in range(400)])


def run_of(way, seed, wrong):
    predicted = [1 - label if row < wrong else label for row, label in enumerate(LABELS.tolist())]
    return Run("sst2", way, seed, predicted, 0.1, 0)


def test_differences_are_paired():
    """Both err on the same rows but for a few: only those count, however many rows the sample holds."""
    exact = [run_of("exact", seed, 100) for seed in range(3)]
    ours = [run_of("wta-crs-0.3", seed, 104) for seed in range(3)]
    mean, low, high = paired_difference(ours, exact, LABELS)
    assert mean == pytest.approx(-1)
    assert -2.1 < low < mean < high <= 0
    assert paired_difference(exact, exact, LABELS) == (0, 0, 0)
    rows = accuracy_rows([*exact, *ours], {"sst2": LABELS})
    assert rows[0].values == (75, 75, 75)
    assert rows[0].spread == 0
    assert rows[1].difference == (mean, low, high)
    assert accuracy_rows(ours, {"sst2": LABELS})[0].difference is None


def test_seeds_that_only_one_side_has_are_left_out():
    exact, ours = [run_of("exact", 0, 100)], [run_of("crs-0.3", 0, 100), run_of("crs-0.3", 1, 300)]
    assert accuracy_rows([*exact, *ours], {"sst2": LABELS})[1].difference == (0, 0, 0)
    assert dataclasses.asdict(accuracy_rows(ours, {"sst2": LABELS})[0])["values"] == (75, 25)
