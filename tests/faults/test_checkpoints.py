"""A run that is killed while it writes a checkpoint: the next one goes on from the last complete one, to the same bits."""

import logging
import shutil

import pytest
import torch
from transformers import Trainer
from typer.testing import CliRunner

from hf_offload.cli.main import app
from hf_offload.integrations.checkpoints import last_complete_checkpoint
from tests.faults import trainers
from tests.faults.trainers import trainer_in
from tests.helpers.tiny_models import weights

STEPS = 5
NEWEST, BEFORE = "checkpoint-4", "checkpoint-2"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that came to its end, and its weights; the files of a checkpoint in the order of writing."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trainer = trainer_in(folder, True, max_steps=STEPS)
    trainer.train()
    for path in folder.glob("checkpoint-*"):
        if path.name not in (NEWEST, BEFORE):
            shutil.rmtree(path)
    files = sorted((folder / NEWEST).iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert files[-1].name == "trainer_state.json"
    return folder, weights(trainer.model), [file.name for file in files]


def kills(names):
    """The writing ended before, or in the middle of, each file."""
    for index in range(len(names)):
        for share in (None, 0, 0.5):
            yield {names[index]: share} | dict.fromkeys(names[index + 1 :])


def damage(checkpoint, shares):
    for name, share in shares.items():
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).unlink()
        if share is not None:
            (checkpoint / name).write_bytes(content[: int(len(content) * share) if share < 1 else -2])


def resumed_equals(whole, folder, shares):
    source, expected, _ = whole
    shutil.copytree(source, folder)
    damage(folder / NEWEST, shares)
    trainer = trainer_in(folder, True, max_steps=STEPS)
    trainer.train(resume_from_checkpoint=True)
    found = weights(trainer.model)
    return expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in found)


def test_a_checkpoint_whose_writing_was_ended_is_noticed(whole, tmp_path, caplog):
    source, _, names = whole
    assert last_complete_checkpoint(source) == str(source / NEWEST)
    for number, shares in enumerate(kills(names)):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        damage(folder / NEWEST, shares)
        caplog.clear()
        assert last_complete_checkpoint(folder) == str(folder / BEFORE), shares
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert f"{NEWEST} is incomplete and skipped (" in caplog.text


@pytest.mark.parametrize("content", ["{}", '{"global_step": null}', '{"global_step": "4"}', "[]", "4", "null"])
def test_a_state_that_names_no_step_is_noticed(whole, tmp_path, caplog, content):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    (folder / NEWEST / "trainer_state.json").write_text(content)
    assert last_complete_checkpoint(folder) == str(folder / BEFORE)
    assert "trainer_state.json names no step" in caplog.text or "trainer_state.json cannot be read" in caplog.text


def test_a_checkpoint_of_another_model_is_refused_with_what_to_do(tiny_recipe, tmp_path):
    changes = ["training.save_strategy=steps", "training.save_steps=2", "training.max_steps=2"]
    assert CliRunner().invoke(app, ["train", str(tiny_recipe), *changes]).exit_code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    changes = [*changes[:2], "training.max_steps=4", "model.config.n_embd=32"]
    result = CliRunner().invoke(app, ["train", str(tiny_recipe), *changes, "--resume"])
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2, result.output
    assert "checkpoint-2 cannot be resumed with this recipe (" in said
    assert "Resume with the recipe that wrote it, or train without --resume." in said
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_run_that_was_killed_while_it_saved_goes_on_to_the_same_weights(whole, tmp_path, name):
    names = whole[2]
    assert resumed_equals(whole, tmp_path / "run", {name: 0.5} | dict.fromkeys(names[names.index(name) + 1 :]))


@pytest.mark.full
def test_a_run_goes_on_to_the_same_weights_after_every_kill(whole, tmp_path):
    for number, shares in enumerate(kills(whole[2])):
        assert resumed_equals(whole, tmp_path / str(number), shares), shares


def test_a_train_of_the_user_s_own_that_resumes(whole, tmp_path, monkeypatch):
    class Own(Trainer):
        def train(self):
            return super().train(resume_from_checkpoint=True)

    source, expected, _ = whole
    shutil.copytree(source, tmp_path / "run")
    damage(tmp_path / "run" / NEWEST, {"trainer_state.json": None})
    monkeypatch.setattr(trainers, "Trainer", Own)
    trainer = trainer_in(tmp_path / "run", True, max_steps=STEPS)
    assert isinstance(trainer, Own)
    trainer.train()
    found = weights(trainer.model)
    assert all(torch.equal(expected[name], found[name]) for name in found)


def test_where_no_checkpoint_is_complete_the_trainer_says_so(whole, tmp_path):
    source, _, _ = whole
    folder = tmp_path / "run"
    shutil.copytree(source, folder)
    for name in (NEWEST, BEFORE):
        (folder / name / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trainer_in(folder, True).train(resume_from_checkpoint=True)
    assert last_complete_checkpoint(folder) is None


def test_weights_alone_are_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    trainer_in(folder, True, save_only_model=True).train()
    assert last_complete_checkpoint(folder) is not None


def test_random_states_of_several_processes_have_no_gaps(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    state = folder / NEWEST / "rng_state.pth"
    for rank in range(3):
        shutil.copy(state, state.with_name(f"rng_state_{rank}.pth"))
    state.unlink()
    assert last_complete_checkpoint(folder) == str(folder / NEWEST)
    state.with_name("rng_state_1.pth").unlink()
    assert last_complete_checkpoint(folder) == str(folder / BEFORE)


def test_train_resume_goes_on_from_the_last_complete_checkpoint(tiny_recipe, tmp_path):
    changes = ["offload.tier=ssd", "offload.directory=tier", "training.save_strategy=steps", "training.save_steps=1"]
    whole = CliRunner().invoke(app, ["train", str(tiny_recipe), *changes])
    assert whole.exit_code == 0, whole.output
    expected = (tmp_path / "out" / "model.safetensors").read_bytes()
    checkpoints = sorted((tmp_path / "out").glob("checkpoint-*"))
    assert len(checkpoints) == 4
    damage(checkpoints[-1], {"trainer_state.json": None})
    damage(checkpoints[-2], {"trainer_state.json": 0.5})
    (tmp_path / "out" / "model.safetensors").unlink()
    again = CliRunner().invoke(app, ["train", str(tiny_recipe), *changes, "--resume"])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected
