"""Views of weights that custom functions and quantised layers keep: they follow the weights, as views do in memory."""

import copy

import pytest
import torch
from torch import nn

from tests.helpers.parked import in_memory, leave_memory, parked

bitsandbytes = pytest.importorskip("bitsandbytes")


class KeepsAView(torch.autograd.Function):
    """Keeps its weight as an attribute of the context, as bitsandbytes does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = {"views": [weight.t(), weight.view(-1)[:8]]}
        return x @ ctx.kept["views"][0]

    @staticmethod
    def backward(ctx, grad):
        turned, few = ctx.kept["views"]
        return torch.mm(grad, turned.t()) + few.sum(), None


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64), requires_grad=False)

    def forward(self, x):
        return KeepsAView.apply(x, self.weight)


def quantised(kind):
    value = torch.randn(64, 64) / 8
    if kind == "4 bits":
        layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        layer.weight = bitsandbytes.nn.Params4bit(value, requires_grad=False, quant_type="nf4")
    else:
        layer = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=6.0)
        layer.weight = bitsandbytes.nn.Int8Params(value, requires_grad=False, has_fp16_weights=False)
    return layer.to("cpu")


def layers(kind):
    torch.manual_seed(0)
    return nn.Sequential(*[Kept() if kind == "a custom function" else quantised(kind) for _ in range(4)])


KINDS = ("a custom function", "4 bits", "8 bits")


def steps(model, count=2):
    torch.manual_seed(1)
    found = []
    for _ in range(count):
        x = torch.randn(8, 64, requires_grad=True)
        output = model(x)
        output.float().square().mean().backward()
        found += [output.detach(), x.grad]
    return found


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("used_before", [False, True], ids=["new", "used before"])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_views_hold_no_weight_in_memory_and_have_its_bits(tmp_path, kind, used_before):
    plain, model = layers(kind), layers(kind)
    if used_before:
        assert all(torch.equal(one, other) for one, other in zip(steps(plain), steps(model), strict=True))
    session = parked(model, tmp_path)
    leave_memory(session)
    torch.manual_seed(1)
    output = model(torch.randn(8, 64, requires_grad=True))
    assert len(in_memory(session)) <= 2, "only what was used last, and before"
    del output
    found, expected = steps(model), steps(plain)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    copied = copy.deepcopy(model)
    assert all(torch.equal(one, other) for one, other in zip(steps(copied), steps(plain), strict=True))


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_only_looked_at_are_written_once(tmp_path, kind):
    model = layers(kind)
    session = parked(model, tmp_path)
    steps(model)
    leave_memory(session)
    stats = session.residency.store.tier.stats
    written, read = stats.written_bytes, stats.read_bytes
    steps(model)
    leave_memory(session)
    assert stats.written_bytes == written
    assert stats.read_bytes > read


def test_a_write_through_a_view_that_has_gone_is_written(tmp_path):
    model = nn.Linear(64, 64)
    session = parked(model, tmp_path)
    for write in (
        lambda: model.weight.detach().numpy().fill(1),
        lambda: model.weight.data.fill_(2),
        lambda: model.weight.view(-1).detach().numpy().fill(3),
    ):
        before = model.weight.detach().clone()
        leave_memory(session)
        write()
        leave_memory(session)
        assert not torch.equal(model.weight, before)
        assert model.weight.unique().numel() == 1


def test_a_kept_view_that_is_given_other_memory_keeps_that(tmp_path):
    model = layers("8 bits")
    session = parked(model, tmp_path)
    steps(model)
    held = model[0].state.CB
    other = torch.ones(64, 64, dtype=torch.int8)
    held.data = other
    leave_memory(session)
    assert torch.equal(held, other)
    assert held.data_ptr() == other.data_ptr()
