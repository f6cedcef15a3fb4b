"""A drive that fails or flips bits under weights: the bits of the run in memory, or one error with a name."""

import gc
import os
import re

import pytest
import torch

from hf_offload.errors import StorageError
from hf_offload.session import attached_session
from tests.faults.failing_calls import ALL, EIO, Faults
from tests.faults.interrupted import used_bytes
from tests.faults.numbered_steps import PARKED, Training, values_in_memory
from tests.helpers.parked import leave_memory
from tests.helpers.streamed import same


@pytest.fixture(scope="module")
def expected():
    return values_in_memory()


class Phases:
    """A step, a phase at a time, and before which of them the drive fails."""

    def __init__(self, made):
        self.made = made

    def forward(self, number):
        self.made.optimizer.zero_grad()
        torch.manual_seed(100 * number)
        self.loss = self.made.model(**self.made.batch).loss

    def backward(self, number):
        self.loss.backward()

    def step(self, number):
        self.made.optimizer.step()

    def read_again(self, number):
        self.made.values()


PHASES = ["forward", "backward", "step", "read_again"]


@pytest.mark.parametrize("optimizer", ["none", "ssd"])
@pytest.mark.parametrize("failing", PHASES)
def test_a_weight_that_cannot_be_read_is_an_error_that_names_it(failing, optimizer, expected, tmp_path, monkeypatch):
    made = Training(tmp_path, params="ssd", optimizer=optimizer)
    made.step(0)
    made.values()
    phases = Phases(made)
    leave_memory(made.session)
    with pytest.raises(StorageError) as raised:
        for phase in PHASES:
            if phase == failing:
                leave_memory(made.session)
                monkeypatch.setattr(made.session.residency, "_order", type(made.session.residency._order)(0))
                Faults(monkeypatch, "read_once", EIO, ALL)
            getattr(phases, phase)(1)
    names = {name for name, _ in made.model.named_parameters()}
    message = str(raised.value)
    found = re.search(r"The weight ([\w.]+) cannot be read back: go on from the last checkpoint\. .*errno 5", message)
    assert (found and found[1] in names) or ("go on from the last checkpoint" in message and optimizer == "ssd")
    monkeypatch.undo()
    del raised
    phases.loss = None
    if (
        failing == "step" and optimizer == "none"
    ):  # half a step, as in memory after an error: the checkpoint has the rest
        made.load(expected[1])
        done = 1
    else:
        found = made.values()
        done = next(number for number in (1, 2) if same(found, expected[number]))
        assert done == 1 or failing in ("step", "read_again")
    assert same(made.run(done), expected[-1])
    made.session.detach()
    assert attached_session(made.model) is None


def test_what_failed_to_be_read_ahead_is_read_again_when_it_is_used(expected, tmp_path, monkeypatch):
    made = Training(tmp_path, **PARKED)
    leave_memory(made.session)
    weight = max(made.session.residency.weights(), key=lambda each: each.nbytes)
    with monkeypatch.context() as patch:
        faults = Faults(patch, "read_once", EIO, ALL)
        assert weight.read_ahead()
        weight.store.tier.wait_until_done(weight._read[1])
    assert faults.failed > 0
    weight.come()
    assert same(made.values(), expected[0])


def flip_a_bit_on_the_drive(weight):
    stored = weight._stored
    file = stored._store.tier.files[0]
    slot = stored._held.slot
    at = slot.pieces[0].offset + slot.image.middle_bytes // 2
    data = bytearray(1)
    os.preadv(file._buffered_fd, [data], at)
    data[0] ^= 4
    os.pwrite(file._buffered_fd, data, at)
    os.fsync(file._buffered_fd)


def flip_a_bit_in_ram(weight):
    slot = weight._stored._held.slot
    slot.arena.data[slot.offset + slot.nbytes // 2] ^= 4


@pytest.mark.parametrize(("params", "flip"), [("ssd", flip_a_bit_on_the_drive), ("ram", flip_a_bit_in_ram)])
def test_a_flipped_bit_of_a_weight_is_found(params, flip, tmp_path):
    made = Training(tmp_path, params=params, verify="checksum")
    made.step(0)
    leave_memory(made.session)
    weight = max(made.session.residency.weights(), key=lambda each: each.nbytes)
    flip(weight)
    with pytest.raises(StorageError, match=rf"The weight {re.escape(weight.name)} .*checksums differ.*do not trust"):
        made.step(1)
    with pytest.raises(StorageError, match=rf"The weight {re.escape(weight.name)} .*checksums differ"):
        made.values()


def test_nothing_is_left_after_faults(tmp_path, monkeypatch):
    made = Training(tmp_path, **PARKED)
    with monkeypatch.context() as patch:
        Faults(patch, "write_once", EIO, range(3, 5))
        Faults(patch, "read_once", EIO, range(2, 3))
        with pytest.raises(StorageError, match="cannot be read back"):
            made.run()
    assert [weight.name for weight in made.session.residency.weights() if weight.uses] == []
    store = made.session.residency.store
    del made
    gc.collect()
    assert used_bytes(store, 0) == 0
    assert list(tmp_path.iterdir()) == []
