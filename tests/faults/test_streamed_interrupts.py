"""Ctrl-C at any point of a run whose optimizer is streamed: the step was taken or not, or one error says that it was half."""

import _weakrefset
import functools
import gc
import signal
import sys
import weakref

import pytest

from hf_offload.state.optimizer import streaming_of
from tests.faults.interrupted import SIGNALS, Interrupted, check_all, check_random, check_some, used_bytes
from tests.faults.numbered_steps import STREAMED, Training
from tests.helpers.parked import state_that_moves
from tests.helpers.train import same

QUICK_POINTS = 8

KINDS = {
    "lazy": {},
    "accumulated": {"backwards": 2, "clips": True},
    "in_backward": {"in_backward": True},
    "looked_at": {"looks": True},
    "saved": {"saves": True},
    "loaded": {"loads": True},
}


@pytest.fixture(params=list(KINDS))
def kind(request):
    return request.param


class Streamed(Interrupted):
    """The optimizer is on the drive."""

    def __init__(self, kind, folder):
        self.looks = KINDS[kind].get("looks", False)
        super().__init__(functools.partial(Training, optimizer="ssd", **KINDS[kind]), folder)

    def alike(self, found, expected):
        # What the loop changes in the state itself it may have changed in part, as in memory.
        return same(found[0], expected[0]) if self.looks else same(found, expected)

    def go_on(self, training, expected):
        if self.looks:
            training.load(expected)

    def check_error(self, error, point):
        assert "checkpoint" in error, f"at {point}: {error}"

    def check_nothing_is_left(self, training, point):
        streaming = streaming_of(training.optimizer)
        gc.collect()
        kept = sum(one.nbytes for p in streaming.parameters() for one in state_that_moves(streaming, p))
        granules = 4096 * 2 * len(streaming.records)
        assert used_bytes(streaming.state_store, kept + granules) <= kept + granules, f"after {point}"
        assert used_bytes(streaming.gradient_store, 0) == 0, f"after {point}"


@pytest.fixture
def interrupted(kind, tmp_path, no_collections):
    return Streamed(kind, tmp_path)


def test_ctrl_c_at_a_point_of_a_streamed_step_leaves_whole_steps_or_one_error(interrupted):
    check_some(interrupted, QUICK_POINTS)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_two_hundred_ctrl_cs_at_random_moments_of_a_streamed_step_leave_whole_steps_or_one_error(interrupted):
    check_random(interrupted, SIGNALS)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ctrl_c_at_every_point_of_a_streamed_step_leaves_whole_steps_or_one_error(interrupted):
    check_all(interrupted)


def test_ctrl_c_while_optimizers_are_looked_through_keeps_none_that_has_gone(tmp_path):
    training = Training(tmp_path, **STREAMED)
    training.step(0)
    sent = []

    def send(frame, event, _):
        if event == "call" and frame.f_code.co_name == "__exit__" and frame.f_code.co_filename == _weakrefset.__file__:
            sys.setprofile(None)
            sent.append(frame.f_lineno)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(send)
    try:
        with pytest.raises(KeyboardInterrupt):
            training.session.clip_grad_norm_(1.0)
    finally:
        sys.setprofile(None)
    assert len(sent) == 1
    gone = weakref.ref(streaming_of(training.optimizer))
    training.session.detach()
    del training
    gc.collect()
    assert gone() is None
