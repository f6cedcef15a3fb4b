"""Snapshots of a Trainer: taken without a bit of difference, found again, and refused where they are not whole."""

import contextlib
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Sampler, WeightedRandomSampler
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from hf_offload import OffloadCallback, OffloadConfig, OffloadConfigError, TierFullError
from hf_offload.errors import SnapshotError
from hf_offload.integrations.checkpoints import last_complete_checkpoint
from hf_offload.integrations.extended_trainer import snapshots_of_training
from hf_offload.snapshots import disk as on_disk
from hf_offload.snapshots import process, taking
from hf_offload.snapshots.client import SnapshotClient
from hf_offload.snapshots.restoring import MARK_FILE
from hf_offload.storage.service import storage_of
from tests.faults.killed_snapshots import result_of, same, trainer_in
from tests.helpers.loaded_processes import run_python
from tests.helpers.snapshot_processes import (  # noqa: F401  a fixture
    address_in,
    end_process,
    flip,
    held_by,
    no_process_is_left,
    processes_of_test,
    steps_held,
    until,
)
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


class At(TrainerCallback):
    """Does something at the end of a step. What a training leaves when it raises, it leaves when its process is killed."""

    def __init__(self, step, work=None):
        self._step = step
        self._work = work

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self._step:
            if self._work is None:
                raise KeyboardInterrupt
            self._work(model)


def dies_at(step, folder, callbacks=(), resume=None, **others):
    trainer = trainer_in(folder, True, [*callbacks, At(step)], **{**SHORT, **others})
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
    taking._ended.clear()  # the next training is one of another process
    return begun[0], result_of(trainer)


# -- taken and resumed -----------------------------------------------------------------------------------------------------


def test_a_training_with_snapshots_has_the_bits_of_one_without_and_leaves_nothing(whole, tmp_path):
    before = processes_of_test()
    trainer = trainer_in(tmp_path / "run", True, **SHORT)
    trainer.train()
    assert same(whole, result_of(trainer))
    assert processes_of_test() <= before
    assert [path.name for path in (tmp_path / "run").iterdir()] == [MARK_FILE]


def test_nothing_but_the_newest_two_are_held_in_files_for_this_user(tmp_path):
    dies_at(15, tmp_path)
    held = held_by(tmp_path)
    assert steps_held(tmp_path) == [8, 12]
    assert held["training"] is None
    modes = []
    for path in Path(f"/proc/{held['pid']}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection that was closed meanwhile
            if "hf_offload-snapshot" in str(path.readlink()):
                modes.append(path.stat().st_mode & 0o777)
    assert set(modes) == {0o600}
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


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_training_goes_on_from_its_newest_snapshot_to_the_same_bits(whole, tmp_path, place):
    others = {} if place == "memory" else {"offload_snapshot_dir": str(tmp_path / "disk")}
    run = tmp_path / "run"
    dies_at(15, run, **others)
    if place == "disk":
        until(lambda: (tmp_path / "disk" / "checkpoint-12").exists())
        end_process(run)
    begun, found = resumed(run, **others)
    assert begun == 12
    assert same(whole, found)
    assert held_by(run) is None
    assert [path.name for path in run.iterdir()] == [MARK_FILE]


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
    "evaluated": {"offload_snapshot_steps": 5, "eval_strategy": "epoch"},  # the 25th step ends an epoch, which draws a number
    "accumulated": {"gradient_accumulation_steps": 2},
    "clipped": {"lr_scheduler_type": "cosine", "warmup_steps": 3, "max_grad_norm": 0.1},
    "with workers": {"optim": "sgd", "dataloader_num_workers": 1},
    "activations": {"offload": "ram", "offload_min_bytes": "0"},
    "state and weights": {"offload_optimizer": "ssd", "offload_params": "ssd", "offload_min_bytes": "0"},
    "mezo": {"memory_mode": "mezo", "max_grad_norm": 0.0},
    "bf16": {"bf16": True},
}  # fmt: skip


@pytest.mark.parametrize(("name", "dies"), [(name, (27, 16)[number % 2]) for number, name in enumerate(OTHERS)])
def test_other_trainings_go_on_to_the_same_bits(tmp_path, name, dies):
    others = dict(OTHERS[name])
    plain = {key: value for key, value in others.items() if not key.startswith("offload")}
    if name == "state and weights":
        others["offload_directory"] = str(tmp_path)

    def trains(folder, snapshots, callbacks=(), resume=None, **settings):
        evaluated = ExampleDataset("gpt2", 6, seed=2) if "eval_strategy" in others else None
        trainer = trainer_in(folder, snapshots, callbacks, evaluated=evaluated, **{**SHORT, **settings})
        trainer.train(resume_from_checkpoint=resume)
        return result_of(trainer)

    expected = trains(tmp_path / "whole", False, **plain)
    with pytest.raises(KeyboardInterrupt):
        trains(tmp_path / "run", True, [At(dies)], **others)
    assert same(expected, trains(tmp_path / "run", True, (), True, **others))


def test_what_a_budget_moves_is_in_a_snapshot(tmp_path, machine_with_drive, caplog):
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
        expected = result_of(trainer)
        dies_at(15, tmp_path / "run", **plain, **budget)
        begun, found = resumed(tmp_path / "run", **plain, **budget)
    assert begun == 12
    assert same(expected, found)
    assert caplog.text.count("Gradients and optimizer state go to ssd") == 2


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
        trains(tmp_path / "run", True, [At(15)])
    sizes = {name: nbytes for name, nbytes, _ in held_by(tmp_path / "run")["snapshots"][0]["files"]}
    assert sizes["adapter_model.safetensors"] < 20_000
    assert "model.safetensors" not in sizes
    assert same(expected, trains(tmp_path / "run", True, resume=True))
    until(lambda: (tmp_path / "disk" / "checkpoint-28").exists())
    again = peft.PeftModel.from_pretrained(tiny_model("gpt2"), tmp_path / "disk" / "checkpoint-28")
    assert again.peft_config["default"].r == 2


# -- checkpoints -----------------------------------------------------------------------------------------------------------


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
    def drops(model):
        snapshots_of_training(trainer).taking.take = lambda *args: None

    trainer = trainer_in(tmp_path, True, [At(5, drops), At(15)], **SHORT, save_strategy="steps", save_steps=7)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert resumed(tmp_path, save_strategy="steps", save_steps=7)[0] == 14


@pytest.mark.parametrize("where", [{}, {"offload_optimizer": "ssd", "offload_params": "ssd", "offload_min_bytes": "0"}])
def test_a_snapshot_on_disk_is_a_checkpoint_of_the_trainer(whole, tmp_path, where):
    disk = tmp_path / "disk"
    where = where and {**where, "offload_directory": str(tmp_path)}
    dies_at(19, tmp_path / "run", offload_snapshot_dir=str(disk), **where)
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
    assert f"Training goes on from {named}, as was asked for: the snapshots that an earlier one has left" in caplog.text
    last = tmp_path / "disk" / "checkpoint-28"
    until(last.exists)
    flip(last / "optimizer.pt")
    with pytest.raises(SnapshotError, match=r"checkpoint-28 is damaged: optimizer\.pt does not match its checksum"):
        trainer.train(resume_from_checkpoint=str(last))


@pytest.mark.parametrize("damage", [None, "optimizer.pt", "hf_offload_snapshot.json"])
def test_snapshots_on_disk_are_complete_checkpoints_unless_they_are_damaged(tmp_path, caplog, damage):
    """Of a Trainer without snapshots, whose output directory is what was ``snapshot_dir``."""
    disk = tmp_path / "disk"
    dies_at(11, tmp_path / "run", offload_snapshot_dir=str(disk))
    until(lambda: (disk / "checkpoint-8").exists())
    until(lambda: len(list(disk.glob("checkpoint-*"))) <= 2)
    end_process(tmp_path / "run")
    if damage is not None:
        flip(disk / "checkpoint-8" / damage)
    expected = disk / ("checkpoint-8" if damage is None else "checkpoint-4")
    found = last_complete_checkpoint(disk)
    assert found == (str(expected) if expected.exists() else None)  # a drive that is slow leaves some out
    assert damage is None or re.search(rf"checkpoint-8 is incomplete and skipped \(.*{damage}", caplog.text)


def test_one_that_starts_anew_drops_the_snapshots_of_the_one_before(whole, tmp_path, caplog):
    others = {"offload_snapshot_dir": str(tmp_path / "disk")}
    dies_at(23, tmp_path / "run", **others)
    until(lambda: (tmp_path / "disk" / "checkpoint-20").exists())
    dies_at(3, tmp_path / "run", **others)
    assert "Training starts at its beginning, as was asked for: the snapshots that an earlier one" in caplog.text
    begun, found = resumed(tmp_path / "run", **others)
    assert begun == 0
    assert same(whole, found)
    assert not (tmp_path / "disk" / "checkpoint-20").exists()


# -- the snapshot process --------------------------------------------------------------------------------------------------


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
    client = SnapshotClient.connect(address_in(tmp_path))
    client.ask("start", run="run", directory=str(tmp_path / "disk"), wait_s=1.0)
    for step in (4, 8):
        held = client.ask("keep", step=None)["held"]
        assert held == ([] if step == 4 else [4])  # its files are not to be written to
        client.ask("commit", record={"run": "run", "step": step, "files": []})
        assert writes.wait(30)
    client.ask("done")
    goes_on.set()
    thread.join()
    client.close()
    for each in (listener, *keeper._connections.values()):  # a process that ends closes them
        each.close()
    assert sorted(path.name for path in (tmp_path / "disk").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]


def test_the_snapshot_process_may_end_and_another_one_keeps_what_comes(whole, tmp_path, caplog):
    def kills(model):
        end_process(tmp_path)

    dies_at(13, tmp_path, [At(10, kills)])
    assert caplog.text.count("The snapshot process has ended") == 1
    assert steps_held(tmp_path) == [12]
    begun, found = resumed(tmp_path, [At(21, kills)])
    assert begun == 12
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
    client = SnapshotClient.connect(address_in(tmp_path))
    thread.join()
    assert client.status["pid"] in processes_of_test()
    client.end()


def test_a_child_that_outlives_its_training_does_not_hold_the_snapshot_process(tmp_path):
    """Such as the worker of a loader."""
    (born, bears), address = os.pipe(), address_in(tmp_path)
    training = os.fork()
    if training == 0:
        try:
            held = SnapshotClient.connect(address)
            child = os.fork()  # which has it, too
            os.write(bears, child.to_bytes(4, "little")) if child else signal.pause()
        finally:
            del held
            os._exit(0)
    child = int.from_bytes(os.read(born, 4), "little")
    os.waitpid(training, 0)
    client = SnapshotClient.connect(address)
    os.kill(child, signal.SIGKILL)
    assert "refused" not in client.status
    client.end()
    os.close(born)
    os.close(bears)


def test_the_snapshot_process_ends_after_a_while(tmp_path):
    dies_at(6, tmp_path, offload_snapshot_wait_s=0)
    until(lambda: held_by(tmp_path) is None)
    dies_at(6, tmp_path, offload_snapshot_wait_s=1)
    assert held_by(tmp_path) is not None
    until(lambda: held_by(tmp_path) is None)


# -- damaged and refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "rng_state.pth"])
def test_a_damaged_snapshot_in_memory_is_noticed_and_the_one_before_is_taken(whole, tmp_path, caplog, name):
    dies_at(15, tmp_path)
    client = SnapshotClient.connect(address_in(tmp_path))
    newest = max(client.status["snapshots"], key=lambda each: each["step"])
    numbers = client.fetch(newest["step"])
    flip(Path(f"/proc/self/fd/{numbers[[entry[0] for entry in newest['files']].index(name)]}"))
    client.close()
    begun, found = resumed(tmp_path)
    assert f"step 12 in memory is damaged and skipped: {name} does not match its checksum" in caplog.text
    assert begun == 8
    assert same(whole, found)


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "record"])
def test_a_damaged_snapshot_on_disk_is_noticed(whole, tmp_path, caplog, damage):
    disk, run = tmp_path / "disk", tmp_path / "run"
    dies_at(15, run, offload_snapshot_dir=str(disk))
    until(lambda: (disk / "checkpoint-12").exists())
    end_process(run)
    path = disk / "checkpoint-12" / "optimizer.pt"
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "missing":
        path.unlink()
    else:
        flip(path if damage == "flipped" else path.with_name("hf_offload_snapshot.json"))
    others = {int(path.name.rpartition("-")[2]) for path in disk.glob("checkpoint-*")} - {12}
    begun, found = resumed(run, offload_snapshot_dir=str(disk))
    assert begun == max(others, default=0)  # a drive that is slow leaves some out
    assert same(whole, found)
    assert damage == "record" or "checkpoint-12 is damaged and skipped: optimizer.pt" in caplog.text


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
    until(lambda: held_by(tmp_path) is None)  # nothing to keep


def test_full_shared_memory_is_a_warning_later_and_the_one_before_stays(whole, tmp_path, caplog):
    with contextlib.ExitStack() as limits:
        dies_at(10, tmp_path, [At(6, lambda model: limits.enter_context(largest_file(50_000)))])
    assert "A snapshot was not taken: There is no room in shared memory" in caplog.text
    assert steps_held(tmp_path) == [4]
    assert same(whole, resumed(tmp_path)[1])


def test_the_memory_of_snapshots_counts_in_the_ram_budget(tmp_path):
    trainer = trainer_in(tmp_path, True, **SHORT, offload="ram", offload_ram_budget="300KiB")
    with pytest.raises(TierFullError, match=r"A snapshot needs .*Raise ram_budget, or drop snapshot_steps"):
        trainer.train()
    held = []
    looks = [At(step, lambda model: held.append(storage_of(model).ram.taken_bytes)) for step in (1, 29)]
    trainer = trainer_in(tmp_path, True, looks, **SHORT, offload="none", offload_ram_budget="300MiB")
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


def test_a_disk_that_fails_is_a_warning_and_used_again_once_it_is_there(tmp_path, caplog):
    disk, run = tmp_path / "disk", tmp_path / "run"

    def fails(model):
        until(lambda: (disk / "checkpoint-4").exists())
        disk.rename(tmp_path / "elsewhere")
        disk.write_text("")

    def works(model):
        until(lambda: held_by(run)["error"] is not None)
        disk.unlink()
        disk.mkdir()

    dies_at(18, run, [At(6, fails), At(9, works)], offload_snapshot_dir=str(disk))
    assert f"A snapshot was not written to {disk}" in caplog.text
    assert steps_held(run) == [12, 16]
    until(lambda: (disk / "checkpoint-16").exists())


GROUPED = (
    {"train_sampling_strategy": "group_by_length"}
    if hasattr(TrainingArguments, "train_sampling_strategy")
    else {"group_by_length": True}
)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ExampleDataset("gpt2", 8))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ignore_data_skip": True}, "other batches"),
        ({"dataloader_persistent_workers": True, "dataloader_num_workers": 1}, "persistent workers"),
        (GROUPED, "the number of an epoch does not decide the order of the sampler LengthGroupedSampler"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "the order of the sampler RandomSampler"),
        ({"sampled_linear": {"ratio": 0.5, "probabilities": "gradient-cache"}}, "gradient-cache"),
        ({"train_dataset": Stream()}, "a data set without a length"),
        ({"snapshot_parity": 1}, "processes make good what one of them loses, and there is one"),
    ],
)
def test_what_a_snapshot_would_not_hold_is_refused(tmp_path, settings, reason):
    ours = {key: value for key, value in settings.items() if key in ("sampled_linear", "snapshot_parity")}
    config = OffloadConfig(tier="none", snapshot_steps=2, **ours)
    others = {key: value for key, value in settings.items() if key not in (*ours, "train_dataset")}
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, max_steps=2, **others)
    data = settings.get("train_dataset", ExampleDataset("gpt2", 8))
    trainer = Trainer(tiny_model("gpt2"), args, train_dataset=data, callbacks=[OffloadCallback(config)])
    with pytest.raises(OffloadConfigError, match=f"snapshot_steps=2 cannot be used here: .*{reason}"):
        trainer.train()


class ByEpoch(Sampler):
    """Shuffles by the number of the epoch."""

    epoch = 0

    def __init__(self):
        pass

    def __len__(self):
        return 50

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(50, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def sampled(make):
    return type("Sampled", (Trainer,), {"_get_train_sampler": lambda self, *args, **kwargs: make()})


def test_a_sampler_with_set_epoch_goes_on_and_another_one_is_refused(tmp_path):
    own = {"kind": sampled(ByEpoch), "max_steps": 40}
    whole = trainer_in(tmp_path / "whole", False, **own)
    whole.train()
    expected = result_of(whole)
    dies_at(31, tmp_path / "run", **own)
    assert same(expected, resumed(tmp_path / "run", **{**own, "logging_steps": 3})[1])
    other = trainer_in(tmp_path / "run", True, kind=sampled(lambda: WeightedRandomSampler(torch.ones(50), 50)))
    with pytest.raises(OffloadConfigError, match="does not decide the order of the sampler WeightedRandomSampler"):
        other.train()


def test_options_that_a_resume_could_not_load_are_an_error_at_the_first_snapshot(tmp_path):
    trainer = trainer_in(tmp_path, True, max_steps=8)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=np.float64(0.9))
    with pytest.raises(SnapshotError, match=r"optimizer\.state_dict\(\) holds what .*numpy"):
        trainer.train()
    assert trainer.state.global_step == 4


def test_a_callback_that_comes_late_is_refused(tmp_path):
    trainer = trainer_in(tmp_path, False, **SHORT)
    trainer.add_callback(OffloadCallback(OffloadConfig(tier="none", snapshot_steps=2)))
    with pytest.raises(OffloadConfigError, match="pass it to the Trainer's constructor"):
        trainer.train()


# -- launched --------------------------------------------------------------------------------------------------------------

SCRIPT = """
import os
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


def test_a_launched_script_is_started_again_and_goes_on(whole, tmp_path):
    """It is killed at step 9."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "hf_offload", "launch", "--restart-on-failure", "1", "train.py"]
    done = run_python(command, cwd=tmp_path, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("It is started again") == 1
    steps = [*range(1, 10), *range(9, 31)]
    assert (tmp_path / "steps").read_text().split() == [str(step) for step in steps]
    assert same(whole, torch.load(tmp_path / "result", weights_only=False))
    assert held_by(tmp_path / "run") is None
