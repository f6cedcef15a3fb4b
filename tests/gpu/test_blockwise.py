"""Block-wise training where the host's memory is not the device's."""

import copy

import pytest
import torch

from hf_offload.methods.blockwise import BlockwiseConfig, BlockwiseOptimizer
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights

pytestmark = pytest.mark.gpu


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        batch = {name: value.cuda() for name, value in tiny_batch("llama", seed=step).items()}
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_state_waits_in_ram_and_comes_back(fused):
    model = tiny_model("llama", dropout=0.0).cuda()
    usual = copy.deepcopy(model)
    config = BlockwiseConfig(order="ascending", outside="never", switch_every=2, inactive_state="keep")
    optimizer = BlockwiseOptimizer(model.parameters(), model, config, lr=1e-2, fused=fused)
    layers = list(usual.model.layers)
    plain = [torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=fused) for layer in layers]
    for turn in range(4):
        train(model, optimizer, 2, first=2 * turn)
        usual.requires_grad_(False)
        layers[turn % 2].requires_grad_(True)
        train(usual, plain[turn % 2], 2, first=2 * turn)
        parked = [optimizer.state[p] for p in model.model.layers[turn % 2].parameters()]
        assert all(tensor.device.type == "cpu" for state in parked for tensor in state.values())
    expected = weights(usual)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(model).items())
