"""A drive that fails under a streamed optimizer: one error, and the bits of the run in memory from a checkpoint on."""

import functools
import gc
import weakref

import pytest
import torch

from hf_offload.errors import OffloadError, StorageError
from hf_offload.session import attached_session
from hf_offload.state.optimizer import streaming_of
from tests.faults.failing_calls import ALL, EIO, Faults
from tests.faults.numbered_steps import STEPS, STREAMED, Training, values_in_memory
from tests.helpers.train import same


@pytest.fixture(scope="module")
def expected():
    return values_in_memory(functools.partial(Training, **STREAMED))


def test_a_read_that_fails_once_is_an_error_and_the_step_can_be_completed(expected, tmp_path, monkeypatch):
    errors = 0
    for failing in range(0, 40, 8):
        made = Training(tmp_path, **STREAMED)
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


def test_a_state_that_cannot_be_read_is_an_error_until_the_drive_answers(expected, tmp_path, monkeypatch):
    made = Training(tmp_path, **STREAMED)
    made.step(0)
    made.step(1)
    streaming = streaming_of(made.optimizer)
    streaming.state_store.settle()
    streaming.gradient_store.settle()
    with monkeypatch.context() as patch:
        Faults(patch, "read_once", EIO, ALL)
        for use in (made.model.state_dict, made.values, lambda: made.step(2), made.values):
            with pytest.raises(StorageError, match=r"go on from the last checkpoint.*errno 5"):
                use()
    assert same(made.run(2), expected[-1])


def test_a_session_ends_although_its_last_updates_are_lost(tmp_path, monkeypatch):
    made = Training(tmp_path, **STREAMED)
    made.step(0)
    made.step(1)
    streaming = streaming_of(made.optimizer)
    streaming.state_store.settle()
    streaming.gradient_store.settle()
    Faults(monkeypatch, "read_once", EIO, ALL)
    with pytest.raises(StorageError, match="go on from the last checkpoint"):
        made.session.detach()
    assert attached_session(made.model) is None
    assert made.session not in made.session._storage.members


def test_an_update_in_backward_that_no_step_follows_cannot_be_saved_nor_trained_on(tmp_path):
    made = Training(tmp_path, optimizer="ssd", in_backward=True)
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
    made = Training(tmp_path, optimizer="ssd", looks=True)
    made.step(0)
    made.model(**made.batch).loss.backward()
    model = weakref.ref(made.model)
    del made
    gc.collect()
    assert model() is None
