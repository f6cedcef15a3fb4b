"""Norms are computed again in backward only where that gives the same result, whatever their class is called."""

import numpy as np
import pytest
import torch
from torch import nn

from hf_offload import OffloadConfigError, RecomputeElementwiseConfig
from hf_offload.transforms.rematerialization.apply import Rematerialization
from tests.helpers.tiny_models import gradients


def lean(model):
    done = Rematerialization(model, RecomputeElementwiseConfig(("norms",)))
    done.apply()
    return done


class NoisyRMSNorm(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x) + 0.1 * torch.randn_like(x)


class CountingLayerNorm(nn.LayerNorm):
    calls = 0

    def forward(self, input):
        self.calls += 1
        return super().forward(input) * (1 + 0.1 * self.calls)


class ListingLayerNorm(nn.LayerNorm):
    def __init__(self, width):
        super().__init__(width)
        self.seen = []

    def forward(self, input):
        self.seen.append(len(input))
        return super().forward(input) * (1 + 0.1 * len(self.seen))


class OwnNoiseRMSNorm(nn.RMSNorm):
    def __init__(self, width):
        super().__init__(width)
        self.random = np.random.default_rng(0)

    def forward(self, x):
        return super().forward(x) * float(self.random.random())


class CenteringLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input.sub_(input.mean(-1, keepdim=True)))


class ConditionedLayerNorm(nn.LayerNorm):
    def forward(self, input, scale):
        return super().forward(input) * scale


class OrdinaryRMSNorm(nn.RMSNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class ChannelsLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input.transpose(1, -1)).transpose(1, -1)


LEFT_OUT = {
    NoisyRMSNorm: "it draws random numbers",
    CountingLayerNorm: "it gives other results the second time",
    ListingLayerNorm: "it gives other results the second time",
    OwnNoiseRMSNorm: "it gives other results the second time",
    CenteringLayerNorm: "it changes its input",
    ConditionedLayerNorm: "with hidden states alone it raises TypeError",
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_a_norm_that_is_not_the_same_twice_is_left_out_and_named(kind, caplog):
    model = nn.Sequential(nn.LayerNorm(24), kind(24), nn.Linear(24, 24))
    draws = torch.get_rng_state()
    done = lean(model)
    assert done.names == ("0", "2")
    assert torch.equal(torch.get_rng_state(), draws)
    assert getattr(model[1], "calls", 0) == 0
    assert getattr(model[1], "seen", []) == []
    assert f"leaves out 1 norms, such as 1. {kind.__name__}: {LEFT_OUT[kind]}" in caplog.text


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_where_only_such_norms_are_the_error_says_why(kind):
    with pytest.raises(OffloadConfigError, match=f"Left out: {kind.__name__}: {LEFT_OUT[kind]}"):
        lean(nn.Sequential(kind(24)))


@pytest.mark.parametrize("kind", [NoisyRMSNorm, CountingLayerNorm, ListingLayerNorm, OrdinaryRMSNorm])
def test_no_bit_changes_whatever_a_norm_does(kind):
    def run(is_lean):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), kind(24), nn.Linear(24, 24))
        if is_lean:
            lean(model)
        for _ in range(2):
            model(torch.linspace(-1, 1, 8 * 24).view(8, 24).sin()).square().sum().backward()
        return gradients(model)

    expected, found = run(False), run(True)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(("kind", "shape"), [(OrdinaryRMSNorm, (4, 24)), (ChannelsLayerNorm, (4, 24, 3))])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_other_norms_are_made_again(kind, shape, dtype):
    model = nn.Sequential(kind(24)).to(dtype)
    done = lean(model)
    assert done.names == ("0",)
    assert model(torch.ones(shape, dtype=dtype).requires_grad_()).grad_fn.name() == "_RecomputedBackward"


def test_norms_of_a_model_without_data_are_tried_all_the_same():
    with torch.device("meta"):
        model = nn.Sequential(OrdinaryRMSNorm(24), NoisyRMSNorm(24))
    done = lean(model)
    assert done.names == ("0",)
