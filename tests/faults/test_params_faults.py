"""A drive that fails under weights: the bits of the run in memory, or one error with a name."""

import gc
import re

import pytest
import torch

from hf_offload.errors import StorageError
from hf_offload.session import attached_session
from hf_offload.state.registry import before_user_code
from hf_offload.state.units import units_of
from tests.faults.failing_calls import ALL, EIO, Faults
from tests.faults.interrupted import used_bytes
from tests.faults.numbered_steps import PARKED, Training, values_in_memory
from tests.helpers.parked import leave_memory
from tests.helpers.train import same


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


# An optimizer in memory, and who copies weights, read the mapping, where a drive that fails ends the process.
@pytest.mark.parametrize(
    ("failing", "optimizer"), [("forward", "none"), ("backward", "none"), *((phase, "ssd") for phase in PHASES)]
)
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
                before_user_code()  # nothing is on its way ahead of its use
                Faults(monkeypatch, "read_once", EIO, ALL)
            getattr(phases, phase)(1)
    names = {name for name, _ in made.model.named_parameters()}
    message = str(raised.value)
    found = re.search(r"The weight ([\w.]+) cannot be read back: go on from the last checkpoint\. .*errno 5", message)
    assert (found and found[1] in names) or ("go on from the last checkpoint" in message and optimizer == "ssd")
    monkeypatch.undo()
    del raised
    phases.loss = None
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
        weight.store.tier.wait_until_done(weight.reads._begun[0, weight.nbytes][1])
    assert faults.failed > 0
    weight.come()
    assert same(made.values(), expected[0])


def test_nothing_is_left_after_faults(tmp_path, monkeypatch):
    made = Training(tmp_path, **PARKED)
    with monkeypatch.context() as patch:
        Faults(patch, "write_once", EIO, range(3, 5))
        Faults(patch, "read_once", EIO, range(2, 12))  # ahead, and once more
        with pytest.raises(StorageError, match="cannot be read back"):
            made.run()
    assert [unit.name for unit in units_of(made.model).units if unit.pin_count] == []
    store = made.session.residency.store
    del made
    gc.collect()
    assert used_bytes(store, 0) == 0
    assert list(tmp_path.iterdir()) == []
