"""Blocks that recompute elementwise operations: weights used more than once, attributes and tensors that change meanwhile."""

import contextlib

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from hf_offload.errors import SavedTensorModifiedError
from hf_offload.transforms.rematerialization.apply import ElementwiseBlocks

WIDTH, ROWS = 32, 24


class Block(nn.Module):
    """A norm and an activation, each before a linear layer, and a gate, as transformers' blocks have them."""

    def __init__(self, norm=nn.LayerNorm, activation=nn.GELU, linear=nn.Linear):
        super().__init__()
        self.norm, self.activation, self.dropout = norm(WIDTH), activation(), nn.Dropout(0.1)
        self.wide, self.gate, self.narrow = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def forward(self, hidden):
        normed = self.norm(hidden)
        gated = self.activation(self.wide(normed)) * self.gate(normed)
        return hidden + self.dropout(self.narrow(gated))


def conv1d(columns, features):
    return Conv1D(features, columns)


def tokens(number, dtype=torch.float):
    random = torch.Generator().manual_seed(number)
    return torch.randn(2, ROWS, WIDTH, generator=random).to(dtype)


def gradients(make, loss_of, elementwise, steps=1, watched=0, autocast=None, dtype=torch.float):
    """Losses, gradients and outputs of steps, the first ``watched`` of which save all."""
    torch.manual_seed(0)
    model = make().to(dtype).train()
    blocks = ElementwiseBlocks(
        {name: one for name, one in model.named_modules() if type(one).__name__.startswith("Block")}
    )
    found = []
    blocks.apply([])
    for step in range(steps):
        if elementwise and step == watched:
            blocks.apply([name for name, _ in model.named_modules()])
        torch.manual_seed(step)
        with contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast):
            loss = loss_of(model, step, dtype)
        loss.backward()
        found += [loss.detach(), *(one.grad for one in model.parameters())]
        model.zero_grad()
    names = blocks.names
    blocks.remove()
    return found, names


def check(make, loss_of, **settings):
    expected, none = gradients(make, loss_of, False, **settings)
    found, names = gradients(make, loss_of, True, **settings)
    assert not none
    assert len(expected) == len(found)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    return names


# ------------------------------------------------------------------------------------------ weights used more than once


def once(model, step, dtype):
    return model(tokens(step, dtype)).float().square().sum()


def two_forwards(model, step, dtype):
    return once(model, step, dtype) + 3 * once(model, step + 100, dtype)


def one_forward_without_a_graph(model, step, dtype):
    with torch.no_grad():
        once(model, step + 100, dtype)
    return once(model, step, dtype)


def a_layer_used_plainly_too(model, step, dtype):
    inputs = tokens(step + 100, dtype)
    layer = next(one for one in model.modules() if isinstance(one, nn.Linear | Conv1D))
    matrix = layer.weight if isinstance(layer, Conv1D) else layer.weight.t()
    before = (inputs @ matrix + layer.bias).float().square().sum()
    found = once(model, step, dtype)
    return before + found + torch.addmm(layer.bias, inputs[0], matrix).float().square().sum()


class TwiceInAForward(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.block = Block(linear=linear)

    def forward(self, hidden):
        return self.block(self.block(self.block(hidden)))


class Tied(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.layers = nn.ModuleList(Block(linear=linear) for _ in range(2))
        self.layers[1].wide.weight = self.layers[0].wide.weight
        self.layers[0].gate.weight = self.layers[0].wide.weight
        self.layers[1].narrow.bias = self.layers[0].wide.bias

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss_of", [once, two_forwards, one_forward_without_a_graph, a_layer_used_plainly_too])
@pytest.mark.parametrize("linear", [nn.Linear, conv1d])
@pytest.mark.parametrize("kind", [TwiceInAForward, Tied])
def test_gradients_of_all_uses_of_a_weight_add_up_in_its_dtype_of_autocast(kind, linear, loss_of, autocast):
    assert check(lambda: kind(linear), loss_of, autocast=autocast)


# ----------------------------------------------------------------------------------------- attributes that change


def changing(attribute, path, value):
    def loss_of(model, step, dtype):
        module = model.get_submodule(path)
        first = once(model, step, dtype)
        before = getattr(module, attribute)
        setattr(module, attribute, value)
        second = once(model, step, dtype)
        setattr(module, attribute, before)
        return first + second

    return loss_of


@pytest.mark.parametrize(
    ("block", "path", "attribute"),
    [
        ({"activation": nn.LeakyReLU}, "activation", "negative_slope"),
        ({"activation": nn.ELU}, "activation", "alpha"),
        ({"activation": nn.Softplus}, "activation", "beta"),
        ({"activation": nn.GELU}, "activation", "approximate"),
        ({"norm": nn.LayerNorm}, "norm", "eps"),
        ({"norm": nn.RMSNorm}, "norm", "eps"),
        ({"norm": LlamaRMSNorm}, "norm", "variance_epsilon"),
        ({}, "dropout", "p"),
    ],
    ids=lambda value: str(value),
)
def test_backward_has_the_attributes_of_the_forward(block, path, attribute):
    value = "tanh" if attribute == "approximate" else 0.4
    assert check(lambda: Block(**block), changing(attribute, path, value))


# -------------------------------------------------------------------------------------- tensors that change meanwhile


class BlockInPlace(Block):
    """Adds to its residual in place."""

    def forward(self, hidden):
        hidden = hidden.clone()
        normed = self.norm(hidden)
        hidden += self.narrow(self.activation(self.wide(normed)) * self.gate(normed))
        return hidden


@pytest.mark.parametrize("norm", [nn.RMSNorm, LlamaRMSNorm])
def test_a_block_that_overwrites_what_a_norm_is_recomputed_from_never_does_it(norm):
    def make():
        return nn.Sequential(Block(norm), BlockInPlace(norm), Block(norm))

    names = check(make, once, steps=3, watched=1, dtype=torch.bfloat16)
    assert {name.partition(".")[0] for name in names} == {"0", "2"}


def test_what_is_overwritten_without_having_been_watched_is_an_error_that_names_the_setting():
    with pytest.raises((RuntimeError, SavedTensorModifiedError), match="modified by an inplace operation") as caught:
        check(lambda: BlockInPlace(LlamaRMSNorm), once, dtype=torch.bfloat16)
    assert any("recompute_elementwise='off'" in note for note in caught.value.__notes__)


def penalised(model, step, dtype):
    inputs = tokens(step, dtype).requires_grad_()
    loss = model(inputs).float().square().sum()
    (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + gradient.square().sum()


def test_a_block_whose_gradients_are_differentiated_again_never_does_it():
    assert not check(Block, penalised, steps=3, watched=1)
