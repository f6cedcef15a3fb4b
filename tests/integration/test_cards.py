"""Model cards: those that a Trainer writes, and those made from a run's record."""

import contextlib
import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_offload import OffloadCallback, OffloadConfig, OffloadConfigError
from hf_offload.reports.card import CardFacts, card_of
from hf_offload.reports.card_memory import Comparison
from hf_offload.settings.recipes import load_recipe
from hf_offload.training.report import TrainingReport
from tests.helpers.command_line import command, said
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_recipe import write_tiny_recipe
from tests.helpers.trainers import make_trainer

ROOT = Path(__file__).parents[2]


def run(folder, trainer_class=Trainer, callbacks=(), **settings):
    trainer = make_trainer(folder, tiny_model("llama"), kind=trainer_class, callbacks=callbacks, **settings)
    trainer.train()
    trainer.create_model_card(model_name="tiny")
    return (folder / "README.md").read_text(encoding="utf-8")


def section(text):
    return text.partition("\n## Memory\n")[2]


def test_a_trainers_card_tells_of_offloading(tmp_path):
    text = run(tmp_path, offload="ssd", offload_directory=str(tmp_path), offload_min_bytes=0, sampled_linear=0.5)
    said = section(text)
    assert "tier='ssd' was asked for" in said
    assert "changes no bit of a gradient" in said
    assert "linear layers were estimated" in said
    assert "written" in said
    assert ModelCard(text).data.library_name == "transformers"
    assert text.count("## Memory") == 1


def test_any_way_of_switching_on_and_any_trainer(tmp_path):
    class Own(Trainer):
        """Writes a card of its own, as TRL's do."""

        def create_model_card(self, *args, **kwargs):
            super().create_model_card(*args, **kwargs)
            card = Path(self.args.output_dir) / "README.md"
            card.write_text(card.read_text(encoding="utf-8") + "\n## Own\n", encoding="utf-8")

    offloaded = OffloadCallback(OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0))
    text = run(tmp_path / "first", Own, [offloaded])
    assert text.count("\n## Memory\n") == 1
    assert "## Own" in text
    assert offloaded.summary[-1] in section(text)


def test_a_callback_that_is_added_later(tmp_path):
    trainer = make_trainer(tmp_path, tiny_model("llama"), arguments=TrainingArguments)
    trainer.add_callback(OffloadCallback(OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0)))
    trainer.train()
    trainer.create_model_card()
    assert section((tmp_path / "README.md").read_text(encoding="utf-8"))


def test_cards_of_other_trainings_stay_as_they_are(tmp_path):
    run(tmp_path / "first", offload="ssd", offload_directory=str(tmp_path), offload_min_bytes=0)
    assert not section(run(tmp_path / "second"))
    # A training that was offloaded, and one after it with the same callback that was stopped, has nothing to tell of it.
    callback = OffloadCallback(OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0))
    run(tmp_path / "third", callbacks=[callback])
    assert callback.summary

    class Stop(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "fourth", callbacks=[callback, Stop()])
    assert callback.summary == []


# ------------------------------------------------------------------------------------------------- from a run's record

FACTS = [
    "--name", "tiny", "--dataset", "Made-up words", "--dataset-license", "cc0-1.0", "--license", "apache-2.0",
    "--dataset-url", "https://example.org/words", "--language", "en,de",
]  # fmt: skip
COMPARISON = ROOT / "model_cards" / "bench" / "cpu_gpt2_12_layers.json"  # of two rounds


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that was trained once."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_tiny_recipe(folder)
    with contextlib.chdir(folder):
        changes = ["data.validation=text.txt", "evaluation.metrics=[perplexity]"]
        result = command("train", recipe, *changes, "--report", folder / "report.json")
    assert result.exit_code == 0, result.output + result.stderr
    return folder


@pytest.fixture
def record(trained, tmp_path, monkeypatch):
    """A copy of its record, in the current directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "report.json"):
        shutil.copy(trained / name, tmp_path)
    return tmp_path / "report.json"


def test_a_card_from_a_record(record, tmp_path):
    result = command("card", record, "--output", tmp_path / "card", *FACTS, "--comparison", COMPARISON, "--plot")
    assert result.exit_code == 0, result.output + result.stderr
    text = (tmp_path / "card" / "README.md").read_text(encoding="utf-8")
    report = TrainingReport.read(record)
    data = ModelCard(text).data
    assert (data.license, data.language, data.pipeline_tag) == ("apache-2.0", ["en", "de"], "text-generation")
    assert {found.metric_type: found.metric_value for found in data.eval_results} == {
        name.removeprefix("eval_"): value for name, value in report.metrics.items()
    }
    assert "perplexity" in text
    assert "Made-up words ([source](https://example.org/words)), licence `cc0-1.0`" in text
    assert "data.validation=text.txt" in report.command
    assert f"| peak, most of all {report.steps} steps | +{report.peak_over_baseline_bytes / 1e6:.0f} MB |" in text
    assert (
        f"| in use, most of all {report.steps} steps | +{report.peak_in_use_over_baseline_bytes / 1e6:.0f} MB" in text
    )
    row = next(
        row for row in json.loads(COMPARISON.read_text(encoding="utf-8"))["rows"] if row["strategy"] == "recompute"
    )
    memory = f"+{row['in_use_bytes'] / 1e6:.0f} MB | +{row['peak_bytes'] / 1e6:.0f} MB | {row['peak_ratio']:.3f}"
    spread = f"{row['step_ratio_min']:.3f}..{row['step_ratio_max']:.3f}"
    step = f"{row['step_s']:.2f} s | {row['step_ratio']:.3f} | {spread}"
    assert f"| activation checkpointing | {memory} | {step} | the baseline's, bit by bit |" in text
    section = text.partition("## Memory and time")[2].partition("\n## ")[0]
    assert not re.search(r"\d (MiB|GiB)", section), "one unit"
    assert "Medians of 2 rounds of 5 steps; " in section
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (tmp_path / "card" / picture).read_bytes().startswith(b"\x89PNG")
    assert "![Loss by step](loss.png)" in text


def test_the_commands_in_a_card_make_it(record, tmp_path):
    """Each can be given to the shell as it stands, and says what was run."""
    values = json.loads(COMPARISON.read_text(encoding="utf-8"))
    facts = [*FACTS, "--dataset-note", "Their files lie in words.", "--how", "Ask for `make`."]
    command("card", record, "--output", tmp_path / "card", *facts, "--comparison", COMPARISON)
    text = (tmp_path / "card" / "README.md").read_text(encoding="utf-8")
    for note in ("Their files lie in words.", "Ask for `make`."):
        assert f"\n\n{note}\n\n" in text
    again = text.partition("## How to reproduce it")[2].partition("```\n")[2].partition("```")[0]
    train, bench, card = (shlex.split(line) for line in again.splitlines())
    report = TrainingReport.read(record)
    assert train == [*shlex.split(report.command), "--report", "run.json"]
    recipe = train[2]
    assert bench[:4] == ["hf-offload", "bench", "steps", recipe]
    assert [word for word in bench if "=" in word] == values["overrides"]
    asked = dict(zip(bench[4 + len(values["overrides"]) :: 2], bench[5 + len(values["overrides"]) :: 2], strict=True))
    first = values["rows"][0]
    assert asked == {
        "--batch": str(first["batch"]), "--sequence": str(first["sequence"]), "--rounds": str(values["rounds"]),
        "--strategies": ",".join(row["strategy"] for row in Comparison.read(COMPARISON).rows), "--output": "comparison",
    }  # fmt: skip
    assert card[:7] == ["hf-offload", "card", "run.json", "--output", "card", "--comparison", "comparison/table.json"]
    assert sorted(card[7:]) == sorted(FACTS)


def card_of_changed(record, change, *more):
    """The text of a card of that record with something changed."""
    values = json.loads(record.read_text(encoding="utf-8"))
    change(values)
    record.write_text(json.dumps(values), encoding="utf-8")
    command("card", record, "--output", record.parent / "card", *FACTS, *more)
    return (record.parent / "card" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "said", "unsaid"),
    [
        (
            lambda values: values.update(metrics={"eval_bleu": 0.45, "eval_accuracy": 0.45}),
            "| bleu (0 to 100) | 0.45 |\n| accuracy | 0.45 |",
            "Evaluations on the way",
        ),
        (
            lambda values: values["settings"]["training"].update(eval_strategy="steps"),
            "Evaluations on the way",
            "is the most that was allocated",
        ),
        (
            lambda values: values["memory"].update(device="cuda:0"),
            "*Peak* is the most that was allocated",
            "in use",
        ),
    ],
    ids=["metrics of a hundred", "evaluations", "accelerator"],
)
def test_a_card_says_what_its_figures_are(record, change, said, unsaid):
    text = card_of_changed(record, change)
    assert said in text
    assert unsaid not in text


def test_a_folder_is_no_base_model(record, tmp_path):
    """Only names that the Hub has stand in the metadata."""
    for name, given, expected in (
        ("google/other", (), "google/other"),
        (str(tmp_path), (), None),
        (str(tmp_path), ("--base-model", "google/other"), "google/other"),
    ):
        text = card_of_changed(record, lambda values, name=name: values["settings"]["model"].update(name=name), *given)
        assert ModelCard(text).data.base_model == expected
        assert f"fine-tuned from `{expected or name}`" in text


def test_the_recipe_in_a_card_is_the_one_that_was_trained(record, tmp_path):
    command("card", record, "--output", tmp_path / "card", *FACTS)
    text = (tmp_path / "card" / "README.md").read_text(encoding="utf-8")
    again = tmp_path / "again.yaml"
    again.write_text(text.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    result = command("train", again, "--report", tmp_path / "again.json")
    assert result.exit_code == 0, result.output + result.stderr
    first, second = TrainingReport.read(record), TrainingReport.read(tmp_path / "again.json")
    assert (second.losses_hex, second.parameters_sha256) == (first.losses_hex, first.parameters_sha256)


@pytest.mark.parametrize(("measured", "said"), [(500e6, "kept"), (600e6, "exceeded")])
def test_a_plan_stands_beside_what_was_measured(record, measured, said):
    forecast = {
        "peak_bytes": 400e6, "step_s": 2.5, "measured_peak_bytes": measured, "measured_step_s": [1.5, 2.5, 2.0],
    }  # fmt: skip

    def planned(values):
        values["settings"]["offload"]["memory_budget"] = 500 << 20
        values["forecast"] = forecast

    text = card_of_changed(record, planned)
    assert f"budget was 524 MB (500 MiB) of live tensors, {said} in the step that was measured." in text
    assert f"| live tensors, of one step under the last plan | 400 MB | {measured / 1e6:.0f} MB |" in text
    assert "| step, median of 3 under the last plan | 2.50 s | 2.00 s |" in text


def test_what_is_no_record_is_explained(record, tmp_path):
    def refused(*arguments):
        result = command("card", *arguments, "--output", tmp_path / "card", *FACTS)
        assert result.exit_code == 2
        return said(result)

    assert "is not a training report" in refused(COMPARISON)
    assert "is not a comparison" in refused(record, "--comparison", record)
    values = json.loads(record.read_text(encoding="utf-8"))
    record.write_text(json.dumps(values | {"memory": None}), encoding="utf-8")
    assert "holds no memory: train with `hf-offload train RECIPE --report FILE`" in refused(record)
    assert not (tmp_path / "card").exists()


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        (["--name", "a\udcff"], "--name='a\\udcff' holds bytes that are not UTF-8 text"),
        (["--dataset-url", "\udcff"], "--dataset-url="),
        (["--name", "x" * 5000], "is not a name: give 1 to 200 characters on one line"),
        (["--dataset", ""], "--dataset='' is not a name"),
        (["--language", "en,,de"], "--language='' is not a name"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_said_of_a_model_is_text(record, tmp_path, changed, part):
    result = command("card", record, "--output", tmp_path / "card", *FACTS, *changed)
    assert result.exit_code == 2
    assert part in said(result)
    assert len(result.stderr) < 900
    assert not (tmp_path / "card").exists()


def test_a_folder_in_a_files_place_is_an_error(record, tmp_path):
    (tmp_path / "card" / "loss.png").mkdir(parents=True)
    result = command("card", record, "--output", tmp_path / "card", *FACTS, "--plot")
    assert result.exit_code == 2
    assert "loss.png is to lie in it, and it is a folder" in said(result)
    assert [path.name for path in (tmp_path / "card").iterdir()] == ["loss.png"]


JUNK = (None, "x", -1, 1.5, [], ["x"], {}, {"x": 1}, True, "9" * 5000)


def test_of_a_damaged_record_there_is_a_card_or_an_error(record, tmp_path):
    whole = json.loads(record.read_text(encoding="utf-8"))
    places = [(name,) for name in whole]
    places += [(name, key) for name, part in whole.items() if isinstance(part, dict) for key in part]
    facts = CardFacts(name="a", license="mit", dataset="b", dataset_license="mit")
    damaged = tmp_path / "damaged.json"
    refused = []
    for name, *inner in places:
        for junk in JUNK:
            values = json.loads(json.dumps(whole))
            if inner:
                values[name][inner[0]] = junk
            else:
                values[name] = junk
            damaged.write_text(json.dumps(values), encoding="utf-8")
            try:
                card_of(TrainingReport.read(damaged), facts, None)
            except OffloadConfigError as error:
                refused.append(str(error))
    assert len(refused) > len(places)
    assert max(map(len, refused)) < 1000


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 9000, b"9" * 5000, b"null", b'{"recipe": 1}'], ids=repr)
def test_what_is_no_json_is_no_record(tmp_path, content):
    (tmp_path / "r.json").write_bytes(content)
    for read in (TrainingReport.read, Comparison.read):
        with pytest.raises(OffloadConfigError, match=r"r\.json") as refused:
            read(tmp_path / "r.json")
        assert len(str(refused.value)) < 600


CARDS = sorted((ROOT / "model_cards").glob("*/*/README.md"))


def test_there_is_a_card_for_each_family():
    assert [path.parents[1].name for path in CARDS] == ["bert", "gpt", "llama", "t5"]


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.parent.name)
def test_committed_cards_are_whole(path, tmp_path):
    assert_whole(path)
    text = path.read_text(encoding="utf-8")
    comparison = Comparison.read(path.parent / "comparison.json")
    assert len(comparison.rows) > 1
    assert f"\n\n{comparison.table()}\n\n" in text
    for row in comparison.rows:  # of the table's own figures, some that no table can do without
        assert f" +{row['peak_bytes'] / 1e6:.0f} MB | {row['peak_ratio']:.3f} | {row['step_s']:.2f} s |" in text
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    loaded, shipped = load_recipe(recipe), load_recipe(comparison.rows[0]["shape"])
    for section in ("model", "training", "evaluation"):
        assert getattr(loaded, section) == getattr(shipped, section)
    assert dataclasses.replace(loaded.offload, min_bytes=None) == shipped.offload
    assert loaded.offload.smallest_bytes(on_host=True) == shipped.offload.smallest_bytes(on_host=True)
    assert dataclasses.replace(loaded.data, data_dir=None) == shipped.data
    assert f"`model_cards/make.sh DATA {path.parents[1].name}`" in text


def assert_whole(path):
    card = ModelCard.load(path)
    assert card.data.license
    assert card.data.eval_results
    assert "hf_offload" in card.data.tags
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", card.content):
        assert (path.parent / picture).is_file()
