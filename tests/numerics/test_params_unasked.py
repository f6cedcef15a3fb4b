"""Weights on a tier in code that PyTorch does not ask about: storages, chosen weights, checkpoints."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hf_offload import OffloadConfig, attach
from tests.helpers.parked import leave_memory, parked
from tests.helpers.streamed import mlp, same


def test_a_storage_that_is_held_is_the_weights(tmp_path):
    model = mlp()
    session = parked(model, tmp_path)
    storage = model[0].weight.untyped_storage()
    model[2].weight.sum()  # others leave
    storage.fill_(0)
    del storage
    leave_memory(session)
    assert not model[0].weight.any()


class OfItsWeight(nn.Module):
    """A checkpoint that is given weights as arguments, or uses them inside."""

    def __init__(self, given: bool):
        super().__init__()
        torch.manual_seed(0)
        self.given = given
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, inputs):
        if self.given:
            return checkpoint(F.linear, inputs, self.weight, use_reentrant=False)
        return checkpoint(lambda value: F.linear(value.sin(), self.weight).sin(), inputs, use_reentrant=False)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
def test_checkpoints_find_their_weights_again(given, chosen, tmp_path):
    found = []
    for place in ("none", "ssd"):
        model = nn.Sequential(OfItsWeight(given), nn.Tanh(), OfItsWeight(given))
        if place == "ssd":
            leave_memory(parked(model, tmp_path))
        inputs = torch.ones(2, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda value: value.detach(), lambda value: value):
            loss = model(inputs).sum()
        weights = list(model.parameters())
        if chosen:
            found.append(list(torch.autograd.grad(loss, weights)))
        else:
            loss.backward()
            found.append([weight.grad for weight in weights])
    assert same(*found)


class Labelled(torch.Tensor):
    """A tensor of a class of the user's."""


def product(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return inputs @ weight.t()


TAKES = {
    "as_subclass": lambda weight: weight.as_subclass(Labelled),
    "make_subclass": lambda weight: torch.Tensor._make_subclass(torch.Tensor, weight),
    "new": lambda weight: torch.ones(1).new(weight),
    "new_tensor": lambda weight: torch.ones(1).new_tensor(weight),
    "set": lambda weight: torch.empty(0).set_(weight),
    "nested": lambda weight: torch.nested.nested_tensor([weight])[0],
    "dlpack": lambda weight: torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight)),
    "script": lambda weight: torch.jit.script(product)(torch.eye(weight.shape[1]), weight).t(),
    "tensor": lambda weight: torch.tensor(weight),
}


def two_steps(model, optimizer):
    for _ in range(2):  # the first one makes the state, at once
        model[0].weight.sum().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*nested tensors", "ignore:To copy construct")
@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
@pytest.mark.parametrize("waits", [False, True], ids=["on a tier", "waits"])
def test_functions_that_do_not_ask_find_weights(take, waits, tmp_path):
    """With an update to come, or from the tier, in a process that a weight without memory would end."""
    expected = mlp()
    two_steps(expected, torch.optim.AdamW(expected.parameters(), lr=0.1))

    model = mlp()
    settings = OffloadConfig(tier="none", optimizer="ram", min_bytes=1)
    session = attach(model, settings) if waits else parked(model, tmp_path)
    two_steps(model, session.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1)))
    if not waits:
        leave_memory(session)
    weight = model[0].weight
    with torch.no_grad():
        taken = take(weight)
        model[2].weight.sum()  # others leave
        assert torch.equal(taken.as_subclass(torch.Tensor), expected[0].weight)


def test_memory_that_a_weight_is_set_to_is_kept(tmp_path):
    model = mlp()
    session = parked(model, tmp_path)
    leave_memory(session)
    with torch.no_grad():
        model[0].weight.set_(torch.zeros_like(model[0].weight))
    leave_memory(session)
    assert not model[0].weight.any()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_traces_have_the_weights_as_they_are(tmp_path):
    model = mlp()
    session = parked(model, tmp_path, optimizer="ram")
    optimizer = session.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    session.defer_updates()
    session.residency.limit_bytes = 1
    script = torch.jit.trace(model, torch.ones(1, 96))
    inputs = torch.ones(1, 96)
    for _ in range(2):
        script(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(script(inputs), model(inputs))


def test_a_module_that_is_added_takes_its_fast_path(tmp_path):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval()
    inputs = torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = layer(inputs)
        model = nn.Sequential(nn.Linear(32, 32))
        parked(model, tmp_path).detach()
        model.append(layer)
        parked(model, tmp_path)
        assert torch.equal(model[1](inputs), expected)


class FastPaths(TorchDispatchMode):
    """Counts layers that compute in one operation."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._transformer_encoder_layer_fwd.default
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("attaches_again", [False, True])
def test_a_fast_path_is_taken_with_gradients_enabled_where_nothing_needs_one(
    tmp_path, frozen, needs_gradient, attaches_again
):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2).eval()
    model.requires_grad_(not frozen)
    inputs = torch.randn(2, 5, 32, requires_grad=needs_gradient)
    padding = torch.tensor([5 * [False], 3 * [False] + 2 * [True]])
    with FastPaths() as in_memory:
        expected = model(inputs, src_key_padding_mask=padding)
    session = parked(model, tmp_path)
    model(inputs)
    if attaches_again:
        session.detach()
        parked(model, tmp_path)
    with FastPaths() as found:
        assert torch.equal(model(inputs, src_key_padding_mask=padding), expected)
    assert found.count == in_memory.count == (0 if needs_gradient or not frozen else 2)
