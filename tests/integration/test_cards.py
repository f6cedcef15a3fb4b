"""Model cards: those that a Trainer writes, and the committed ones."""

import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_offload import OffloadCallback, OffloadConfig
from hf_offload.settings.recipes import load_recipe
from tests.helpers.command_line import command
from tests.helpers.tiny_models import tiny_model
from tests.helpers.trainers import make_trainer

ROOT = Path(__file__).parents[2]


def run(folder, trainer_class=Trainer, callbacks=(), **settings):
    trainer = make_trainer(
        folder, tiny_model("llama"), kind=trainer_class, callbacks=callbacks, max_steps=2, **settings
    )
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
    trainer = make_trainer(tmp_path, tiny_model("llama"), arguments=TrainingArguments, max_steps=2)
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


def test_a_recipe_leaves_the_card_of_its_trainer(tiny_recipe, tmp_path):
    changes = [
        "data.validation=text.txt",
        f"training.output_dir={tmp_path / 'out'}",
        "offload={tier: ssd, min_bytes: 0}",
    ]
    result = command("train", tiny_recipe, *changes)
    assert result.exit_code == 0, result.output + result.stderr
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "tier='ssd' was asked for" in section(text)
    data = ModelCard(text).data
    assert data.tags == ["hf_offload", "generated_from_trainer"]
    assert "This model was trained from scratch on the files dataset." in text


# ---------------------------------------------------------------------------------------------------- the committed ones

CARDS = sorted((ROOT / "model_cards").glob("*/*/README.md"))


def test_there_is_a_card_for_each_family():
    assert [path.parents[1].name for path in CARDS] == ["bert", "gpt", "llama", "t5"]


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.parent.name)
def test_committed_cards_are_whole(path, tmp_path):
    assert_whole(path)
    text = path.read_text(encoding="utf-8")
    rows = json.loads((path.parent / "comparison.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) > 1
    for row in rows:
        assert f" +{row['peak_bytes'] / 1e6:.0f} MB | {row['peak_ratio']:.3f} | {row['step_s']:.2f} s |" in text
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    loaded, shipped = load_recipe(recipe), load_recipe(rows[0]["shape"])
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


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "smaller"),
    [
        ("gpt", ["model.config.n_layer=1", "data.tokenizer.train_bpe=300", "model.config.vocab_size=300"]),
        ("llama", ["model.config.num_hidden_layers=1", "data.max_bytes=1MiB"]),
        (
            "t5",
            [
                "model.config.num_layers=1",
                "model.config.num_decoder_layers=1",
                "evaluation.generation.max_new_tokens=2",
            ],
        ),
    ],
)
def test_the_script_that_repeats_the_comparisons_makes_each(tmp_path, model, smaller):
    """With small models and data made up; MiniLM's weights are not here."""
    for name in ("model_cards/make.sh", "examples/abstract_pairs.py"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    data = tmp_path / "texts"
    (data / "tinyshakespeare").mkdir(parents=True)
    words = ["to", "be", "or", "not", "that", "is", "the", "question", "whether", "nobler"]
    drawn = random.Random(0)
    sentences = [" ".join(drawn.choices(words, k=12)) + "." for _ in range(3000)]
    (data / "tinyshakespeare" / "input.txt").write_text("\n".join(sentences))
    (data / "tatoeba_en_de").mkdir()
    for split in ("train", "validation"):
        rows = [json.dumps({"en": one, "de": one.upper()}) for one in sentences[: 300 if split == "train" else 8]]
        (data / "tatoeba_en_de" / f"{split}.jsonl").write_text("\n".join(rows))
    few = ["training.max_steps=2", "training.per_device_train_batch_size=2", *smaller]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    made = subprocess.run(
        ["sh", tmp_path / "model_cards" / "make.sh", data, model, *few],
        cwd=tmp_path, env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-3000:]
    (comparison,) = (tmp_path / "model_cards").glob("*/*/comparison.json")
    rows = json.loads(comparison.read_text(encoding="utf-8"))["rows"]
    assert all(
        row["losses_identical"] and row["parameters_identical"] for row in rows if row["strategy"] != "recompute"
    )
    assert (comparison.parent / "memory.png").read_bytes().startswith(b"\x89PNG")
