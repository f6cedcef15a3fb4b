"""What a measured step is found to need."""

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
