"""The tiled loss against a float64 reference: no further from it than the usual way in the same dtype."""

import copy
import itertools
import random

import pytest
import torch
from torch import nn

from hf_offload.transforms.tiling.cut import Cut
from hf_offload.transforms.tiling.head import TiledHead
from hf_offload.transforms.tiling.sums import WideSum
from tests.helpers.tables import rows

# Errors are compared over all elements of a tensor: two roundings of the same number need not agree. A product of a few rows
# in float32 adds up a thousand terms in another order than one of many rows, with any number of threads in yet another: the
# usual way is off by two units in the last place here, with as few rows by up to three.
ROUNDING = 1.05
FLOOR = {torch.float: 4.0, torch.bfloat16: 0.1, torch.float16: 0.1}


def losses_and_gradients(
    head, hidden, labels, *, tile_bytes=None, pieces=None, soft_cap=None, autocast=None, scaled=1.0, **options
):
    """What a causal model does behind its blocks; the loss, and the gradients of hidden states and head."""
    head = copy.deepcopy(head).train()
    hidden = hidden.clone().requires_grad_()
    if tile_bytes or pieces:
        TiledHead("head", head, Cut(tile_bytes=tile_bytes, exactly=pieces and (pieces, 1))).install()
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        logits = head(hidden)
        if soft_cap:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        logits = logits if logits.dtype is torch.double else logits.float()
        loss = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels, **options)
    if loss.dim():
        loss = (loss * torch.linspace(0, 1, len(loss), dtype=loss.dtype)).sum()
    (loss * scaled).backward()
    found = {"loss": loss.detach(), "hidden": hidden.grad}
    return found | {name: parameter.grad for name, parameter in head.named_parameters()}


def problem(vocabulary, tokens=96, width=48, *, bias=False, dtype=torch.float, ignored=0.3):
    torch.manual_seed(vocabulary)
    head = nn.Linear(width, vocabulary, bias=bias).to(dtype)
    hidden = torch.randn(2, tokens // 2, width).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,))
    labels[torch.rand(tokens) < ignored] = -100
    return head, hidden, labels


def no_further_than_untiled(head, hidden, labels, tile_bytes, **options):
    exact = {name: value for name, value in options.items() if name != "autocast"}
    reference = losses_and_gradients(copy.deepcopy(head).double(), hidden.double(), labels, **exact)
    plain = losses_and_gradients(head, hidden, labels, **options)
    tiled = losses_and_gradients(head, hidden, labels, tile_bytes=tile_bytes, **options)
    assert plain.keys() == tiled.keys()
    for name, expected in reference.items():
        assert tiled[name].dtype == plain[name].dtype, name
        dtype = tiled[name].dtype
        floor = torch.finfo(dtype).eps * expected.norm() * FLOOR[dtype]
        error, usual = ((found[name].double() - expected).norm() for found in (tiled, plain))
        assert error <= max(ROUNDING * usual, floor), (name, error / usual)


VOCABULARIES = itertools.product((1_000, 50_257, 262_144), (torch.float, torch.bfloat16))


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), rows(VOCABULARIES, quick=[(1_000, torch.bfloat16), (50_257, torch.float)])
)
def test_vocabularies(vocabulary, dtype):
    no_further_than_untiled(*problem(vocabulary, dtype=dtype), 4 * vocabulary * 20)


@pytest.mark.parametrize("rows", [1, 13, 32, 95])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16, torch.float16])
def test_pieces_that_divide_and_that_do_not(rows, dtype):
    no_further_than_untiled(*problem(1_000, bias=True, dtype=dtype), 4 * 1_000 * rows)


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"ignore_index": 3},
        {"soft_cap": 5.0},
        {"soft_cap": 5.0, "label_smoothing": 0.1},
        {"autocast": torch.bfloat16},
        {"autocast": torch.bfloat16, "soft_cap": 5.0},
        {"scaled": 65536.0},
    ],
    ids=str,
)
def test_every_way_to_ask_for_the_loss(options):
    head, hidden, labels = problem(1_000, bias=True)
    if "ignore_index" in options:
        labels = labels.where(labels >= 0, 3)
    no_further_than_untiled(head, hidden, labels, 4 * 1_000 * 20, **options)


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_pieces_whose_tokens_are_all_ignored(dtype):
    head, hidden, labels = problem(1_000, dtype=dtype)
    labels[:40] = -100
    no_further_than_untiled(head, hidden, labels, 4 * 1_000 * 10)


def test_gradients_in_16_bits_survive_a_mean_over_many_tokens():
    """One over 4096 tokens times a softmax's tail is nothing in float16, unless it is scaled first."""
    head, hidden, labels = problem(200, tokens=4096, width=16, dtype=torch.float16)
    # With a cap the gradient of the logits is in float16 on every device.
    for soft_cap in (None, 5.0):
        no_further_than_untiled(head, hidden, labels, 4 * 200 * 500, scaled=4096.0, soft_cap=soft_cap)


def test_logits_that_a_model_has_ruled_out():
    head, hidden, labels = problem(1_000, bias=True)
    with torch.no_grad():
        head.bias[7] = -torch.inf
    labels[labels == 7] = 8
    plain = losses_and_gradients(head, hidden, labels)
    tiled = losses_and_gradients(head, hidden, labels, tile_bytes=40_000)
    for name, expected in plain.items():
        torch.testing.assert_close(tiled[name], expected)


def test_a_second_backward_needs_the_graph_to_be_kept():
    head, hidden, labels = problem(1_000)
    hidden.requires_grad_()
    TiledHead("head", head, Cut(tile_bytes=40_000)).install()
    loss = nn.functional.cross_entropy(head(hidden).view(-1, 1_000), labels)
    loss.backward(retain_graph=True)
    once = head.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(head.weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_gradient_of_the_gradient_is_refused():
    """Also where layers below have a second derivative of their own, which would hide that the head's is missing."""
    head, rows, labels = problem(1_000)
    rows.requires_grad_()
    TiledHead("head", head, Cut(tile_bytes=40_000)).install()
    loss = nn.functional.cross_entropy(head(rows.tanh()).view(-1, 1_000), labels)
    (gradient,) = torch.autograd.grad(loss, rows, create_graph=True)
    with pytest.raises(RuntimeError, match=r"create_graph=True\) goes through a tiled loss.*Set tiled_loss='off'"):
        (loss + gradient.square().sum()).backward()


@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_what_needs_no_gradient_gets_none(frozen):
    head, hidden, labels = problem(1_000, bias=True)
    plain, tiled = copy.deepcopy(head), copy.deepcopy(head)
    TiledHead("head", tiled, Cut(tile_bytes=40_000)).install()
    found = []
    for one in (plain, tiled):
        one.requires_grad_(frozen != "head")
        rows = hidden.clone().requires_grad_(frozen != "hidden")
        nn.functional.cross_entropy(one(rows).view(-1, 1_000), labels).backward()
        found.append((rows.grad, one.weight.grad, one.bias.grad))
    for expected, gradient in zip(*found, strict=True):
        assert (expected is None) == (gradient is None)
        if expected is not None:
            torch.testing.assert_close(gradient, expected)


class Adapted(nn.Module):
    """A head that is no plain linear layer: a frozen one and an adapter in float32, as peft makes it."""

    def __init__(self, linear, rank=4):
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        self.out_features = linear.out_features

    def forward(self, hidden):
        base = self.base(hidden)
        return base + self.up(self.down(hidden.to(self.up.weight.dtype))).to(base.dtype)


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_a_head_of_another_kind(dtype):
    head, hidden, labels = problem(1_000, dtype=dtype)
    adapted = Adapted(head)
    for soft_cap in (None, 5.0):
        plain = losses_and_gradients(adapted, hidden, labels, soft_cap=soft_cap)
        tiled = losses_and_gradients(adapted, hidden, labels, soft_cap=soft_cap, tile_bytes=4 * 1_000 * 50)
        assert tiled["base.weight"] is None
        reference = losses_and_gradients(copy.deepcopy(adapted).double(), hidden.double(), labels, soft_cap=soft_cap)
        for name in ("loss", "hidden", "down.weight", "up.weight"):
            usual = (plain[name].double() - reference[name]).norm()
            floor = torch.finfo(dtype).eps * reference[name].norm() * FLOOR[dtype]
            error = (tiled[name].double() - reference[name]).norm()
            assert error <= max(ROUNDING * usual, floor), (name, error / usual)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_in_16_bits_lose_nothing_until_the_end(dtype):
    """A thousand parts, each of which would be lost in the sum so far."""
    like = torch.zeros(7, 5, dtype=dtype)
    parts = [torch.rand(7, 5) * 1e-3 - 0.2e-3 for _ in range(1000)]
    grown, exact = WideSum(like), torch.zeros(7, 5, dtype=torch.double)
    for part in parts:
        grown.add(part)
        exact += part
    kept = grown.scaled(torch.tensor(1.0), in_place=False)
    assert kept.dtype == dtype
    assert (kept.double() - exact).abs().max() <= 0.55 * torch.finfo(dtype).eps * exact.abs().max()
    twice = grown.scaled(torch.tensor(2.0), in_place=True)
    assert twice.data_ptr() == grown._sum.data_ptr()
    torch.testing.assert_close(twice, 2 * kept)


def heads():
    """Each kind of head: what calls it, and what of it is trained."""
    linear, biased = nn.Linear(16, 40, bias=False), nn.Linear(16, 40)
    frozen, adapted, unused = nn.Linear(16, 40).requires_grad_(False), Adapted(nn.Linear(16, 40)), Adapted(linear)
    unused.never = nn.Parameter(torch.ones(3))
    return [linear, biased, frozen, adapted, unused, nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 40))]


@pytest.mark.parametrize("seed", range(40))
def test_a_gradient_of_any_value_is_what_it_is_in_pytorch(seed):
    """Batches with any number of labels, none and one among them, whose loss has a gradient of 0, infinity, NaN or 1."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    dtype = choose.choice([torch.float, torch.double, torch.bfloat16, torch.float16])
    head = choose.choice(heads()).to(dtype)
    tokens = choose.choice([0, 1, 2, 24, 50])
    hidden = torch.randn(tokens, 16).to(dtype)
    labels = torch.randint(0, 40, (tokens,))
    labelled = torch.rand(tokens) < choose.choice([0, 0, 0.1, 0.5, 1])
    labels[~labelled] = -100
    options = {
        "reduction": choose.choice(["mean", "sum", "none"]),
        "label_smoothing": choose.choice([0.0, 0.0, 0.1]),
        "scaled": choose.choice([0.0, torch.inf, -torch.inf, torch.nan, 1.0]),
        "autocast": choose.choice([None, None, torch.bfloat16]) if dtype is torch.float else None,
        "soft_cap": choose.choice([None, None, 5.0]),
    }
    plain = losses_and_gradients(head, hidden, labels, **options)
    tiled = losses_and_gradients(head, hidden, labels, pieces=choose.randint(1, 5), **options)
    coarse = torch.finfo(torch.bfloat16 if options["autocast"] else dtype).eps
    assert not tiled["hidden"][~labelled].any()
    for name, expected in plain.items():
        found = tiled[name]
        assert (found is None) == (expected is None), name
        if expected is None:
            continue
        assert found.dtype == expected.dtype, name
        # PyTorch has infinities among its NaN where a single token has a label.
        assert torch.equal(found.isfinite(), expected.isfinite()), name
        assert found[expected.isnan()].isnan().all(), name
        finite = found.isfinite()
        error = (found[finite].double() - expected[finite].double()).norm()
        assert error <= 4 * coarse * (1 + expected[finite].double().norm()), (name, error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_in_16_bits_keep_every_nan_and_infinity(dtype):
    """Of NaN of either sign with all bits set, which CUDA's are, rounding in whole numbers would make zeros."""
    bits = torch.tensor([[0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, -0x800000, 0]], dtype=torch.int32)
    grown = WideSum(torch.zeros(1, 6, dtype=dtype))
    grown._write(slice(0, 1), bits.view(torch.float))
    found = grown.scaled(torch.tensor(1.0), in_place=True)
    expected = torch.tensor([[torch.nan, torch.nan, torch.nan, torch.inf, -torch.inf, 0]], dtype=dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
