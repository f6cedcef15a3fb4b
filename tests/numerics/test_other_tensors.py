"""Weights and gradients that programs put other tensors over, or change, while they are on a tier."""

import copy

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, attach
from hf_offload.state.optimizer import streaming_of
from tests.helpers.parked import leave_memory, parked
from tests.helpers.train import batch, mlp, same


@pytest.mark.parametrize("when", ["before clipping", "after clipping"])
def test_a_gradient_in_another_tensor_over_its_memory(when, tmp_path):
    """As programs detach gradients that ``create_graph=True`` has made."""
    found = []
    for place in ("none", "ssd"):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        where = {"directory": tmp_path} if place == "ssd" else {}
        session = attach(model, OffloadConfig(tier="none", optimizer=place, min_bytes=256, **where))
        session.prepare_optimizer(optimizer)
        for number in range(2):
            model(batch(number)).square().mean().backward()
            if place == "ssd":
                streaming_of(optimizer).gradient_store.settle()
            for step in ("replace", "clip") if when == "before clipping" else ("clip", "replace"):
                if step == "clip":
                    found.append(session.clip_grad_norm_(1e-3))
                    continue
                for parameter in model.parameters():
                    parameter.grad = parameter.grad.detach()
            found += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        found += [*copy.deepcopy(model.state_dict()).values()]
    assert same(found[: len(found) // 2], found[len(found) // 2 :])


class WithMomentum(nn.Module):
    """MoCo, ALBEF: weights of the second encoder become means of the first one's in each forward, after that was called."""

    def __init__(self):
        super().__init__()
        self.query, self.key = mlp(), mlp()
        self.key.requires_grad_(False)

    def forward(self, inputs):
        query = self.query(inputs)
        with torch.no_grad():
            for mean, weight in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mean.mul_(0.9).add_(weight, alpha=0.1)
            key = self.key(inputs)
        return (query * key).sum()


def test_a_mean_of_weights_that_a_forward_computes(tmp_path):
    found = []
    for place in ("none", "ssd"):
        model = WithMomentum()
        session = parked(model, tmp_path) if place == "ssd" else None
        if session is not None:
            session.residency.limit_bytes = 150_000  # room to read ahead of what the forward changes
        optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
        for number in range(4):
            loss = model(batch(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        if session is not None:
            leave_memory(session)
        found.append(copy.deepcopy(model.state_dict()))
    assert same(found[: len(found) // 2], found[len(found) // 2 :])
