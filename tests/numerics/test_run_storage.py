"""Activations and optimizer state in one run: one budget for RAM, one for disk, one write limit."""

import gc
from pathlib import Path

import pytest
import torch

from hf_offload import OffloadConfig, offload_activations
from hf_offload.integrations.summary import summary_lines
from hf_offload.state.optimizer import streaming_of
from hf_offload.storage import disk_io, wear
from hf_offload.storage.service import storage_of
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights

DRIVE = "a made-up drive"
STEPS = 6
KIB, GIB = 1 << 10, 1 << 30


@pytest.fixture(autouse=True)
def made_up_drive(monkeypatch):
    monkeypatch.setattr(wear, "drive_of", lambda directory: DRIVE)


def one_step(model, optimizer, step, session=None):
    model(**tiny_batch("llama", seed=step)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if session is not None:
        session.end_step()


def config_of(directory, **others):
    return OffloadConfig(tier="ssd", optimizer="ssd", directory=directory, min_bytes=16, **others)


def build():
    model = tiny_model("llama", dropout=0.0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def wait_for_writes(optimizer):
    streaming = streaming_of(optimizer)
    for store in (streaming.state_store, streaming.gradient_store):
        store.settle()


def run(config, steps=STEPS):
    """Model, optimizer and session after some steps."""
    model, optimizer = build()
    with offload_activations(model, config) as session:
        session.prepare_optimizer(optimizer)
        for step in range(steps):
            one_step(model, optimizer, step, session)
        wait_for_writes(optimizer)
    return model, optimizer, session


@pytest.fixture(scope="module")
def expected():
    """Weights and state of the run in memory."""
    model, optimizer = build()
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


def test_what_each_account_writes_is_reported_and_counted_together(tmp_path, expected):
    model, optimizer, session = run(config_of(tmp_path))
    assert_as_expected(model, optimizer, expected)
    accounts = {name: tiers["ssd"].written_bytes for name, tiers in session.stats.accounts.items() if "ssd" in tiers}
    assert session.written() == {DRIVE: accounts}
    assert accounts["activations"] == session.stats.total.written_bytes > 0
    assert accounts["optimizer state"] > 0
    (line,) = [one for one in summary_lines(session) if one.startswith("Drive ")]
    assert " of activations, " in line
    assert " of optimizer state" in line


def test_files_of_one_directory_are_shared_and_go_with_the_last_account(tmp_path):
    model, optimizer, session = run(config_of(tmp_path), steps=3)
    assert file_bytes(tmp_path), "state is still there"
    one_step(model, optimizer, 3)
    del model, optimizer
    gc.collect()
    assert file_bytes(tmp_path) == 0
    assert not session.active


# -- the limit of bytes written ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 400 * KIB])
def test_the_write_limit_holds_for_both_and_state_stays_in_memory(limit, tmp_path, expected, caplog):
    model, optimizer, session = run(config_of(tmp_path, max_disk_write_bytes=limit))
    assert_as_expected(model, optimizer, expected)
    assert sum(session.written()[DRIVE].values()) <= limit
    assert "A part of the optimizer state stays in memory" in caplog.text
    assert not session.must_stop


def test_another_run_begins_with_its_whole_limit(tmp_path):
    model, optimizer = build()
    found = []
    for limit in (0, GIB, GIB):
        with offload_activations(model, config_of(tmp_path, max_disk_write_bytes=limit)) as session:
            session.prepare_optimizer(optimizer)
            assert session._storage.disk_writes.taken_bytes == 0
            for step in range(4):
                one_step(model, optimizer, step, session)
            wait_for_writes(optimizer)
            found.append(sum(session.written()[DRIVE].values()))
            assert session._storage.disk_writes.refused == (limit == 0)
            assert session._storage.disk_writes.taken_bytes >= found[-1]
    assert found[0] == 0 < min(found[1:])


# -- space on disk ----------------------------------------------------------------------------------------------------


def test_the_disk_budget_holds_for_both_at_any_moment(tmp_path, monkeypatch, expected):
    budget, most = 3 << 20, [0]
    real = disk_io.write_once

    def write(fd, data, offset):
        most[0] = max(most[0], file_bytes(tmp_path))
        return real(fd, data, offset)

    monkeypatch.setattr(disk_io, "write_once", write)
    model, optimizer, session = run(config_of(tmp_path, disk_budget=budget))
    assert_as_expected(model, optimizer, expected)
    assert 0 < most[0] <= budget
    assert session._storage.disk.taken_bytes == file_bytes(tmp_path)


def test_a_wrapped_model_has_the_same_storage(tmp_path):
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, **batch):
            return self.module(**batch)

    model, optimizer = build()
    with offload_activations(Wrapper(model), config_of(tmp_path)) as session:
        session.prepare_optimizer(optimizer)
        for step in range(2):
            one_step(model, optimizer, step, session)
        assert storage_of(model) is session._storage
    assert {"activations", "optimizer state"} <= session.written()[DRIVE].keys()
