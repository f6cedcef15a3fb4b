"""What a byte that moves takes of a training's own time, worked out by hand."""

from types import SimpleNamespace

import pytest

from hf_offload.plan.hardware import describe_hardware
from hf_offload.planning.step_time import Overhead
from hf_offload.storage.handling import WAITS


class GivenEngine:
    def __init__(self):
        self.activations = (0.0, 0)

    def waited_s(self):
        return 3.0

    def handled(self):
        return self.activations

    def bandwidth(self):
        return {"ssd": (2e9, 0.0)}


class GivenStorage:
    """``others``: kind -> seconds and bytes."""

    def __init__(self):
        self.others = {}
        self.handling = SimpleNamespace(total_s=0.0, seconds=lambda kind: self.others[kind][0])

    @property
    def accounts(self):
        return {
            kind: {"ssd": SimpleNamespace(written_bytes=nbytes, read_bytes=0)}
            for kind, (_, nbytes) in self.others.items()
        }


@pytest.fixture
def told():
    return GivenEngine(), GivenStorage()


def test_bytes_of_each_kind_take_what_they_took_in_usual_steps(told):
    engine, state = told
    engine.activations, state.others = (5.0, 100), {"weights": (7.0, 100)}  # of a run before
    overhead = Overhead(engine, state, "cpu")
    engine.activations, state.others = (25.0, 110), {"weights": (11.0, 102)}
    overhead.end_step(is_measured=True)
    assert overhead.busy_s["activations"] == 2.0
    assert overhead.busy_s["weights"] == 2.0
    engine.activations = (29.0, 114)
    overhead.end_step(is_measured=False)
    assert overhead.busy_s["activations"] == 1.0  # measuring slows everything down
    assert overhead.busy_s["weights"] == 2.0  # of which no usual step has moved any
    engine.activations = (33.0, 118)
    overhead.end_step(is_measured=False)
    assert overhead.busy_s["activations"] == 1.0
    engine.activations = (93.0, 122)  # a machine that had other work to do
    overhead.end_step(is_measured=False)
    assert overhead.busy_s["activations"] == 2.0


def test_what_moves_between_two_steps_belongs_to_neither(told):
    engine, state = told
    overhead = Overhead(engine, state, "cpu")
    engine.activations = (3.0, 10)
    overhead.end_step(is_measured=False)
    engine.activations = (500.0, 20)  # a new plan
    overhead.begin_step()
    engine.activations = (503.0, 30)
    overhead.end_step(is_measured=False)
    assert overhead.busy_s["activations"] == 0.3


def test_what_has_not_moved_is_taken_to_be_like_all_others_together(told):
    engine, state = told
    overhead = Overhead(engine, state, "cpu")
    assert set(overhead.busy_s.values()) == {0.0}
    engine.activations, state.others = (3.0, 10), {"weights": (1.0, 10), "gradients": (0.0, 0)}
    overhead.end_step(is_measured=True)
    assert overhead.busy_s["gradients"] == overhead.busy_s["optimizer state"] == 4.0 / 20


def test_an_accelerator_is_not_busy_with_what_moves_but_waits(told):
    engine, state = told
    state.others, state.handling.total_s = {WAITS: (4.0, 0)}, 100.0
    overhead = Overhead(engine, state, "cuda")
    engine.activations = (3.0, 10)
    overhead.end_step(is_measured=False)
    assert set(overhead.busy_s.values()) == {0.0}
    assert overhead.seconds() == 3.0 + 4.0
    assert Overhead(engine, state, "cpu").seconds() == 100.0


def test_plans_are_made_for_rates_that_were_reached(told):
    engine, state = told
    hardware = describe_hardware("l4", ssd="1GB/s")
    overhead = Overhead(engine, state, "cpu")
    engine.activations = (3.0, 10)
    overhead.end_step(is_measured=False)
    found = overhead.on(hardware)
    assert found.store_bytes_per_s["ssd"].value == 2e9
    assert found.load_bytes_per_s["ssd"].value == 1e9  # nothing has been read yet
    assert {channel.busy_s["activations"] for channel in found.channels.values()} == {0.3}
