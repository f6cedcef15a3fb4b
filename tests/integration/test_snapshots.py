"""Snapshots of a Trainer: taken without a bit of difference, found again, and refused where they are not whole."""

import contextlib
import itertools
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from hf_offload import OffloadCallback, OffloadConfig, OffloadConfigError, TierFullError
from hf_offload.errors import SnapshotError
from hf_offload.integrations.checkpoints import last_complete_checkpoint
from hf_offload.integrations.extended_trainer import snapshots_of_training
from hf_offload.snapshots import disk as on_disk
from hf_offload.snapshots import process, retained
from hf_offload.snapshots.client import SnapshotClient
from hf_offload.snapshots.memory import MemoryFile
from hf_offload.storage.service import storage_of
from tests.faults.killed_snapshots import address_in, held_by, result_of, same, trainer_in
from tests.helpers.loaded_processes import run_python
from tests.helpers.snapshot_processes import no_process_is_left, processes_of_test, until  # noqa: F401  a fixture
from tests.helpers.tables import rows
from tests.helpers.tiny_models import ExampleDataset, tiny_model

STEPS, EVERY = 30, 4
SHORT = {"max_steps": STEPS, "logging_steps": 3}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a training ends with that neither stops nor takes snapshots."""
    trainer = trainer_in(tmp_path_factory.mktemp("whole"), False, **SHORT)
    trainer.train()
    return result_of(trainer)


class Dies(TrainerCallback):
    """Raises once a step has ended: what a training leaves when its process is killed, snapshots are left by that, too."""

    def __init__(self, step):
        self._step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            raise KeyboardInterrupt


def dies_at(step, folder, callbacks=(), resume=None, **others):
    trainer = trainer_in(folder, True, [Dies(step), *callbacks], **{**SHORT, **others})
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def resumed(folder, callbacks=(), **others):
    trainer = trainer_in(folder, True, callbacks, **{**SHORT, **others})
    begun = []

    class Begins(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            begun.append(state.global_step)

    trainer.add_callback(Begins())
    trainer.train(resume_from_checkpoint=True)
    retained.release()
    retained._here().ended.clear()  # the next training is one of another process
    return begun[0], result_of(trainer)


def steps_held(folder):
    held = held_by(folder)
    return None if held is None else sorted(each["step"] for each in held["snapshots"])


def files_of(pid):
    """Paths to the files that a snapshot process holds."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection that was closed meanwhile
            if "hf_offload-snapshot" in str(path.readlink()):
                found.append(path)
    return found


def flip(path):
    """A bit in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


# -- taken -----------------------------------------------------------------------------------------------------------------


def test_a_training_with_snapshots_has_the_bits_of_one_without_and_leaves_nothing(whole, tmp_path):
    before = processes_of_test()
    trainer = trainer_in(tmp_path / "run", True, **SHORT)
    trainer.train()
    assert same(whole, result_of(trainer))
    assert steps_held(tmp_path / "run") == [STEPS]  # for what comes after it
    retained.release()
    assert processes_of_test() <= before
    assert [path.name for path in (tmp_path / "run").iterdir()] == [on_disk.MARK_FILE]


def test_nothing_but_the_newest_two_are_held_in_files_for_this_user(tmp_path):
    dies_at(15, tmp_path)
    held = held_by(tmp_path)
    assert steps_held(tmp_path) == [8, 12]
    assert held["training"] is None
    files = files_of(held["pid"])
    assert files
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert Path(f"/proc/{held['pid']}").stat().st_uid == os.geteuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_answered(tmp_path):
    dies_at(5, tmp_path)
    address = address_in(tmp_path)  # it names the user, so that of the other one is asked
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(10)
            connection.connect(address)
            with contextlib.suppress(OSError):
                connection.send(json.dumps({"do": "status"}).encode())
            code = 0 if connection.recv(100) == b"" else 2
        except ConnectionError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# -- resumed ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_training_goes_on_from_its_newest_snapshot_to_the_same_bits(whole, tmp_path, place):
    others = {} if place == "memory" else {"offload_snapshot_dir": str(tmp_path / "disk")}
    run = tmp_path / "run"
    dies_at(15, run, **others)
    if place == "disk":
        until(lambda: (tmp_path / "disk" / "checkpoint-12").exists())
        pid = held_by(run)["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: held_by(run) is None)
    begun, found = resumed(run, **others)
    assert begun == 12
    assert same(whole, found)
    assert held_by(run) is None
    assert [path.name for path in run.iterdir()] == [on_disk.MARK_FILE]


def test_what_belongs_to_the_end_of_an_epoch_comes_before_its_last_snapshot(tmp_path):
    class Counts(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            held.append(steps_held(tmp_path))

    held = []
    dies_at(27, tmp_path, [Counts()], offload_snapshot_steps=5)
    assert held == [[15, 20]]
    assert steps_held(tmp_path) == [20, 25]


def test_a_training_that_dies_again_and_again_goes_on(whole, tmp_path):
    dies_at(6, tmp_path)
    dies_at(7, tmp_path, resume=True)  # before its first snapshot: that of the training before stays
    assert steps_held(tmp_path) == [4]
    dies_at(14, tmp_path, resume=True)
    begun, found = resumed(tmp_path)
    assert begun == 12
    assert same(whole, found)


OTHERS = {
    "evaluated": {
        "offload_snapshot_steps": 5,
        "eval_strategy": "epoch",
    },  # the 25th step ends an epoch, which draws a number
    "accumulated": {"gradient_accumulation_steps": 2},
    "clipped": {"lr_scheduler_type": "cosine", "warmup_steps": 3, "max_grad_norm": 0.1},
    "with workers": {"optim": "sgd", "dataloader_num_workers": 1},
    "activations": {"offload": "ram", "offload_min_bytes": "0"},
    "state and weights": {"offload_optimizer": "ram", "offload_params": "ram", "offload_min_bytes": "0"},
    "mezo": {"memory_mode": "mezo", "max_grad_norm": 0.0},
    "bf16": {"bf16": True},
}
# In the first epoch or in the second one, in turns.
QUICK_OTHERS = [(name, (27, 16)[number % 2]) for number, name in enumerate(OTHERS)]


@pytest.mark.parametrize(("name", "dies"), rows(itertools.product(OTHERS, (16, 27)), quick=QUICK_OTHERS))
def test_other_trainings_go_on_to_the_same_bits(tmp_path, name, dies):
    others = OTHERS[name]
    plain = {key: value for key, value in others.items() if not key.startswith("offload")}

    def trains(folder, snapshots, callbacks=(), resume=None, **settings):
        evaluated = ExampleDataset("gpt2", 6, seed=2) if "eval_strategy" in others else None
        trainer = trainer_in(folder, snapshots, callbacks, evaluated=evaluated, **{**SHORT, **settings})
        trainer.train(resume_from_checkpoint=resume)
        return result_of(trainer)

    expected = trains(tmp_path / "whole", False, **plain)
    with pytest.raises(KeyboardInterrupt):
        trains(tmp_path / "run", True, [Dies(dies)], **others)
    assert same(expected, trains(tmp_path / "run", True, (), True, **others))


def test_what_a_budget_moves_is_copied_at_once(tmp_path, machine_with_drive, caplog):
    machine_with_drive(1e9)
    weights = sum(p.nbytes for p in tiny_model("gpt2").parameters())
    budget = {
        "offload": "auto",
        "offload_memory_budget": str(4 * weights),
        "offload_directory": str(tmp_path),
        "offload_min_bytes": "256",
    }
    plain = {"max_grad_norm": 0.0}  # so that weights are updated in backward, before the optimizer's step

    with caplog.at_level(logging.INFO, "hf_offload"):
        trainer = trainer_in(tmp_path / "whole", False, **{**SHORT, **plain})
        trainer.train()
        dies_at(15, tmp_path / "run", **plain, **budget)
        begun, found = resumed(tmp_path / "run", **plain, **budget)
    assert begun == 12
    assert same(result_of(trainer), found)
    assert caplog.text.count("Gradients and optimizer state go to ssd") == 2
    assert "changed while a snapshot was copied" not in caplog.text


def on_a_drive(folder, params="none", **others):
    (folder / "tier").mkdir(exist_ok=True)
    return {
        "offload_optimizer": "ssd",
        "offload_params": params,
        "offload_directory": str(folder / "tier"),
        "offload_min_bytes": "0",
        **others,
    }


@pytest.mark.parametrize("params", ["none", "ssd"])
def test_what_is_on_a_drive_is_copied(whole, tmp_path, params):
    others = on_a_drive(tmp_path, params)
    dies_at(15, tmp_path / "run", **others)
    begun, found = resumed(tmp_path / "run", **others)
    assert begun == 12
    assert same(whole, found)
    assert list((tmp_path / "tier").iterdir()) == []


def test_a_checkpoint_of_what_is_on_a_drive_is_one_of_the_trainer(whole, tmp_path):
    others = on_a_drive(tmp_path, "ssd", offload_snapshot_dir=str(tmp_path / "disk"))
    dies_at(15, tmp_path / "run", **others)
    until(lambda: (tmp_path / "disk" / "checkpoint-12").exists())
    os.kill(held_by(tmp_path / "run")["pid"], signal.SIGKILL)
    plain = trainer_in(tmp_path / "plain", False, **SHORT)
    plain.train(resume_from_checkpoint=str(tmp_path / "disk" / "checkpoint-12"))
    assert same(whole["weights"], result_of(plain)["weights"])
    flip(tmp_path / "disk" / "checkpoint-12" / "model.safetensors")
    begun, found = resumed(tmp_path / "run", **others)
    assert begun == 8
    assert same(whole, found)


def test_a_snapshot_comes_before_a_checkpoint_that_is_little_newer_and_one_of_an_older_run(whole, tmp_path):
    others = {"save_strategy": "steps", "save_steps": 7}
    dies_at(15, tmp_path, **others)  # with checkpoint-14, which lacks the loss of steps that were not logged yet
    begun, found = resumed(tmp_path, **others)
    assert begun == 12
    assert same(whole, found)
    dies_at(11, tmp_path, **others)  # anew, with checkpoint-28 of the run before in the same folder
    begun, found = resumed(tmp_path, **others)
    assert begun == 8
    assert same(whole, found)


def test_a_checkpoint_comes_first_where_snapshots_are_missing(tmp_path):
    class Drops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                snapshots_of_training(trainer).taking.take = lambda *args, **kwargs: None

    trainer = trainer_in(tmp_path, True, [Drops(), Dies(15)], **SHORT, save_strategy="steps", save_steps=7)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert resumed(tmp_path, save_strategy="steps", save_steps=7)[0] == 14


def test_a_checkpoint_on_disk_is_one_of_the_trainer(whole, tmp_path):
    disk = tmp_path / "disk"
    dies_at(19, tmp_path / "run", offload_snapshot_dir=str(disk))
    until(lambda: (disk / "checkpoint-16").exists())
    until(lambda: len(list(disk.glob("checkpoint-*"))) <= 2)
    plain = trainer_in(tmp_path / "plain", False, **SHORT)
    assert type(plain) is Trainer
    plain.train(resume_from_checkpoint=str(disk / "checkpoint-16"))
    assert same(whole["weights"], result_of(plain)["weights"])
    assert same(whole["optimizer"], result_of(plain)["optimizer"])
    model = GPT2LMHeadModel.from_pretrained(disk / "checkpoint-16")
    saved = load_file(disk / "checkpoint-16" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], saved[name]) for name in saved)


def test_a_snapshot_on_disk_that_is_named_has_the_losses_of_its_run(whole, tmp_path, caplog):
    others = {"offload_snapshot_dir": str(tmp_path / "disk")}
    dies_at(15, tmp_path / "run", **others)
    named = tmp_path / "disk" / "checkpoint-12"
    until(named.exists)
    trainer = trainer_in(tmp_path / "run", True, **SHORT, **others)
    trainer.train(resume_from_checkpoint=str(named))
    assert same(whole, result_of(trainer))
    assert (
        f"Training goes on from {named}, as was asked for: the snapshots that an earlier one has left in memory, the newest "
        "of step 12, are dropped." in caplog.text
    )
    until((tmp_path / "disk" / "checkpoint-30").exists)
    flip(tmp_path / "disk" / "checkpoint-30" / "optimizer.pt")
    with pytest.raises(SnapshotError, match=r"checkpoint-30 is damaged: optimizer\.pt does not match its checksum"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "disk" / "checkpoint-30"))


@pytest.mark.parametrize("damage", [None, "optimizer.pt", "model.safetensors", "hf_offload_snapshot.json"])
def test_snapshots_on_disk_are_complete_checkpoints_of_another_trainer_unless_they_are_damaged(
    tmp_path, caplog, damage
):
    """One without snapshots, whose output directory is what was ``snapshot_dir``."""
    disk = tmp_path / "disk"
    dies_at(11, tmp_path / "run", offload_snapshot_dir=str(disk))
    until(lambda: (disk / "checkpoint-8").exists())
    until(lambda: len(list(disk.glob("checkpoint-*"))) <= 2)
    os.kill(held_by(tmp_path / "run")["pid"], signal.SIGKILL)
    if damage is not None:
        flip(disk / "checkpoint-8" / damage)
    expected = disk / ("checkpoint-8" if damage is None else "checkpoint-4")
    found = last_complete_checkpoint(disk)
    assert found == (str(expected) if expected.exists() else None)  # a drive that is slow leaves some out
    assert damage is None or re.search(rf"checkpoint-8 is incomplete and skipped \(.*{damage}", caplog.text)


def test_the_last_snapshot_is_written_to_disk_though_the_one_before_still_is_when_training_ends(tmp_path, monkeypatch):
    writes, goes_on, written = threading.Event(), threading.Event(), on_disk.write_checkpoint

    def held_up(*args):
        writes.set()
        assert goes_on.wait(30)
        written(*args)

    monkeypatch.setattr(on_disk, "write_checkpoint", held_up)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address_in(tmp_path))
    listener.listen()
    keeper = process.Keeper(listener)
    thread = threading.Thread(target=keeper.run)
    thread.start()
    client = SnapshotClient.connect(address_in(tmp_path), start=False)
    client.ask("join")
    run = {"format": on_disk.FORMAT, "run": "run", "training": "number", "output": "run"}
    client.ask("start", **run, directory=str(tmp_path / "disk"), wait_s=1.0)
    for step in (4, 8):
        assert client.ask("begin", keep=None)["held"] == (
            [] if step == 4 else [4]
        )  # its files are not to be written to
        client.ask("commit", record={**run, "sequence": step, "step": step, "files": []})
        assert writes.wait(30)
    client.ask("done")
    goes_on.set()
    thread.join()
    client.close()
    for each in (listener, *keeper._connections.values()):  # a process that ends closes them
        each.close()
    assert sorted(path.name for path in (tmp_path / "disk").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]


def test_one_that_starts_anew_drops_the_snapshots_of_the_one_before(whole, tmp_path, caplog):
    others = {"offload_snapshot_dir": str(tmp_path / "disk")}
    dies_at(23, tmp_path / "run", **others)
    until(lambda: (tmp_path / "disk" / "checkpoint-20").exists())
    with caplog.at_level(logging.WARNING):
        dies_at(3, tmp_path / "run", **others)
    assert (
        "Training starts at its beginning, as was asked for: the snapshots that an earlier one has left" in caplog.text
    )
    begun, found = resumed(tmp_path / "run", **others)
    assert begun == 0
    assert same(whole, found)
    assert not (tmp_path / "disk" / "checkpoint-20").exists() or (
        json.loads((tmp_path / "disk" / "checkpoint-20" / "hf_offload_snapshot.json").read_text())["run"]
        == json.loads((tmp_path / "disk" / "hf_offload_snapshots.json").read_text())["run"]
    )


def test_the_snapshot_process_may_end_and_another_one_keeps_what_there_was(whole, tmp_path, caplog):
    class Kills(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (9, 21):
                os.kill(held_by(tmp_path)["pid"], signal.SIGKILL)
                until(lambda: held_by(tmp_path) is None)

    with caplog.at_level(logging.WARNING):
        dies_at(11, tmp_path, [Kills()])
    assert caplog.text.count("The snapshot process has ended") == 1
    assert steps_held(tmp_path) == [4, 8]
    begun, found = resumed(tmp_path, [Kills()])
    assert begun == 8
    assert same(whole, found)


def test_a_process_that_accepts_and_ends_gives_way_to_another_one(tmp_path):
    """As one that was killed does: what it has open is closed one by one, and what it listens on last."""
    dying = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dying.bind(address_in(tmp_path))
    dying.listen()

    def ends():
        dying.accept()[0].close()
        dying.close()

    thread = threading.Thread(target=ends)
    thread.start()
    client = SnapshotClient.connect(address_in(tmp_path), start=True)
    thread.join()
    assert client.pid in processes_of_test()
    client.end()


def test_one_that_ends_before_the_first_step_takes_nothing_with_it(whole, tmp_path):
    class Kills(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            os.kill(held_by(tmp_path)["pid"], signal.SIGKILL)

    dies_at(11, tmp_path)
    dies_at(10, tmp_path, [Kills()], resume=True)
    assert steps_held(tmp_path) == [8]
    assert same(whole, resumed(tmp_path)[1])


# -- damaged, torn, refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth"])
def test_a_damaged_snapshot_in_memory_is_noticed_and_the_one_before_is_taken(whole, tmp_path, caplog, name):
    dies_at(15, tmp_path)
    held = held_by(tmp_path)
    newest = max(held["snapshots"], key=lambda each: each["sequence"])
    client = SnapshotClient.connect(address_in(tmp_path), start=False)
    client.ask("join")
    numbers = client.fetch(newest["sequence"])
    flip(Path(f"/proc/self/fd/{numbers[[entry[0] for entry in newest['files']].index(name)]}"))
    client.close()
    with caplog.at_level(logging.WARNING):
        begun, found = resumed(tmp_path)
    assert (
        f"The snapshot of step 12 in memory is damaged and skipped: {name} does not match its checksum" in caplog.text
    )
    assert begun == 8
    assert same(whole, found)


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "record"])
def test_a_damaged_snapshot_on_disk_is_noticed(whole, tmp_path, caplog, damage):
    disk, run = tmp_path / "disk", tmp_path / "run"
    dies_at(15, run, offload_snapshot_dir=str(disk))
    until(lambda: (disk / "checkpoint-12").exists())
    os.kill(held_by(run)["pid"], signal.SIGKILL)
    until(lambda: held_by(run) is None)
    path = disk / "checkpoint-12" / "optimizer.pt"
    if damage == "flipped":
        flip(path)
    elif damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "missing":
        path.unlink()
    else:
        flip(path.with_name("hf_offload_snapshot.json"))
    others = {int(path.name.rpartition("-")[2]) for path in disk.glob("checkpoint-*")} - {12}
    with caplog.at_level(logging.WARNING):
        begun, found = resumed(run, offload_snapshot_dir=str(disk))
    assert begun == max(others, default=0)  # a drive that is slow leaves some out
    assert same(whole, found)
    assert damage == "record" or "checkpoint-12 is damaged and skipped: optimizer.pt" in caplog.text


class Writes(TrainerCallback):
    """Writes to a weight between two optimizer steps, without a change."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            next(model.parameters()).mul_(1.0)


def test_what_changes_while_it_is_copied_is_dropped_and_copied_at_once_from_then_on(
    whole, tmp_path, caplog, monkeypatch
):
    has_written, end = threading.Event(), MemoryFile.end

    class WritesFirst(Writes):
        def on_step_begin(self, args, state, control, **kwargs):
            super().on_step_begin(args, state, control, **kwargs)
            if state.global_step >= EVERY:  # while the first snapshot is copied
                has_written.set()

    def late(self):
        has_written.wait(60)
        end(self)

    monkeypatch.setattr(MemoryFile, "end", late)
    with caplog.at_level(logging.WARNING):
        dies_at(15, tmp_path, [WritesFirst()])
    assert caplog.text.count("changed while a snapshot was copied, which is dropped") == 1
    assert steps_held(tmp_path) == [8, 12]
    assert same(whole, resumed(tmp_path, [Writes()])[1])


class Counting(nn.Module):
    """A model of its own with a buffer that each forward changes, and a weight with two names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(96, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 96, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        hidden = self.norm(self.embedding(input_ids).flatten(0, 1))
        return {"loss": nn.functional.cross_entropy(self.head(hidden), labels.flatten())}


def test_buffers_are_those_of_the_step_and_tied_weights_are_one(tmp_path):
    def trains(folder, snapshots, callbacks=(), resume=None):
        trainer = trainer_in(folder, snapshots, callbacks, model=Counting(), **SHORT)
        trainer.train(resume_from_checkpoint=resume)
        return result_of(trainer)

    expected = trains(tmp_path / "whole", False)
    with pytest.raises(KeyboardInterrupt):
        trains(tmp_path / "run", True, [Dies(15)])
    assert same(expected, trains(tmp_path / "run", True, resume=True))


def test_buffers_that_the_next_forward_changes_are_copied_before_it(tmp_path, caplog, monkeypatch):
    """The weights are written after that forward here; the buffers are those of the step, and nothing is torn."""
    is_over, begin = threading.Event(), MemoryFile.begin

    class Late(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            is_over.clear()

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            is_over.set()

    def late(self):
        is_over.wait(60)
        begin(self)

    class Keeps(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 12:
                expected.update({name: one.clone() for name, one in model.named_buffers()})

    expected = {}
    monkeypatch.setattr(MemoryFile, "begin", late)
    others = {"offload_snapshot_dir": str(tmp_path / "disk")}
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        trainer_in(tmp_path / "run", True, [Late(), Keeps(), Dies(15)], model=Counting(), **SHORT, **others).train()
    assert "changed while a snapshot was copied" not in caplog.text
    until(lambda: (tmp_path / "disk" / "checkpoint-12").exists())
    saved = load_file(tmp_path / "disk" / "checkpoint-12" / "model.safetensors")
    assert expected
    assert all(torch.equal(saved[name], value) for name, value in expected.items())


def test_a_snapshot_of_another_model_is_refused_by_the_name_of_a_weight(tmp_path):
    dies_at(6, tmp_path)
    with pytest.raises(SnapshotError, match=r"step 4 in memory is of another model: .*Resume with the model"):
        trainer_in(tmp_path, True, model="llama", **SHORT).train(resume_from_checkpoint=True)
    assert steps_held(tmp_path) == [4]


def test_snapshots_of_another_version_are_refused(tmp_path, monkeypatch):
    dies_at(6, tmp_path)
    taken = f"in memory are of format {on_disk.FORMAT}, and this version of hf_offload reads 99"
    monkeypatch.setattr(on_disk, "FORMAT", 99)
    with pytest.raises(SnapshotError, match=taken):
        trainer_in(tmp_path, True, **SHORT).train(resume_from_checkpoint=True)


def test_two_trainings_with_one_output_directory_are_refused(tmp_path):
    address, (joined, joins) = address_in(tmp_path), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            client = SnapshotClient.connect(address, start=True)
            client.ask("join")
            os.write(joins, b"x")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(joined, 1)
    with pytest.raises(SnapshotError, match=rf"Process {pid} trains already with {tmp_path} as its output directory"):
        trainer_in(tmp_path, True, **SHORT).train()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(joined)
    os.close(joins)


@contextlib.contextmanager
def largest_file(nbytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_shared_memory_is_an_error_at_the_first_snapshot(tmp_path):
    trainer = trainer_in(tmp_path, True, **SHORT)
    with largest_file(50_000), pytest.raises(SnapshotError, match=r"no room in shared memory for a snapshot of .*KiB"):
        trainer.train()
    assert held_by(tmp_path) is None  # nothing to keep


def test_full_shared_memory_is_a_warning_later_and_the_one_before_stays(whole, tmp_path, caplog):
    class Fills(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            limits.enter_context(largest_file(50_000)) if state.global_step == 6 else None

    with contextlib.ExitStack() as limits, caplog.at_level(logging.WARNING):
        dies_at(10, tmp_path, [Fills()])
    assert "A snapshot was not taken: There is no room in shared memory" in caplog.text
    assert steps_held(tmp_path) == [4]
    assert same(whole, resumed(tmp_path)[1])


def test_the_memory_of_snapshots_counts_in_the_ram_budget(tmp_path):
    trainer = trainer_in(tmp_path, True, **SHORT, offload="ram", offload_ram_budget="300KiB")
    with pytest.raises(TierFullError, match=r"A snapshot needs .*Raise ram_budget, or drop snapshot_steps"):
        trainer.train()
    held = []

    class Looks(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            held.append(storage_of(model).ram.taken_bytes)

    trainer = trainer_in(tmp_path, True, [Looks()], **SHORT, offload="none", offload_ram_budget="300MiB")
    trainer.train()
    nbytes = sum(one.nbytes for one in trainer.model.parameters())
    assert held[0] == 0
    assert held[-1] >= 2 * 3 * nbytes
    assert storage_of(trainer.model).ram.taken_bytes == 0


def test_a_directory_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = trainer_in(tmp_path / "run", True, **SHORT, offload_snapshot_dir=str(tmp_path / "file" / "disk"))
    with pytest.raises(SnapshotError, match=r"Snapshots cannot be written to .*file/disk: .*Name another snapshot_dir"):
        trainer.train()


def test_a_full_disk_is_a_warning_and_memory_goes_on(whole, tmp_path, caplog):
    disk = tmp_path / "disk"

    class Fills(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                until(lambda: (disk / "checkpoint-4").exists())
                disk.rename(tmp_path / "elsewhere")
                disk.write_text("")
            if state.global_step == 9:
                until(lambda: held_by(tmp_path / "run")["error"] is not None)

    with caplog.at_level(logging.WARNING):
        dies_at(15, tmp_path / "run", [Fills()], offload_snapshot_dir=str(disk))
    assert f"A snapshot was not written to {disk}" in caplog.text
    assert max(steps_held(tmp_path / "run")) == 12
    disk.unlink()
    assert same(whole, resumed(tmp_path / "run")[1])


def test_a_snapshot_dir_that_is_removed_is_named_and_used_again_once_it_is_there(tmp_path, caplog):
    disk, run = tmp_path / "disk", tmp_path / "run"

    class Removes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                until(lambda: (disk / "checkpoint-4").exists())
                shutil.rmtree(disk)
            if state.global_step == 9:
                until(lambda: held_by(run)["error"] is not None)
            if state.global_step == 14:
                disk.mkdir()

    with caplog.at_level(logging.WARNING):
        dies_at(18, run, [Removes()], offload_snapshot_dir=str(disk))
    assert f"A snapshot was not written to {disk}: this directory is not there any more: create it" in caplog.text
    assert "free space" not in caplog.text
    until(lambda: (disk / "checkpoint-16").exists())
    os.kill(held_by(run)["pid"], signal.SIGKILL)
    until(lambda: held_by(run) is None)
    assert resumed(run, offload_snapshot_dir=str(disk))[0] == 16


def test_the_snapshot_process_ends_after_a_while(tmp_path):
    dies_at(6, tmp_path, offload_snapshot_wait_s=0)
    until(lambda: held_by(tmp_path) is None)
    dies_at(6, tmp_path, offload_snapshot_wait_s=1)
    assert held_by(tmp_path) is not None
    until(lambda: held_by(tmp_path) is None)


GROUPED = (
    {"train_sampling_strategy": "group_by_length"}
    if hasattr(TrainingArguments, "train_sampling_strategy")
    else {"group_by_length": True}
)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ignore_data_skip": True}, "other batches"),
        ({"dataloader_persistent_workers": True, "dataloader_num_workers": 1}, "persistent workers"),
        (GROUPED, "the sampler LengthGroupedSampler does not say what decides its order"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "the sampler RandomSampler does not say"),
        ({"sampled_linear": {"ratio": 0.5, "probabilities": "gradient-cache"}}, "gradient-cache"),
    ],
)
def test_what_a_snapshot_would_not_hold_is_refused(tmp_path, settings, reason):
    ours = {key: value for key, value in settings.items() if key == "sampled_linear"}
    config = OffloadConfig(tier="none", snapshot_steps=2, **ours)
    others = {key: value for key, value in settings.items() if key not in ours}
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, max_steps=2, **others)
    trainer = Trainer(
        tiny_model("gpt2"), args, train_dataset=ExampleDataset("gpt2", 8), callbacks=[OffloadCallback(config)]
    )
    with pytest.raises(OffloadConfigError, match=f"snapshot_steps=2 cannot be used here: .*{reason}"):
        trainer.train()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ExampleDataset("gpt2", 8))


def test_data_without_a_length_is_refused(tmp_path):
    config = OffloadConfig(tier="none", snapshot_steps=2)
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, max_steps=2)
    trainer = Trainer(tiny_model("gpt2"), args, train_dataset=Stream(), callbacks=[OffloadCallback(config)])
    with pytest.raises(OffloadConfigError, match="a data set without a length"):
        trainer.train()


def test_an_adapter_goes_on_to_the_same_bits_without_a_copy_of_its_base(tmp_path):
    peft = pytest.importorskip("peft")
    warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what peft asks it

    def trains(folder, snapshots, callbacks=(), resume=None):
        lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
        torch.manual_seed(7)
        model = peft.get_peft_model(tiny_model("gpt2", dropout=0.1), lora)
        others = {"offload_snapshot_dir": str(tmp_path / "disk")} if snapshots else {}
        trainer = trainer_in(folder, snapshots, callbacks, model=model, **SHORT, **others)
        trainer.train(resume_from_checkpoint=resume)
        return result_of(trainer)

    expected = trains(tmp_path / "whole", False)
    with pytest.raises(KeyboardInterrupt):
        trains(tmp_path / "run", True, [Dies(15)])
    sizes = {name: nbytes for name, nbytes, _ in held_by(tmp_path / "run")["snapshots"][0]["files"]}
    assert sizes["adapter_model.safetensors"] < 20_000
    assert "model.safetensors" not in sizes
    assert same(expected, trains(tmp_path / "run", True, resume=True))
    # The last one: one of those before is left out if it comes while another is being copied.
    until(lambda: (tmp_path / "disk" / f"checkpoint-{STEPS}").exists())
    again = peft.PeftModel.from_pretrained(tiny_model("gpt2"), tmp_path / "disk" / f"checkpoint-{STEPS}")
    assert again.peft_config["default"].r == 2


def test_a_callback_that_comes_late_is_refused(tmp_path):
    trainer = trainer_in(tmp_path, False, **SHORT)
    trainer.add_callback(OffloadCallback(OffloadConfig(tier="none", snapshot_steps=2)))
    with pytest.raises(OffloadConfigError, match="pass it to the Trainer's constructor"):
        trainer.train()


# -- launched --------------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys
from pathlib import Path
from transformers import TrainerCallback
import torch
from tests.faults.killed_snapshots import result_of, trainer_in

class Dies(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        with open("steps", "a") as file:
            file.write(f"{state.global_step} ")
        if state.global_step == 9 and Path("steps").read_text().split().count("9") == 1:
            os.kill(os.getpid(), 9)

trainer = trainer_in(Path("run"), True, [Dies()], max_steps=30, logging_steps=3)
trainer.train()
torch.save(result_of(trainer), "result")
"""


def launched(folder, script, restarts):
    (folder / "train.py").write_text(script)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "hf_offload", "launch", *restarts, "train.py"]
    return run_python(command, cwd=folder, env=environment, timeout=200)


def test_a_launched_script_is_started_again_and_goes_on(whole, tmp_path):
    done = launched(tmp_path, SCRIPT, ["--restart-on-failure", "3"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("It is started again") == 1
    assert (tmp_path / "steps").read_text().split() == [*map(str, range(1, 10)), *map(str, range(9, 31))]
    assert same(whole, torch.load(tmp_path / "result", weights_only=False))
    assert held_by(tmp_path / "run") is None


EXITS = """
import sys
from pathlib import Path
from transformers import TrainerCallback
from tests.faults.killed_snapshots import trainer_in

class Notes(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        with open("steps", "a") as file:
            file.write(f"{state.global_step} ")

with open("starts", "a") as file:
    file.write("x")
trainer_in(Path("run"), True, [Notes()], max_steps=6).train()
sys.exit(3 if Path("starts").read_text() == "x" else 0)
"""


def test_a_launched_script_that_fails_after_its_training_trains_nothing_again(tmp_path):
    done = launched(tmp_path, EXITS, ["--restart-on-failure", "1"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "starts").read_text() == "xx"
    assert (tmp_path / "steps").read_text().split() == [*map(str, range(1, 7))]
    assert held_by(tmp_path / "run") is None


def test_a_launched_script_is_not_started_again_once_too_often(tmp_path):
    script = 'import os\nopen("starts", "a").write("x")\nos.kill(os.getpid(), 9)\n'
    done = launched(tmp_path, script, ["--restart-on-failure", "1"])
    assert done.returncode != 0
    assert done.stderr.count("It is started again") == 1
    assert (tmp_path / "starts").read_text() == "xx"
