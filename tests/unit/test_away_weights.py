"""Weights that are away on a drive, and that others look at or write to without a new version."""

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, attach
from hf_offload.state.registry import parked_of
from hf_offload.state.units import pinned

SIZE, LAYERS = 64, 6


class Parked:
    """A model whose layers take turns in memory, two at a time."""

    def __init__(self, directory):
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)])
        config = OffloadConfig(tier="none", params="ssd", directory=directory, min_bytes=0)
        self.session = attach(self.model, config)
        self.use()

    def use(self):
        with torch.no_grad():
            self.model(torch.ones(1, SIZE))
        self.session.residency.store.settle()

    def values(self):
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def one(self, is_away):
        """The first weight that is away, or in memory."""
        return next((name, each) for name, each in self.model.named_parameters() if parked_of(each).is_here != is_away)


@pytest.fixture
def parked(tmp_path):
    found = Parked(tmp_path)
    yield found
    found.session.detach()


def test_values_that_are_put_back_without_a_new_version_are_the_ones_that_are_written(parked):
    """An average of weights is tried like that: a weight is overwritten where it is away, comes, and gets its values back."""
    name, parameter = parked.one(is_away=True)
    values = parked.values()
    parameter.data.copy_(torch.zeros(SIZE, SIZE))
    with pinned([parameter]):
        assert not parameter.any()
        parameter.data.copy_(values[name])
    for _ in range(2):
        parked.use()
    found = parked.values()
    assert all(torch.equal(found[name], value) for name, value in values.items())


@pytest.mark.parametrize("is_away", [False, True])
def test_a_weight_that_others_look_at_is_what_they_see(parked, is_away):
    name, parameter = parked.one(is_away)
    view = parameter.detach().numpy()
    values = parked.values()
    view[3, 5] = 7.0  # no counter shows it
    parked.use()
    assert parameter[3, 5] == 7.0
    view[3, 5] = 9.0
    assert parameter[3, 5] == 9.0
    del view
    values[name][3, 5] = 9.0
    for _ in range(2):
        parked.use()
    found = parked.values()
    assert all(torch.equal(found[name], value) for name, value in values.items())


class Keeping(nn.Linear):
    """Keeps an array of its weight, as code does that caches what it has computed from it."""

    def forward(self, inputs):
        self.kept = self.weight.detach().numpy()
        return super().forward(inputs)


def test_an_array_that_a_forward_keeps_is_the_weight(tmp_path):
    model = nn.Sequential(*[Keeping(SIZE, SIZE, bias=False) for _ in range(LAYERS)])
    session = attach(model, OffloadConfig(tier="none", params="ssd", directory=tmp_path, min_bytes=0))
    for _ in range(2):
        model(torch.ones(1, SIZE)).sum().backward()
        with torch.no_grad():
            for layer in model:
                layer.weight.add_(layer.weight.grad)
    assert all((layer.kept == layer.weight.detach().numpy()).all() for layer in model)
    session.detach()
