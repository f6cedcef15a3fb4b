"""Whatever kind of tensor a model has or is given: a run that works without offloading works with it, with the same bits."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_offload import OffloadConfig, attach
from hf_offload.engine.recompute import Recompute, why_not_twice
from hf_offload.structure.units import find_blocks
from hf_offload.tensors import nbytes_of
from tests.helpers.train import same

WIDTH, STEPS = 8, 2
pytestmark = pytest.mark.filterwarnings("ignore")  # sparse, nested, quantized tensors: each warns of something


@pytest.fixture(autouse=True)
def known_machine(machine_with_drive):
    machine_with_drive(1e9)


class Own(torch.Tensor):
    pass


def numbers(*shape):
    return (torch.arange(float(torch.Size(shape).numel())).reshape(shape) * 0.37).sin()


def wave():
    return torch.complex(numbers(WIDTH), numbers(WIDTH) + 1)


def of_inference():
    with torch.inference_mode():
        return numbers(WIDTH)


def freed():
    tensor = numbers(WIDTH)
    tensor.untyped_storage().resize_(0)
    return tensor


def nested(layout):
    return torch.nested.nested_tensor([numbers(3, WIDTH), numbers(2, WIDTH)], layout=layout)


def total(tensor):
    return tensor.float().sum()


def nothing(tensor):
    return torch.zeros(())


@dataclasses.dataclass(frozen=True)
class Kind:
    make: object
    read: object = total


KINDS = {
    "plain": Kind(lambda: numbers(WIDTH)),
    "expanded": Kind(lambda: numbers(1).expand(WIDTH)),
    "with_steps": Kind(lambda: numbers(WIDTH)[::2]),
    "column": Kind(lambda: torch.arange(WIDTH**2).view(WIDTH, WIDTH)[:, 0]),
    "overlapping": Kind(lambda: numbers(WIDTH).as_strided((4, 4), (1, 1))),
    "empty": Kind(lambda: numbers(0)),
    "scalar": Kind(lambda: numbers(1)[0]),
    "bool": Kind(lambda: numbers(WIDTH) > 0),
    "float8": Kind(lambda: numbers(WIDTH).to(torch.float8_e4m3fn)),
    "packed_float4": Kind(lambda: torch.zeros(WIDTH, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), nothing),
    "bits": Kind(lambda: torch.zeros(WIDTH, dtype=torch.uint8).view(torch.bits8), nothing),
    "complex": Kind(wave, lambda tensor: tensor.real.sum()),
    "conjugate": Kind(lambda: wave().conj(), lambda tensor: tensor.imag.sum()),
    "negative": Kind(lambda: wave().conj().imag),
    "coo": Kind(lambda: torch.diag(numbers(WIDTH)).to_sparse(), lambda tensor: torch.sparse.sum(tensor)),
    "csr": Kind(lambda: torch.diag(numbers(WIDTH)).to_sparse_csr(), lambda tensor: tensor.values().sum()),
    "csc": Kind(lambda: torch.diag(numbers(WIDTH)).to_sparse_csc(), lambda tensor: tensor.values().sum()),
    "bsr": Kind(lambda: torch.diag(numbers(WIDTH)).to_sparse_bsr((2, 2)), lambda tensor: tensor.values().sum()),
    "bsc": Kind(lambda: torch.diag(numbers(WIDTH)).to_sparse_bsc((2, 2)), lambda tensor: tensor.values().sum()),
    "nested": Kind(lambda: nested(torch.strided), lambda tensor: tensor.to_padded_tensor(0.0).sum()),
    "jagged": Kind(lambda: nested(torch.jagged), lambda tensor: tensor.values().sum()),
    "zero": Kind(lambda: torch._efficientzerotensor((WIDTH,)), lambda tensor: (tensor + numbers(WIDTH)).sum()),
    "meta": Kind(lambda: torch.empty(WIDTH, device="meta"), nothing),
    "quantized": Kind(
        lambda: torch.quantize_per_tensor(numbers(WIDTH), 0.05, 0, torch.qint8),
        lambda tensor: tensor.dequantize().sum(),
    ),
    "mkldnn": Kind(lambda: numbers(WIDTH).to_mkldnn(), lambda tensor: tensor.to_dense().sum()),
    "of_inference": Kind(of_inference),
    "shared": Kind(lambda: numbers(WIDTH).share_memory_()),
    "freed": Kind(freed, nothing),
    "subclass": Kind(lambda: numbers(WIDTH).as_subclass(Own), lambda tensor: tensor.as_subclass(torch.Tensor).sum()),
    "wrapper": Kind(lambda: TwoTensor(numbers(WIDTH), numbers(WIDTH) + 1), lambda tensor: tensor.b.sum()),
    "without_shape": Kind(nn.UninitializedBuffer, nothing),
}

NOT_RECOMPUTED = ("meta", "of_inference", "without_shape")
"""Kinds without data or without a version: a block that is given one is not recomputed."""


class Block(GradientCheckpointingLayer):
    """One with tensors of a kind in all places: of its own, of its parameters, of its code, and in its call."""

    def __init__(self, kind):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.act, self.down, self.drop = (
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.1),
        )
        self.read = kind.read
        self.register_buffer("buffer", kind.make())
        self.frozen = kind.make()
        if type(self.frozen) is torch.Tensor:
            self.frozen = nn.Parameter(self.frozen, requires_grad=False)
        self.attribute = kind.make()
        self.held = [{"inside": kind.make()}]
        self.up.weight.noted = kind.make()
        closed = kind.make()
        self.closure = lambda: kind.read(closed)

    def forward(self, hidden, given, named, inside):
        own = (self.buffer, self.frozen, self.attribute, self.held[0]["inside"], self.up.weight.noted)
        scale = sum(map(self.read, (given, named, inside["list"][0][0], *own))) + self.closure()
        scale = (
            1 + 0.01 * scale if isinstance(given, Own) else 1 - 0.01 * scale
        )  # a class of torch's, named by a user's code
        return hidden + scale * self.drop(self.down(self.act(self.up(self.norm(hidden))))), given


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.make = kind.make
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))
        self.register_buffer("buffer", kind.make())

    def forward(self, hidden, given):
        hidden = self.embedding(hidden)
        for layer in self.layers:
            hidden, given = layer(hidden, given, named=self.make(), inside={"list": [(self.make(), 1)]})
        return hidden


def train(model, config=None, of=lambda model, *inputs: model(*inputs), inputs=()):
    """Losses, gradients and weights."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
    session = None if config is None else attach(model, config)
    found = []
    try:
        optimizer = optimizer if session is None else session.prepare_optimizer(optimizer)
        torch.manual_seed(1)
        for step in range(STEPS):
            loss = of(model, numbers(4, 16, WIDTH) + step, *inputs).pow(2).mean()
            loss.backward()
            found += [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                session.end_step()
    finally:
        if session is not None:
            session.detach()
    return [*found, *(one.detach().clone() for one in model.parameters() if one.requires_grad)]


def model_of(kind):
    torch.manual_seed(0)
    return Model(kind)


@pytest.mark.parametrize("name", KINDS)
def test_a_model_with_tensors_of_any_kind_in_any_place(name, tmp_path):
    kind = KINDS[name]
    inputs = (kind.make(),)
    expected = train(model_of(kind), inputs=inputs)
    config = OffloadConfig(tier="auto", memory_budget="1GiB", directory=tmp_path, min_bytes=64)
    assert same(train(model_of(kind), config, inputs=inputs), expected)
    assert bool(why_not_twice((), {"inside": [inputs]})) == (name in NOT_RECOMPUTED)
    model = model_of(kind)
    Recompute(find_blocks(model)).apply(find_blocks(model))
    assert same(train(model, inputs=inputs), expected)


# -- transforms ----------------------------------------------------------------------------------------------------------


class Layer(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.norm, self.act, self.drop = nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.0)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(self.drop(self.act(self.up(self.norm(hidden)))))


def batched(layers, hidden):
    for layer in layers:
        hidden = torch.vmap(layer)(hidden)
    return hidden


def ensemble(layers, hidden):
    weights = {
        name: torch.stack([dict(layer.named_parameters())[name] for layer in layers])
        for name, _ in layers[0].named_parameters()
    }
    return torch.vmap(lambda own: torch.func.functional_call(layers[0], own, (hidden,)))(weights).mean(0)


def with_tangents_of_func(layers, hidden):
    for layer in layers:
        hidden = sum(torch.func.jvp(layer, (hidden,), (torch.ones_like(hidden),)))
    return hidden


def with_tangents(layers, hidden):
    with forward_ad.dual_level():
        hidden = forward_ad.make_dual(hidden, torch.ones_like(hidden))
        for layer in layers:
            hidden = layer(hidden)
        return sum(forward_ad.unpack_dual(hidden))


@pytest.mark.parametrize("way", [batched, ensemble, with_tangents_of_func, with_tangents])
def test_a_model_whose_blocks_are_transformed(way, tmp_path):
    def layers():
        torch.manual_seed(0)
        return nn.Sequential(Layer(), Layer())

    expected = train(layers(), of=way)
    for config in (
        OffloadConfig(tier="auto", memory_budget="1GiB", directory=tmp_path, min_bytes=64),
        OffloadConfig(tier="none", recompute_elementwise="exact"),
    ):
        assert same(train(layers(), config, way), expected)
    model = layers()
    Recompute(find_blocks(model)).apply(find_blocks(model))
    assert same(train(model, of=way), expected)


# -- what is told of a tensor --------------------------------------------------------------------------------------------


def test_bytes_of_sparse_and_shapeless_tensors():
    entries = torch.ones(3)
    indices = torch.tensor([[0, 1, 2], [0, 1, 2]])
    assert nbytes_of(torch.sparse_coo_tensor(indices, entries, (1 << 20, 1 << 20))) == entries.nbytes + indices.nbytes
    compressed = torch.eye(4).to_sparse_csr()
    parts = compressed.values(), compressed.crow_indices(), compressed.col_indices()
    assert nbytes_of(compressed) == sum(part.nbytes for part in parts)
    assert nbytes_of(nn.UninitializedParameter()) == 0
    assert nbytes_of(nested(torch.jagged)) == 5 * WIDTH * 4
