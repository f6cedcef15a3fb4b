"""A drive that is full, fails or hangs under a streamed optimizer: the bits of the run in memory, or one error."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from hf_offload import OffloadConfig, attach
from hf_offload.errors import OffloadError, StandstillError, StorageError
from hf_offload.optimizers.streamed import streaming_of
from hf_offload.session import attached_session
from tests.faults.failing_calls import ALL, Faults, Hang
from tests.faults.test_streamed_interrupts import SMALLEST, Training
from tests.helpers.streamed import same

EIO, ENOSPC = 5, 28
STEPS = 3


@pytest.fixture(scope="module")
def expected():
    """The values before the first step and after each one, in memory."""
    plain = Training(None, backwards=2, clips=True)
    found = [plain.values()]
    for number in range(STEPS):
        plain.step(number)
        found.append(plain.values())
    return found


def training(folder, **settings):
    made = Training(folder, backwards=2, clips=True)
    if settings:
        made.session.detach()
        made = Training(None, backwards=2, clips=True)
        config = OffloadConfig(tier="none", optimizer="ssd", directory=folder, min_bytes=SMALLEST, **settings)
        made.session = attach(made.model, config)
        made.session.prepare_optimizer(made.optimizer)
    return made


def run(made):
    for number in range(STEPS):
        made.step(number)
    return made.values()


@pytest.mark.parametrize("which", [ALL, range(3, 5)], ids=["all", "some"])
@pytest.mark.parametrize("number", [EIO, ENOSPC])
def test_what_cannot_be_written_stays_in_memory(number, which, expected, tmp_path, monkeypatch, caplog):
    faults = Faults(monkeypatch, "write_once", number, which)
    made = training(tmp_path)
    assert same(run(made), expected[-1])
    assert faults.failed > 0
    streaming = streaming_of(made.optimizer)
    streaming.states.store.settle()
    streaming.gradients.store.settle()
    streaming.states.store.collect()
    streaming.gradients.store.collect()
    said = [record.getMessage() for record in caplog.records if "stays in memory" in record.getMessage()]
    assert 1 <= len(said) <= 2  # once an account
    assert all(f"errno {number}" in each for each in said)


@pytest.mark.parametrize(
    "settings", [{"disk_budget": "96KiB"}, {"max_disk_write_bytes": "300KiB"}], ids=["disk_budget", "write_limit"]
)
def test_past_a_limit_the_rest_stays_in_memory(settings, expected, tmp_path, caplog):
    made = training(tmp_path, **settings)
    assert same(run(made), expected[-1])
    assert any("stays in memory" in record.getMessage() for record in caplog.records)
    written = sum(tiers["ssd"].written_bytes for tiers in made.session.stats.accounts.values())
    assert written > 0
    if "max_disk_write_bytes" in settings:
        assert written <= 300 << 10
    else:
        assert made.session._storage.disk.taken_bytes <= 96 << 10


def test_a_run_that_is_to_stop_at_its_write_limit_stops_after_a_whole_step(expected, tmp_path):
    made = training(tmp_path, max_disk_write_bytes="300KiB", on_disk_write_limit="stop")
    done = 0
    while not made.session.must_stop and done < STEPS:
        made.step(done)
        made.session.end_step()
        done += 1
    assert made.session.must_stop
    assert same(made.values(), expected[done])


def test_a_read_that_fails_once_is_an_error_and_the_step_can_be_completed(expected, tmp_path, monkeypatch):
    errors = 0
    for failing in range(0, 40, 5):
        made = training(tmp_path)
        made.step(0)
        with monkeypatch.context() as patch:
            faults = Faults(patch, "read_once", EIO, range(failing, failing + 1))
            done = 1
            while done < STEPS:
                try:
                    made.step(done)
                except StorageError as error:
                    errors += 1
                    message = str(error)
                    assert "errno 5" in message
                    taken = same(values_patiently(made), expected[done + 1])
                    assert taken or same(values_patiently(made), expected[done])
                    done += taken
                else:
                    done += 1
            found = values_patiently(made)
            assert faults.failed <= 1
        assert same(found, expected[-1])
    assert errors > 0


def values_patiently(made):
    try:
        return made.values()
    except StorageError:
        return made.values()


def test_a_state_that_is_lost_is_an_error_until_a_checkpoint_is_loaded(expected, tmp_path, monkeypatch):
    made = training(tmp_path)
    made.step(0)
    checkpoint = made.values()
    made.step(1)
    streaming = streaming_of(made.optimizer)
    streaming.states.store.settle()
    streaming.gradients.store.settle()
    with monkeypatch.context() as patch:
        Faults(patch, "read_once", EIO, ALL)
        for use in (made.model.state_dict, made.values, made.optimizer.state_dict, lambda: made.step(2), made.values):
            with pytest.raises(StorageError, match=r"go on from the last checkpoint.*errno 5"):
                found = use()
                [value.clone() for value in found.values()]
        weights, state = checkpoint
        made.model.load_state_dict(weights)
        with pytest.raises(OffloadError, match="load_state_dict"):
            made.optimizer.step()
        with pytest.raises(OffloadError, match="load_state_dict"):
            made.optimizer.state_dict()
        made.optimizer.load_state_dict(state)
    for number in range(1, STEPS):
        made.step(number)
    assert same(made.values(), expected[-1])


def test_a_session_ends_although_its_last_updates_are_lost(tmp_path, monkeypatch):
    made = training(tmp_path)
    made.step(0)
    made.step(1)
    streaming = streaming_of(made.optimizer)
    streaming.states.store.settle()
    streaming.gradients.store.settle()
    Faults(monkeypatch, "read_once", EIO, ALL)
    with pytest.raises(StorageError, match="go on from the last checkpoint"):
        made.session.detach()
    assert attached_session(made.model) is None
    assert made.session not in made.session._storage.members


@pytest.mark.parametrize("side", ["write_once", "read_once"])
def test_a_drive_that_hangs_is_an_error_and_the_run_goes_on_if_it_answers(side, expected, tmp_path, monkeypatch):
    made = training(tmp_path)
    for store in (streaming_of(made.optimizer).states.store, streaming_of(made.optimizer).gradients.store):
        store.window_bytes = 0  # each write is waited for
    made.step(0)
    streaming_of(made.optimizer).finish()
    hang = Hang(monkeypatch, side)
    try:
        with pytest.raises(StorageError) as raised:
            made.step(1)
            made.values()
        cause = raised.value
        while cause is not None and not isinstance(cause, StandstillError):
            cause = cause.__cause__
        assert cause is not None
    finally:
        hang.end()
    found = made.values()
    done = next(number for number in (1, 2) if same(found, expected[number]))
    for number in range(done, STEPS):
        made.step(number)
    assert same(made.values(), expected[-1])


def test_an_update_in_backward_that_no_step_follows_cannot_be_saved_nor_trained_on(tmp_path):
    made = Training(tmp_path, in_backward=True)
    made.step(0)
    made.optimizer.zero_grad()
    made.model(**made.batch).loss.backward()
    made.optimizer.zero_grad()
    with pytest.raises(OffloadError, match="half a step: go on from the last checkpoint"):
        made.model(**made.batch)
    with pytest.raises(OffloadError, match="half a step"):
        made.optimizer.state_dict()
    with pytest.raises(OffloadError, match="half a step"):
        torch.save(made.model.state_dict(), tmp_path / "weights.pt")


def test_a_model_that_is_dropped_with_updates_noted_is_freed(tmp_path):
    made = Training(tmp_path, looks=True)
    made.step(0)
    made.model(**made.batch).loss.backward()
    model = weakref.ref(made.model)
    del made
    gc.collect()
    assert model() is None


def test_a_saved_state_is_mapped_from_files_without_a_name(tmp_path):
    model = torch.nn.Linear(256, 256)
    session = attach(model, OffloadConfig(tier="none", optimizer="ssd", directory=tmp_path, min_bytes=SMALLEST))
    optimizer = session.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"][0]["exp_avg"].untyped_storage().filename.startswith("/proc/self/fd/")
    assert list(tmp_path.iterdir()) == []
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert mapped
    assert not any("hf_offload-state" in line for line in mapped)
    session.detach()
