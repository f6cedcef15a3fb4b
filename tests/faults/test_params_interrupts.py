"""Ctrl-C at any point of a step whose weights are on a tier: none is lost, and the run that goes on has the same bits."""

import functools
import gc

import pytest
import torch
from torch import nn

from hf_offload.state import saved
from hf_offload.state.optimizer import streaming_of
from hf_offload.state.units import units_of
from tests.faults.interrupted import SIGNALS, Interrupted, check_all, check_random, check_some, used_bytes
from tests.faults.numbered_steps import Training
from tests.helpers.parked import leave_memory, parked

QUICK_POINTS = 6

KINDS = {
    "in_memory": {"optimizer": "none"},
    "streamed": {"optimizer": "ssd"},
    "in_backward": {"optimizer": "ssd", "in_backward": True},
    "evaluated": {"optimizer": "none", "evaluates": True},
}


@pytest.fixture(params=list(KINDS))
def kind(request):
    return request.param


class Parked(Interrupted):
    """Weights are on the drive."""

    def __init__(self, kind, folder):
        self.options = KINDS[kind]
        super().__init__(functools.partial(Training, params="ssd", **KINDS[kind]), folder)

    def run(self, training, profiler):
        """The second step. One in memory is half taken when it is interrupted, so that is not."""
        if self.options["optimizer"] != "none":
            super().run(training, profiler)
            return
        step, training.optimizer.step = training.optimizer.step, lambda: None
        try:
            super().run(training, profiler)
        finally:
            training.optimizer.step = step
        training.optimizer.step()

    def check_error(self, error, point):
        assert self.options.get("in_backward"), f"at {point}: {error}"
        assert "half a step: go on from the last checkpoint" in error, f"at {point}: {error}"

    def check_nothing_is_left(self, training, point):
        saved._release(saved._in_use._units)
        gc.collect()
        residency = training.session.residency
        assert [unit.name for unit in units_of(training.model).units if unit.uses] == [], f"after {point}"
        leave_memory(training.session)
        granules = sum(-(-weight.nbytes // 4096) * 4096 for weight in residency.weights())
        assert used_bytes(residency.store, granules) <= granules, f"after {point}"
        if self.options["optimizer"] != "none":
            streaming = streaming_of(training.optimizer)
            assert used_bytes(streaming.gradient_store, 0) == 0, f"after {point}"


@pytest.fixture
def interrupted(kind, tmp_path, no_collections):
    return Parked(kind, tmp_path)


def test_ctrl_c_at_a_point_of_a_step_loses_no_weight(interrupted):
    check_some(interrupted, QUICK_POINTS)


@pytest.mark.parametrize(
    "entry", ["saved.py pack", "saved.py unpack", "units.py using", "step.py arrived", "step.py step"]
)
def test_ctrl_c_where_pytorch_calls_the_package_loses_no_weight(entry, tmp_path, no_collections):
    file, function = entry.split()
    interrupted = Parked("streamed", tmp_path)
    points = [each for each in interrupted.points() if each[0].endswith(f"/state/{file}") and each[1] == function]
    assert any(interrupted.check(point) for point in (points[0], points[-1]))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_array_that_is_made_after_ctrl_c_has_the_weight(phase, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(5)])
    parked(model, tmp_path)
    inputs = torch.ones(2, 64)
    model(inputs).sum().backward()

    def interrupt(*_):
        raise KeyboardInterrupt

    for layer in model:
        if phase == "forward":
            handle = model[3].register_forward_hook(interrupt)
        else:
            handle = model[2].register_full_backward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(inputs).sum().backward()
        handle.remove()
        array = layer.weight.detach().numpy()
        expected = array.copy() + 1
        with torch.no_grad():
            layer.weight.add_(1)
        for each in model:  # weights come, and let others leave
            each(inputs)
        assert (array == expected).all()
        model(inputs)  # leaves what the interrupted one has entered
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "kind", ["in_memory", "streamed", "in_backward"], indirect=True
)  # evaluation's own loop has modes
def test_two_hundred_ctrl_cs_at_random_moments_of_a_step_lose_no_weight(interrupted):
    check_random(interrupted, SIGNALS)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ctrl_c_at_every_point_of_a_step_loses_no_weight(interrupted):
    check_all(interrupted)
