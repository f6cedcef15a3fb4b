"""Norms are recomputed in backward where their class is torch's or transformers': another may do more than its name says."""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

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


class CenteringLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input.sub_(input.mean(-1, keepdim=True)))


@pytest.mark.parametrize("kind", [NoisyRMSNorm, CountingLayerNorm, CenteringLayerNorm])
def test_no_bit_changes_whatever_a_norm_of_another_class_does(kind):
    def run(is_lean):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 24), kind(24), nn.Linear(24, 24))
        if is_lean:
            assert "3" not in lean(model).names
        for _ in range(2):
            model(torch.linspace(-1, 1, 8 * 24).view(8, 24).sin()).square().sum().backward()
        return gradients(model)

    expected, found = run(False), run(True)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_where_only_such_norms_are_the_error_says_what_is_looked_for():
    with pytest.raises(OffloadConfigError, match=r"RMSNorm of torch, and those of transformers.*NoisyRMSNorm"):
        lean(nn.Sequential(NoisyRMSNorm(24)))


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_norms_of_transformers_are_recomputed(dtype):
    model = nn.Sequential(LlamaRMSNorm(24)).to(dtype)
    assert lean(model).names == ("0",)
    assert model(torch.ones(4, 24, dtype=dtype).requires_grad_()).grad_fn.name() == "_RecomputedBackward"
