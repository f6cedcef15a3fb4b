"""Ctrl-C at any point of a step whose weights are on a tier: none is lost, and the run that goes on has the same bits."""

import gc
import random
import sys

import pytest
import torch

from hf_offload import OffloadConfig, attach
from hf_offload.errors import OffloadError
from hf_offload.optimizers.streamed import streaming_of
from hf_offload.parameters import saved
from tests.faults.test_interrupts import Points
from tests.faults.test_streamed_interrupts import STEPS, assert_nothing_runs, copied, same, used_bytes
from tests.helpers.package_threads import OurThreads
from tests.helpers.parked import leave_memory
from tests.helpers.tiny_models import tiny_batch, tiny_model

QUICK_POINTS = 16
SMALLEST = 512

KINDS = {
    "in_memory": {"optimizer": "none"},
    "streamed": {"optimizer": "ssd"},
    "in_backward": {"optimizer": "ssd", "in_backward": True},
    "evaluated": {"optimizer": "none", "evaluates": True},
}


class Training:
    """Steps that depend on their number alone, with weights in memory or on a drive whenever they are not used."""

    def __init__(self, folder, optimizer="none", in_backward=False, evaluates=False):
        self.evaluates = evaluates
        self.model = tiny_model("gpt2")
        self.batch = tiny_batch("gpt2")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.session = None
        if folder is not None:
            config = OffloadConfig(tier="none", params="ssd", optimizer=optimizer, directory=folder, min_bytes=SMALLEST)
            self.session = attach(self.model, config)
            self.session.residency.limit_bytes = 1
            self.session.prepare_optimizer(self.optimizer)
            self.session.update_in_backward(in_backward)

    def step(self, number):
        self.optimizer.zero_grad()
        torch.manual_seed(number)  # of dropout
        self.model(**self.batch).loss.backward()
        self.optimizer.step()
        if self.evaluates:
            with torch.no_grad():
                self.model.eval()(**self.batch)
            self.model.train()

    def values(self):
        return copied(self.model.state_dict()), copied(self.optimizer.state_dict())

    def load(self, values):
        weights, state = values
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(copied(state))


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
        self.run(training, points)
        return list(points.seen)

    def run(self, training, profiler):
        """The second step. One in memory is half taken when it is interrupted, so that is not."""
        if self.options["optimizer"] == "none":
            step, training.optimizer.step = training.optimizer.step, lambda: None
            try:
                with profiler:
                    training.step(1)
            finally:
                training.optimizer.step = step
            training.optimizer.step()
        else:
            with profiler:
                training.step(1)

    def check(self, point):
        """Whether Ctrl-C was sent."""
        training = Training(self.folder, **self.options)
        training.step(0)
        profiler, noticed = Points(point), False
        try:
            self.run(training, profiler)
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
            assert self.options.get("in_backward"), f"at {point}: {error}"
            assert "half a step: go on from the last checkpoint" in error, f"at {point}: {error}"
            done = 1
            training.load(self.expected[done])
        else:
            matches = [same(found, each) for each in self.expected]
            assert any(matches[1:3]), f"Neither the values before the step nor those after it, at {point}"
            done = matches.index(True, 1)
        for number in range(done, STEPS):
            training.step(number)
        assert same(training.values(), self.expected[-1]), f"The run that goes on is another one, after {point}"
        self.check_nothing_is_left(training, point)

    def check_nothing_is_left(self, training, point):
        training.optimizer.zero_grad()
        saved._release(saved._in_use._residences)
        gc.collect()
        residency = training.session.residency
        assert [weight.name for weight in residency.weights() if weight.uses] == [], f"after {point}"
        leave_memory(training.session)
        granules = sum(-(-weight.nbytes // 4096) * 4096 for weight in residency.weights())
        assert used_bytes(residency.store, granules) <= granules, f"after {point}"
        if self.options["optimizer"] != "none":
            streaming = streaming_of(training.optimizer)
            assert used_bytes(streaming.gradients.store, 0) == 0, f"after {point}"


@pytest.fixture
def interrupted(kind, tmp_path, no_collections):
    return Interrupted(kind, tmp_path)


def test_ctrl_c_at_a_point_of_a_step_loses_no_weight(interrupted):
    threads = OurThreads()
    points = interrupted.points()
    assert len(points) > 100
    some = random.Random(0).sample(points, QUICK_POINTS)
    assert sum(map(interrupted.check, some)) > QUICK_POINTS / 2
    assert_nothing_runs(threads)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ctrl_c_at_every_point_of_a_step_loses_no_weight(interrupted):
    points = interrupted.points()
    assert sum(map(interrupted.check, points)) > len(points) / 2
