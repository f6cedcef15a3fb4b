"""Activations and optimizer state in one run: one budget for RAM, one for disk, one write limit, one count of wear."""

import gc
import logging
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from hf_offload import OffloadConfig, OffloadConfigError, OffloadError, OffloadTrainingArguments, offload_activations
from hf_offload.errors import StorageError
from hf_offload.integrations.summary import summary_lines
from hf_offload.optimizers.blockwise import BlockwiseConfig, BlockwiseOptimizer
from hf_offload.storage import disk_io, wear
from hf_offload.storage.wear import Drive, read_wear
from tests.helpers.tiny_models import ExampleDataset, tiny_batch, tiny_model, weights

DRIVE = Drive("made_up", "a made-up drive")
STEPS = 2 * (2 * 5 + 2) + 1  # twice through all blocks, and into a turn
KIB, GIB = 1 << 10, 1 << 30


@pytest.fixture(autouse=True)
def made_up_drive(tmp_path, monkeypatch):
    monkeypatch.setattr(wear, "drive_of", lambda directory: DRIVE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def build(inactive_state, directory=None, **others):
    model = tiny_model("llama", dropout=0.0)
    config = BlockwiseConfig(
        order="ascending",
        outside="turns",
        switch_every=2,
        inactive_state=inactive_state,
        directory=directory,
        **others,
    )
    return model, BlockwiseOptimizer(model.parameters(), model, config, lr=1e-2)


def one_step(model, optimizer, step, session=None):
    model(**tiny_batch("llama", seed=step)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if session is not None:
        session.end_step()


def config_of(directory, **others):
    return OffloadConfig(tier="ssd", directory=directory, min_bytes=0, **others)


def run(directory, config, steps=STEPS, first=None, **others):
    """Model, optimizer and session after some steps; ``first`` is what is made first."""
    model, optimizer = None, None
    if first == "optimizer":
        model, optimizer = build("ssd", directory, **others)
    else:
        model = tiny_model("llama", dropout=0.0)
    with offload_activations(model, config) as session:
        if optimizer is None:
            blocks = BlockwiseConfig(
                order="ascending", outside="turns", switch_every=2, inactive_state="ssd", directory=directory, **others
            )
            optimizer = BlockwiseOptimizer(model.parameters(), model, blocks, lr=1e-2)
        for step in range(steps):
            one_step(model, optimizer, step, session)
    return model, optimizer, session


@pytest.fixture(scope="module")
def expected():
    """Weights and state of the run in memory."""
    model, optimizer = build("ram")
    for step in range(STEPS):
        one_step(model, optimizer, step)
    return weights(model), optimizer.state_dict()


def assert_as_expected(model, optimizer, expected):
    assert all(torch.equal(one, expected[0][name]) for name, one in weights(model).items())
    found = optimizer.state_dict()
    assert found["state"].keys() == expected[1]["state"].keys()
    for place, state in expected[1]["state"].items():
        assert all(torch.equal(found["state"][place][key], value) for key, value in state.items())


def file_bytes(folder):
    """Sizes of the files that this process has open there, each once."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            if str(link.readlink()).startswith(f"{folder}/"):
                status = link.stat()
                found[status.st_ino] = status.st_size
        except FileNotFoundError:  # that of the listing
            continue
    return sum(found.values())


@pytest.mark.parametrize("first", ["optimizer", "session"])
def test_what_each_account_writes_is_reported_and_counted_together(first, tmp_path, expected):
    model, optimizer, session = run(tmp_path, config_of(tmp_path), first=first)
    assert_as_expected(model, optimizer, expected)
    (written,) = session.written()
    accounts = {name: tiers["ssd"].written_bytes for name, tiers in session.stats.accounts.items() if "ssd" in tiers}
    assert written.accounts == accounts
    assert accounts["activations"] == session.stats.total.written_bytes > 0
    assert accounts["optimizer state"] > 0
    assert written.run_bytes == sum(accounts.values()) == read_wear(DRIVE)[0]
    (line,) = summary_lines(session)[1:]
    assert " of activations, " in line
    assert " of optimizer state)" in line


def test_files_of_one_directory_are_shared_and_go_with_the_last_account(tmp_path):
    model, optimizer, session = run(tmp_path, config_of(tmp_path), steps=3)
    assert file_bytes(tmp_path), "state is still there"
    one_step(model, optimizer, 3)
    one_step(model, optimizer, 4)
    del optimizer
    gc.collect()
    assert file_bytes(tmp_path) == 0
    assert not session.active


def test_an_optimizer_that_is_dropped_leaves_its_room_to_activations(tmp_path):
    model, optimizer = build("ssd", tmp_path)
    with offload_activations(model, config_of(tmp_path)) as session:
        for step in range(3):
            one_step(model, optimizer, step, session)
        disk = session._engine.transfer.tier
        assert disk._room.used_bytes > 0
        optimizer.close()
        del optimizer
        gc.collect()
        disk.free(disk.reserve(4096))
        assert disk._room.used_bytes == 0


# -- the limit of bytes written ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["optimizer", "session"])
@pytest.mark.parametrize("limit", [0, 400 * KIB])
def test_the_write_limit_holds_for_both_and_state_stays_in_ram(first, limit, tmp_path, expected, caplog):
    model, optimizer, session = run(tmp_path, config_of(tmp_path, max_disk_write_bytes=limit), first=first)
    assert_as_expected(model, optimizer, expected)
    assert sum(written.run_bytes for written in session.written()) <= limit
    assert session.stats.accounts["optimizer state"]["ram"].used_bytes > 0
    assert "Optimizer state stays in RAM" in caplog.text
    assert not session.must_stop


def test_at_the_write_limit_state_that_ram_cannot_have_is_one_clear_error(tmp_path, expected):
    model, optimizer = build("ssd", tmp_path)
    config = config_of(tmp_path, max_disk_write_bytes=0, ram_budget=4 * KIB)
    with offload_activations(model, config) as session:
        one_step(model, optimizer, 0, session)
        with pytest.raises(
            StorageError, match=r"cannot wait in RAM.*last step.*larger ram_budget.*ram_budget=4.00 KiB"
        ):
            one_step(model, optimizer, 1, session)
    reference, other = build("ram")
    for step in range(2):
        one_step(reference, other, step)
    assert all(torch.equal(one, weights(reference)[name]) for name, one in weights(model).items())
    state, wanted = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert all(torch.equal(state[place][key], value) for place in wanted for key, value in wanted[place].items())


@pytest.mark.parametrize("ram_budget", [None, 4 * KIB])
def test_at_the_write_limit_a_run_stops_with_its_state(ram_budget, tmp_path):
    model, optimizer = build("ssd", tmp_path)
    config = config_of(tmp_path, max_disk_write_bytes=40 * KIB, on_disk_write_limit="stop", ram_budget=ram_budget)
    reference, other = build("ram")
    with offload_activations(model, config) as session:
        step = 0
        while not session.must_stop:
            one_step(model, optimizer, step, session)
            one_step(reference, other, step)
            step += 1
            assert step < STEPS
        with pytest.raises(OffloadError, match=r"max_disk_write_bytes=40.00 KiB.*save the model"):
            one_step(model, optimizer, step, session)
    saved = optimizer.state_dict()
    model, optimizer = build("ram")
    model.load_state_dict(weights(reference))
    optimizer.load_state_dict(saved)
    for further in range(step, step + 4):
        one_step(model, optimizer, further)
        one_step(reference, other, further)
    assert all(torch.equal(one, weights(reference)[name]) for name, one in weights(model).items())


def test_state_alone_stops_a_run_whose_activations_are_not_refused(tmp_path):
    model, optimizer = build("ssd", tmp_path)
    config = OffloadConfig(
        tier="ssd",
        directory=tmp_path,
        min_bytes="1GiB",
        max_disk_write_bytes=KIB,
        on_disk_write_limit="stop",
    )
    with offload_activations(model, config) as session:
        one_step(model, optimizer, 0, session)
        assert not session.must_stop
        one_step(model, optimizer, 1, session)
        assert session.must_stop
        with pytest.raises(OffloadError, match="save the model"):
            one_step(model, optimizer, 2, session)


def test_another_run_begins_with_its_whole_limit(tmp_path):
    model, optimizer = build("ssd", tmp_path)
    found = []
    for limit in (0, GIB, GIB):
        with offload_activations(model, config_of(tmp_path, max_disk_write_bytes=limit)) as session:
            assert session._storage.disk_writes.taken_bytes == 0
            for step in range(4):
                one_step(model, optimizer, step, session)
            found.append(sum(written.run_bytes for written in session.written()))
            assert session._storage.disk_writes.refused == (limit == 0)
            assert session._storage.disk_writes.taken_bytes >= found[-1]
    assert found[0] == 0 < min(found[1:])
    assert read_wear(DRIVE)[0] == sum(found), "the drive remembers all of them"


# -- space on disk and in RAM -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["optimizer", "session"])
@pytest.mark.parametrize("own_directory", [False, True])
def test_the_disk_budget_holds_for_both_at_any_moment(first, own_directory, tmp_path, monkeypatch, expected):
    folder = tmp_path / "state of blocks" if own_directory else tmp_path
    folder.mkdir(exist_ok=True)
    budget, most = 3 << 20, [0]
    real = disk_io.write_once

    def write(fd, data, offset):
        most[0] = max(most[0], file_bytes(tmp_path))
        return real(fd, data, offset)

    monkeypatch.setattr(disk_io, "write_once", write)
    others = {"disk_budget": 2 << 20} if own_directory else {}
    model, optimizer, session = run(folder, config_of(tmp_path, disk_budget=budget), first=first, **others)
    assert_as_expected(model, optimizer, expected)
    assert 0 < most[0] <= budget
    assert session._storage.disk.taken_bytes == (2 << 20 if own_directory else file_bytes(tmp_path))


def test_a_budget_that_is_set_aside_is_a_part_of_the_runs(tmp_path):
    model = tiny_model("llama", dropout=0.0)
    with offload_activations(model, config_of(tmp_path, disk_budget="1MiB")):
        with pytest.raises(OffloadConfigError, match=r"disk_budget=2.00 MiB.*the run's disk_budget of 1.00 MiB"):
            BlockwiseOptimizer(
                model.parameters(), model, BlockwiseConfig(inactive_state="ssd", directory=tmp_path, disk_budget="2MiB")
            )
        BlockwiseOptimizer(
            model.parameters(), model, BlockwiseConfig(inactive_state="ssd", directory=tmp_path, disk_budget="512KiB")
        )


def test_state_that_waits_in_ram_counts_and_idle_memory_makes_way(tmp_path, expected):
    model, optimizer = build("ram")
    sizes = sum(8 * p.numel() + 4 for p in model.parameters())
    config = OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0, ram_budget=sizes + 64 * KIB)
    with offload_activations(model, config) as session:
        for step in range(STEPS):
            one_step(model, optimizer, step, session)
            assert session._storage.ram.taken_bytes <= int(config.ram_budget)
        assert session.stats.accounts["activations"]["ram"].written_bytes > 0
        held = session.stats.accounts["optimizer state"]["ram"].used_bytes
        assert 0.5 * sizes < held <= sizes
    assert_as_expected(model, optimizer, expected)
    assert session._storage.ram.taken_bytes == held
    del optimizer
    gc.collect()
    assert session._storage.ram.taken_bytes == 0


def test_state_that_the_ram_budget_has_no_room_for_is_one_clear_error(tmp_path):
    model, optimizer = build("ram")
    with offload_activations(model, OffloadConfig(tier="ram", min_bytes=0, ram_budget="16KiB")) as session:
        one_step(model, optimizer, 0, session)
        with pytest.raises(StorageError, match=r"cannot wait in RAM.*ram_budget=16.00 KiB"):
            one_step(model, optimizer, 1, session)


def test_a_wrapped_model_has_the_same_storage(tmp_path, caplog):
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, **batch):
            return self.module(**batch)

    model, optimizer = build("ssd", tmp_path)
    with caplog.at_level(logging.WARNING), offload_activations(Wrapper(model), config_of(tmp_path)) as session:
        for step in range(2):
            one_step(model, optimizer, step, session)
    assert session.stats.accounts["optimizer state"]["ssd"].written_bytes > 0
    assert session.written()[0].accounts.keys() == {"activations", "optimizer state"}


def test_a_trainer_saves_at_the_write_limit_of_its_state_and_goes_on_from_there(tmp_path):
    def trained(args, resume=None):
        trainer = Trainer(
            model=tiny_model("llama", dropout=0.0), args=args, train_dataset=ExampleDataset("llama", 24, seed=1)
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    plain = {
        "max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_strategy": "no", "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "seed": 3, "dataloader_pin_memory": False, "memory_mode": "badam",
    }  # fmt: skip
    blocks = {"order": "ascending", "switch_every": 2}
    (tmp_path / "files").mkdir()
    flags = {"offload": "ssd", "offload_directory": str(tmp_path / "files"), "offload_min_bytes": "1GiB"}
    limit = {"offload_max_disk_write_bytes": "1KiB", "offload_on_disk_write_limit": "stop"}
    in_ram, on_disk = {**blocks, "inactive_state": "ram"}, {**blocks, "inactive_state": "ssd"}
    expected = trained(OffloadTrainingArguments(output_dir=str(tmp_path / "plain"), **plain, memory_mode_kwargs=in_ram))
    ours = {"output_dir": str(tmp_path / "ours"), **plain, "memory_mode_kwargs": on_disk, **flags}
    stopped = trained(OffloadTrainingArguments(**ours, **limit))
    assert stopped.state.global_step == 2, "the first turn's end"
    resumed = trained(OffloadTrainingArguments(**ours), str(tmp_path / "ours" / "checkpoint-2"))
    before, after = weights(expected.model), weights(resumed.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
