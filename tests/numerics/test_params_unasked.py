"""Weights on a tier in code that PyTorch does not ask about: storages, chosen weights, checkpoints."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hf_offload import OffloadConfig, attach
from tests.helpers.parked import leave_memory, parked
from tests.helpers.streamed import mlp, same


def test_a_parameter_is_made_of_a_weight(tmp_path):
    expected = mlp()[0].weight.detach().clone()
    model = mlp()
    leave_memory(parked(model, tmp_path))
    assert torch.equal(nn.Parameter(model[0].weight, requires_grad=False).detach(), expected)


def test_what_is_written_through_a_storage_is_kept(tmp_path):
    model = mlp()
    session = parked(model, tmp_path)
    leave_memory(session)
    model[0].weight.untyped_storage().fill_(0)
    leave_memory(session)
    assert not model[0].weight.any()


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


def test_a_weight_that_was_cast_is_pickled(tmp_path):
    expected = mlp()[0].weight.detach().clone()
    model = mlp()
    session = parked(model, tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(2, 96))
        leave_memory(session)
        assert torch.equal(pickle.loads(pickle.dumps(model[0].weight)), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray], ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:torch.asarray")
def test_a_tensor_is_made_of_a_weight(tmp_path, make):
    expected = mlp()[0].weight.detach().clone()
    model = mlp()
    leave_memory(parked(model, tmp_path))
    assert torch.equal(getattr(torch, make.__name__)(model[0].weight), expected)


def test_constructors_are_known_where_they_are_told_by_identity(tmp_path):
    """In a process of its own: what is looked up first after weights have left memory."""
    code = f"""
import torch
from hf_offload import OffloadConfig, attach
model = torch.nn.Linear(64, 64)
attach(model, OffloadConfig(tier="none", params="ssd", min_bytes=1, directory={str(tmp_path)!r}))
with torch.device("meta"):
    made = torch.tensor([1.0]), torch.as_tensor([1.0]), torch.asarray([1.0]), torch.asarray(obj=[1.0])
    assert all(one.is_meta for one in made)

def add(x):
    return x + torch.tensor([1.0]) + torch.as_tensor([1.0])

assert torch.compile(add, backend="eager", fullgraph=True)(torch.ones(1)) == 3
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_scripted_functions_have_their_constructors(tmp_path):
    """In a process of its own, as the test above."""
    (tmp_path / "scripted.py").write_text(
        "import torch\n\n\ndef add(x):\n    return x + torch.tensor([1.0]) + torch.as_tensor([1.0])\n"
    )
    code = f"""
import torch
from hf_offload import OffloadConfig, attach
model = torch.nn.Linear(64, 64)
attach(model, OffloadConfig(tier="none", params="ssd", min_bytes=1, directory={str(tmp_path)!r}))
from scripted import add
assert torch.jit.script(add)(torch.ones(1)) == 3
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=tmp_path)


def test_a_parameter_is_made_of_a_view_of_a_weight(tmp_path):
    expected = mlp()[0].weight.detach().t().clone()
    model = mlp()
    session = parked(model, tmp_path)
    leave_memory(session)
    made = nn.Parameter(model[0].weight.T)
    assert isinstance(made, nn.Parameter)
    model[2].weight.sum()  # others leave
    assert torch.equal(made.detach(), expected)


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


def test_a_state_dict_has_a_weight_with_gaps(tmp_path):
    model = mlp()
    parked(model, tmp_path)
    model[0].weight.data = torch.ones(2 * model[0].weight.shape[0], model[0].weight.shape[1])[::2]
    assert model.state_dict()["0.weight"].all()


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
def test_a_fast_path_is_taken_with_gradients_enabled_where_nothing_needs_one(tmp_path, frozen, needs_gradient):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2).eval()
    model.requires_grad_(not frozen)
    inputs = torch.randn(2, 5, 32, requires_grad=needs_gradient)
    padding = torch.tensor([5 * [False], 3 * [False] + 2 * [True]])
    with FastPaths() as in_memory:
        expected = model(inputs, src_key_padding_mask=padding)
    parked(model, tmp_path)
    with FastPaths() as found:
        assert torch.equal(model(inputs, src_key_padding_mask=padding), expected)
    assert found.count == in_memory.count == (0 if needs_gradient or not frozen else 2)


def with_data(tensor, weight):
    tensor.data = weight
    return tensor


MADE = {
    "Tensor": torch.Tensor,
    "data of another": lambda weight: with_data(torch.zeros(1), weight),
    "data of a parameter": lambda weight: with_data(nn.Parameter(torch.zeros(1)), weight),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_what_shares_a_weight_has_its_memory(tmp_path, made):
    expected = mlp()[0].weight.detach().clone()
    model = mlp()
    leave_memory(parked(model, tmp_path))
    found = made(model[0].weight)
    model[2].weight.sum()  # others leave
    assert torch.equal(found.detach(), expected)


READS = {
    "formatted": lambda weight: f"{weight[0, 0]:.3f} {weight.view(-1)[1]}",
    "formatted without a graph": lambda weight: f"{weight.data[0, 0]:.3f}",
    "sparse": lambda weight: torch.sparse_coo_tensor(torch.arange(weight.numel())[None], weight.view(-1)).to_dense(),
    "rows of a sparse one": lambda weight: torch.sparse_coo_tensor(torch.arange(len(weight))[None], weight).to_dense(),
    "returned by a hook": lambda weight: _returned(weight),
}


def _returned(weight):
    value = torch.ones_like(weight.detach(), requires_grad=True)
    doubled = value * 2
    doubled.register_hook(lambda gradient: weight.detach())
    doubled.sum().backward()
    return value.grad


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_reads_a_weight_finds_it(tmp_path, read):
    expected = read(mlp()[0].weight)
    model = mlp()
    leave_memory(parked(model, tmp_path))
    assert same(expected, read(model[0].weight))


def test_backward_begins_with_a_weight(tmp_path):
    model = mlp()
    expected = model[0].weight.detach().clone()
    leave_memory(parked(model, tmp_path))
    value = torch.ones_like(expected, requires_grad=True)
    (value * 2).backward(model[0].weight)
    (found,) = torch.autograd.grad([value * 2], [value], [model[0].weight])
    assert torch.equal(value.grad, 2 * expected)
    assert torch.equal(found, 2 * expected)


def test_a_weight_with_attributes_is_pickled(tmp_path):
    model = mlp()
    model[0].weight.kind = "first"
    leave_memory(parked(model, tmp_path))
    assert vars(pickle.loads(pickle.dumps(model[0].weight))) == {"kind": "first"}


OTHER_MEMORY = {
    "values": lambda weight: weight.data.clone() * 2,
    "strides": lambda weight: weight.data.t().contiguous().t(),
    "a part": lambda weight: torch.stack([weight.data, weight.data * 3])[1],
    "a type": lambda weight: weight.data.double(),
}
USES = {
    "linear": lambda weight, x: F.linear(x, weight),
    "view": lambda weight, x: x @ weight.t(),
    "itself": lambda weight, x: x @ weight,
    "row": lambda weight, x: x * weight[0],
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("other", OTHER_MEMORY.values(), ids=OTHER_MEMORY)
@pytest.mark.parametrize("place", ["ssd", "ram"])
def test_a_view_in_a_graph_has_the_former_memory_of_a_weight_that_is_given_another(place, other, use, tmp_path):
    def found(offloaded):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(2)])
        if offloaded:
            parked(model, tmp_path if place == "ssd" else None, place)
        x = torch.randn(3, 64, requires_grad=True)
        losses = [use(model[0].weight, x).square().sum() for _ in range(2)]
        for loss in losses:
            model[0].weight.data = other(model[0].weight)
            model[1](x)  # for which the first one leaves
            try:
                loss.backward()
            except RuntimeError:
                return "an error"
        return x.grad

    expected = found(False)
    assert same(expected, found(True))
