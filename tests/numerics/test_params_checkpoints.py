"""Backward through checkpoints, and through graphs of gradients, has the bits of the run in memory, whatever has changed."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_offload import OffloadConfig, attach
from tests.helpers.parked import leave_memory, parked
from tests.helpers.streamed import same


class Clamps(nn.Linear):
    """Changes its weight in each forward, also in the one that backward calls."""

    def forward(self, x):
        hidden = super().forward(x)
        with torch.no_grad():
            self.weight.mul_(0.9)
        return hidden + super().forward(x)


class Checkpointed(nn.Linear):
    """Is given its weight as an input of a checkpoint of its own."""

    def forward(self, x):
        return checkpoint(nn.functional.linear, x, self.weight, self.bias, use_reentrant=False)


def double(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)


def nothing(model):
    pass


def gradients(model, between=nothing, autocast=False, frozen=False):
    if frozen:
        model[0].requires_grad_(False)
    x = torch.ones(4, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = checkpoint(model, x, use_reentrant=False).float().square().sum()
    between(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad, *[p.grad for p in model.parameters()], *[p.detach().clone() for p in model.parameters()]]


def made(kind, layers=3):
    torch.manual_seed(0)
    return nn.Sequential(*[kind(32, 32) for _ in range(layers)])


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("between", [nothing, double])
@pytest.mark.parametrize("kind", [nn.Linear, Clamps, Checkpointed])
def test_a_checkpoint_computes_with_weights_as_they_are_in_backward(kind, between, autocast, frozen, tmp_path):
    expected = gradients(made(kind), between, autocast, frozen)
    model = made(kind)
    parked(model, tmp_path)
    assert same(expected, gradients(model, between, autocast, frozen))


def test_weights_of_a_checkpoint_leave_memory_while_backward_is_in_it(tmp_path):
    model = made(nn.Linear, layers=12)
    session = parked(model, tmp_path)
    session.residency.limit_bytes = limit = 3 * model[0].weight.nbytes
    session.residency.begin_run()
    gradients(model)
    assert 0 < session.residency.most_bytes <= limit


def test_weights_that_go_or_come_between_forward_and_backward(tmp_path):
    expected = gradients(made(nn.Linear))
    model, sessions = made(nn.Linear), []
    assert same(expected, gradients(model, lambda model: sessions.append(parked(model, tmp_path))))
    model.zero_grad()
    sessions[0].detach()
    home = OffloadConfig(tier="none", params="none")
    assert same(expected, gradients(model, lambda model: attach(model, home).detach()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_the_graph_of_gradients_has_frozen_weights(dtype, tmp_path):
    def found(offloaded):
        torch.manual_seed(0)
        model = nn.Module()
        model.own = nn.Parameter(torch.randperm(8).to(dtype), requires_grad=False)
        if offloaded:
            session = parked(model, tmp_path)
        x = torch.randn(3, 8, requires_grad=True)
        y = x.index_select(-1, model.own) if dtype == torch.int64 else torch.outer(x[0], model.own)
        (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        if offloaded:
            leave_memory(session)
        gradient.pow(2).sum().backward()
        return [gradient.detach(), x.grad]

    assert same(found(False), found(True))


def test_a_checkpoint_that_is_given_a_weight_waits_for_its_update(tmp_path):
    def found(offloaded):
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if offloaded:
            session = parked(model, tmp_path, optimizer="ssd")
            optimizer = session.prepare_optimizer(optimizer)
        x = torch.ones(4, 32)
        for _ in range(3):
            loss = checkpoint(nn.functional.linear, x, model.weight, model.bias, use_reentrant=False).square().sum()
            loss.backward()
            session.clip_grad_norm_(0.1) if offloaded else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    assert same(found(False), found(True))
