"""Ctrl-C at any point of a run whose optimizer is streamed: the step was taken or not, or one error says that it was half."""

import gc
import random
import sys
import time

import pytest
import torch

from hf_offload import OffloadConfig, attach
from hf_offload.errors import OffloadError
from hf_offload.optimizers.streamed import streaming_of
from tests.faults.test_interrupts import Points
from tests.helpers.package_threads import OurThreads
from tests.helpers.tiny_models import tiny_batch, tiny_model

STEPS = 3
QUICK_POINTS = 20
TIMEOUT_S = 60
SMALLEST = 512  # bytes: of the tiny model, weights of layers are streamed and biases are not

KINDS = {
    "lazy": {},
    "accumulated": {"backwards": 2, "clips": True},
    "in_backward": {"in_backward": True},
    "looked_at": {"looks": True},
    "saved": {"saves": True},
    "loaded": {"loads": True},
}


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(each) for each in value]
    return value


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Training:
    """Steps that depend on their number alone, in memory or with the optimizer on a drive."""

    def __init__(self, folder, backwards=1, clips=False, in_backward=False, looks=False, saves=False, loads=False):
        self.backwards, self.clips, self.looks, self.saves, self.loads = backwards, clips, looks, saves, loads
        self.in_backward = in_backward
        self.model = tiny_model("gpt2")
        self.batch = tiny_batch("gpt2")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.session = None
        if folder is not None:
            config = OffloadConfig(tier="none", optimizer="ssd", directory=folder, min_bytes=SMALLEST)
            self.session = attach(self.model, config)
            self.session.prepare_optimizer(self.optimizer)
            self.session.update_in_backward(in_backward)

    def step(self, number):
        self.optimizer.zero_grad()
        for micro in range(self.backwards):
            torch.manual_seed(100 * number + micro)  # of dropout
            self.model(**self.batch).loss.backward()
        if self.clips:
            if self.session is None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            else:
                self.session.clip_grad_norm_(0.1)
        self.optimizer.step()
        if self.looks:
            for state in self.optimizer.state.values():
                state["exp_avg"].mul_(0.5)
        if self.saves or self.loads:
            saved = self.optimizer.state_dict()
            if self.loads:
                self.optimizer.load_state_dict(saved)

    def values(self):
        return copied(self.model.state_dict()), copied(self.optimizer.state_dict())

    def load(self, values):
        weights, state = values
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(copied(state))


def used_bytes(store, expected):
    """Bytes of a store's slots: what is being moved yet is freed when that has ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        store.settle()
        store.collect()
        used = store.tier.stats.used_bytes
        if used <= expected or time.monotonic() > deadline:
            return used
        time.sleep(0.01)


@pytest.fixture(params=list(KINDS))
def kind(request):
    return request.param


class Interrupted:
    """A training in memory, with the values after each of its steps, and how one on a drive compares with it."""

    def __init__(self, kind, folder):
        self.options = KINDS[kind]
        self.folder = folder
        plain = Training(None, **self.options)
        self.expected = [plain.values()]
        for number in range(STEPS):
            plain.step(number)
            self.expected.append(plain.values())

    def points(self):
        points = Points()
        training = Training(self.folder, **self.options)
        training.step(0)
        with points:
            training.step(1)
        return list(points.seen)

    def check(self, point):
        """Whether Ctrl-C was sent."""
        training = Training(self.folder, **self.options)
        training.step(0)
        profiler, noticed = Points(point), False
        try:
            with profiler:
                training.step(1)
        except KeyboardInterrupt:
            noticed = True
        finally:
            sys.setprofile(None)
        assert noticed == profiler.sent, f"Ctrl-C at {point} is lost"
        if profiler.sent:
            self.check_values(training, point)
        return profiler.sent

    def check_values(self, training, point):
        error = ""
        try:
            found = training.values()
        except OffloadError as raised:
            error = str(raised)
        if error:
            assert "checkpoint" in error, f"at {point}: {error}"
            done = 1
            training.load(self.expected[done])
        else:
            # What the loop changes in the state itself it may have changed in part, as in memory.
            expected = self.expected if not training.looks else [(weights, None) for weights, _ in self.expected]
            matches = [same(found[0], each[0]) and (each[1] is None or same(found[1], each[1])) for each in expected]
            assert any(matches[1:3]), f"Neither the values before the step nor those after it, at {point}"
            done = matches.index(True, 1)
            if training.looks:
                training.load(self.expected[done])
        for number in range(done, STEPS):
            training.step(number)
        assert same(training.values(), self.expected[-1]), f"The run that goes on is another one, after {point}"
        streaming = streaming_of(training.optimizer)
        training.optimizer.zero_grad()
        gc.collect()
        kept = sum(record.state_bytes for record in streaming.records)
        granules = 4096 * sum(len(record.states) for record in streaming.records)
        assert used_bytes(streaming.states.store, kept + granules) <= kept + granules, f"after {point}"
        assert used_bytes(streaming.gradients.store, 0) == 0, f"after {point}"


@pytest.fixture
def interrupted(kind, tmp_path, no_collections):
    return Interrupted(kind, tmp_path)


def assert_nothing_runs(threads):
    gc.collect()
    threads.join(TIMEOUT_S)


def test_ctrl_c_at_a_point_of_a_streamed_step_leaves_whole_steps_or_one_error(interrupted):
    threads = OurThreads()
    points = interrupted.points()
    assert len(points) > 100
    some = random.Random(0).sample(points, QUICK_POINTS)
    assert sum(map(interrupted.check, some)) > QUICK_POINTS / 2
    assert_nothing_runs(threads)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ctrl_c_at_every_point_of_a_streamed_step_leaves_whole_steps_or_one_error(interrupted):
    points = interrupted.points()
    assert sum(map(interrupted.check, points)) > len(points) / 2
