"""Blocks that get other names in a running training, as one in front of them is deleted, added or replaced."""

import gc

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_offload import OffloadConfig
from hf_offload.session import attach
from hf_offload.transforms.rematerialization.apply import ElementwiseBlocks
from tests.helpers.live_bytes import peak_live_bytes

WIDTH, BLOCKS = 32, 6


class Block(GradientCheckpointingLayer):
    def __init__(self, counts=False):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()) if counts else None)

    def forward(self, hidden):
        if self.count is not None:
            hidden = hidden / self.count.add_(1)
        return hidden + self.down(self.act(self.up(hidden)))


def delete(blocks):
    del blocks[0]


def add(blocks):
    torch.manual_seed(1)
    blocks.insert(0, Block())


def replace(blocks):
    torch.manual_seed(1)
    blocks[1] = Block(counts=True)


@pytest.mark.parametrize(
    ("change", "elementwise"),
    [(delete, "off"), (add, "off"), (replace, "off"), (replace, None)],
    ids=["delete", "add", "replace", "replace, elementwise, too"],
)
def test_trains_as_without(change, elementwise, tmp_path):
    """One of the blocks counts its calls in a buffer, so it cannot be recomputed, whatever its name."""

    def train(config):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(counts=index == 3) for index in range(BLOCKS)))
        batch = torch.randn(256, WIDTH)
        session = None if config is None else attach(model, config)
        gradients, recomputed = [], set()
        for step in range(8):
            if step == 4:
                change(model)
            model(batch).square().mean().backward()
            gradients += [parameter.grad.tolist() for parameter in model.parameters()]
            model.zero_grad()
            if session is not None:
                session.end_step()
                placements = session.plan.placements
                recomputed |= {name for name, one in placements.items() if one.recomputes or session.plan.elementwise}
        if session is not None:
            session.detach()
        return gradients, recomputed

    plain, _ = train(None)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    weights = sum(one.nbytes for one in model.parameters())
    activations = peak_live_bytes(lambda: model(torch.randn(256, WIDTH)).sum().backward())
    settings = {} if elementwise is None else {"recompute_elementwise": elementwise}
    config = OffloadConfig(
        tier="auto",
        memory_budget=int(2 * weights + 0.8 * activations),
        directory=tmp_path,
        min_bytes=1024,
        params="none",
        optimizer="none",
        **settings,
    )
    planned, recomputed = train(config)
    assert recomputed
    assert planned == plain


def test_asks_no_block_that_is_gone():
    model = nn.Sequential(Block(), Block())
    elementwise = ElementwiseBlocks(dict(model.named_children()))
    elementwise.apply(False)
    for left in (True, False):
        delete(model)
        gc.collect()
        assert elementwise.possible is left
        elementwise.apply(False)
        elementwise.apply(True)
    elementwise.remove()
