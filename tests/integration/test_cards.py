"""Model cards: those that a Trainer writes, and those made from a run's record."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import Trainer, TrainerCallback

from hf_offload import OffloadCallback, OffloadConfig, OffloadTrainingArguments
from tests.tiny_models import ExampleDataset, tiny_model


def run(folder, trainer_class=Trainer, callbacks=(), **settings):
    arguments = OffloadTrainingArguments(
        output_dir=str(folder), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=2, **settings,
    )  # fmt: skip
    model = tiny_model("llama")
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=ExampleDataset("llama", 4), callbacks=list(callbacks)
    )
    trainer.train()
    trainer.create_model_card(model_name="tiny")
    return (folder / "README.md").read_text(encoding="utf-8")


def section(text):
    return text.partition("\n## Memory\n")[2]


def test_a_trainers_card_tells_of_offloading(tmp_path):
    text = run(tmp_path, offload="ssd", offload_dir=str(tmp_path), offload_min_bytes=0, sampled_linear=0.5)
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

    offloaded = OffloadCallback(OffloadConfig(tier="ssd", directory=tmp_path, min_offload_bytes=0))
    text = run(tmp_path / "first", Own, [offloaded])
    assert text.count("\n## Memory\n") == 1
    assert "## Own" in text
    assert offloaded.summary[-1] in section(text)


def test_cards_of_other_trainings_stay_as_they_are(tmp_path):
    run(tmp_path / "first", offload="ssd", offload_dir=str(tmp_path), offload_min_bytes=0)  # wraps the method
    assert not section(run(tmp_path / "second"))
    # A training that was offloaded, and one after it with the same callback that was stopped, has nothing to tell of it.
    callback = OffloadCallback(OffloadConfig(tier="ssd", directory=tmp_path, min_offload_bytes=0))
    run(tmp_path / "third", callbacks=[callback])
    assert callback.summary

    class Stop(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "fourth", callbacks=[callback, Stop()])
    assert callback.summary == []
