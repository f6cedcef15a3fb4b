"""Keys of an optimizer's state come in the order of a run in memory: that in which weights have got their state."""

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, attach

LAYERS = 4


def unfreezes(number, model, optimizer):
    for place, layer in enumerate(model):
        layer.requires_grad_(place >= LAYERS - 1 - number)


def clears(number, model, optimizer):
    if number == 1:
        optimizer.state.clear()
        model[0].requires_grad_(False)
    model[0].requires_grad_(number != 1)


def pops(number, model, optimizer):
    if number == 1:
        optimizer.state.pop(model[1].weight)
        model[1].requires_grad_(False)
    model[1].requires_grad_(number != 1)


def sets(number, model, optimizer):
    if number == 0:
        states = ("exp_avg", "exp_avg_sq")
        optimizer.state[model[2].weight] = {name: torch.zeros_like(model[2].weight) for name in states}
        optimizer.state[model[2].weight]["step"] = torch.tensor(1.0)


def loads_in_another_order(number, model, optimizer):
    if number == 1:
        state = optimizer.state_dict()
        state["state"] = {key: {**state["state"][key]} for key in reversed(state["state"])}
        for each in state["state"].values():
            each.update({name: value.clone() for name, value in each.items()})
        optimizer.load_state_dict(state)


def replaces(number, model, optimizer):
    if number == 1:
        optimizer.state = dict(reversed(list(optimizer.state.items())))


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("act", [unfreezes, clears, pops, sets, loads_in_another_order, replaces])
def test_keys_of_the_state_come_as_in_memory(act, in_backward):
    def orders(config):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(LAYERS)])
        groups = [{"params": list(model[2:].parameters())}, {"params": list(model[:2].parameters())}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        names = {parameter: name for name, parameter in model.named_parameters()}
        session = None if config is None else attach(model, config)
        if session is not None:
            session.prepare_optimizer(optimizer)
            session.defer_updates()
            session.update_in_backward(in_backward)
        found = []
        for number in range(3):
            act(number, model, optimizer)
            model(torch.ones(2, 32, requires_grad=True)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [list(optimizer.state_dict()["state"])]
            found += [[names[key] for key in optimizer.state]] * (number == 2)
        found += [parameter.detach().clone().numpy().tobytes() for parameter in names]
        if session is not None:
            session.detach()
        return found

    assert orders(OffloadConfig(tier="none", optimizer="ram", min_bytes=512)) == orders(None)
