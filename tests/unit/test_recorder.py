"""What a measured step is found to need."""

import threading

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, attach
from hf_offload.planning.measuring import StepMeter

WIDE = 1 << 20


class Added(torch.autograd.Function):
    """Adds its gradients up itself, in memory of their own."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.view_as(hidden), hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, one, other):
        return one + other


class Twice(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.ones(2, WIDE))

    def forward(self, scale):
        hidden = self.weight * scale
        one, other = self.parts(hidden)
        return (one * 2).sum() + (other * 3).sum()


@pytest.mark.parametrize(("parts", "buffers"), [(lambda hidden: (hidden, hidden), 3), (Added.apply, 4)])
def test_the_sum_of_two_gradients_takes_the_place_of_the_first_where_autograd_makes_it(parts, buffers):
    model = Twice(parts)
    scale = torch.tensor(0.5)
    meter = StepMeter(model, lambda: 0, lambda: 0.0, lambda: 0)
    meter.begin()
    meter.begin_forward([scale], True)
    model(scale).backward()
    meter.end()
    assert meter.peak_bytes(0) / model.weight.nbytes == pytest.approx(buffers, rel=0.01)
    # Under the mode that measures there are two of them for a moment.
    segments = meter.footprint(0).segments
    assert max(one.live_bytes + one.measured_bytes for one in segments) / WIDE / 8 == pytest.approx(3, rel=0.01)


@pytest.mark.parametrize("with_thread", [False, True])
def test_a_backward_in_another_thread_is_noticed(with_thread):
    """A dispatch mode sees one thread: what another one computes is not counted."""
    model, scale = Twice(Added.apply), torch.tensor(0.5)
    meter = StepMeter(model, lambda: 0, lambda: 0.0, lambda: 0)
    meter.begin()
    meter.begin_forward([scale], True)
    loss = model(scale)
    if with_thread:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    else:
        loss.backward()
    meter.end()
    assert meter.is_shared == with_thread


def test_weights_that_come_and_go_are_no_live_bytes(tmp_path):
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).requires_grad_(False)
    session = attach(model, OffloadConfig(tier="none", params="ssd", directory=tmp_path, min_bytes=1024))
    inputs = torch.ones(1, 256, requires_grad=True)
    meter = StepMeter(model, lambda: 0, lambda: 0.0, lambda: 0)
    meter.begin()
    meter.begin_forward([inputs], True)
    model(inputs).sum().backward()
    meter.end()
    assert session.residency.store.tier.stats.read_bytes > 0
    weight = model[0].weight.nbytes
    assert max(one.live_bytes for one in meter.footprint(0).segments) < weight // 8
    assert meter.footprint(0).base_bytes == session.residency.budget_bytes >= 2 * weight
    session.detach()


class Renewed(nn.Module):
    """Its weights get other memory in forward, and new tensors then have ids of the memory that has gone."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(1024) for _ in range(256))

    def forward(self, scale):
        gone = {id(weight.untyped_storage()) for weight in self.weights}
        for weight in self.weights:
            weight.data = scale
        found = [torch.ones(1024) for _ in range(256)]
        assert not gone.isdisjoint(id(one.untyped_storage()) for one in found), "no id has come again"
        return sum(weight * scale for weight in self.weights) + sum(found)


def test_tensors_with_an_id_of_memory_that_a_weight_had_are_counted():
    model = Renewed()
    meter = StepMeter(model, lambda: 0, lambda: 0.0, lambda: 0)
    meter.begin()
    meter.begin_forward([], True)
    model(torch.tensor(1.0))
    meter.end()
    assert meter.peak_bytes(0) >= 256 * 4096


@pytest.mark.parametrize("rows", [1, 4096])
def test_state_that_comes_in_a_step_was_not_there_in_its_backward(rows):
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    inputs, nbytes = torch.ones(rows, 256), model.weight.nbytes

    def state_bytes():
        return sum(state["momentum_buffer"].nbytes for state in optimizer.state.values())

    for step in range(2):
        meter = StepMeter(model, lambda: 0, lambda: 0.0, state_bytes)
        meter.begin()
        meter.begin_forward([inputs], True)
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.end()
        came = nbytes if step == 0 and rows > 1 else 0  # else the optimizer's step is the peak, where state is there
        assert meter.taken_bytes(0) == pytest.approx(meter.peak_bytes(0) - came, abs=64)  # scalars


def test_the_step_of_an_optimizer_of_another_session_is_no_end_of_a_step():
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    own, another = (torch.optim.AdamW(model.parameters()) for model in models)
    meter = StepMeter(models[0], lambda: 0, lambda: 0.0, lambda: 0)
    meter.begin()
    meter.begin_forward([], True)
    sum(model(torch.ones(1, 8)).sum() for model in models).backward()
    another.step()
    assert not meter.is_over
    own.step()
    assert meter.is_over
    meter.end()


def test_gradients_are_counted_once_however_many_micro_batches_add_to_them():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    weights = sum(p.nbytes for p in model.parameters())

    def gradients(steps_before):
        for _ in range(steps_before):
            model(torch.ones(2, 8)).sum().backward()
        meter = StepMeter(model, lambda: 0, lambda: 0.0, lambda: 0)
        meter.begin()
        for _ in range(3):
            meter.begin_forward([], True)
            model(torch.ones(2, 8)).sum().backward()
        meter.end()
        found = [[one.gradient_bytes for one in meter.footprint(number).segments] for number in range(3)]
        return [(each[0], each[-1]) for each in found]

    assert gradients(steps_before=0) == [(0, weights), (weights, weights), (weights, weights)]
    assert gradients(steps_before=1) == [(weights, weights)] * 3
