"""Operations that save less: the same bits as the usual ones where that is said, within the stated bound where it is not."""

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2FN, NewGELUActivation
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_offload import RecomputeElementwiseConfig
from hf_offload.transforms.rematerialization.apply import Rematerialization
from hf_offload.transforms.rematerialization.formulas import Formula, Formulas
from hf_offload.transforms.rematerialization.functions import (
    Products,
    coarse_activation,
    dropped,
    from_codes,
    pack_bits,
    packed_dropout,
    packed_relu,
    recomputed,
    to_codes,
    unpack_bits,
)
from hf_offload.transforms.rematerialization.modules import rerun
from tests.helpers.tiny_models import gradients, tiny_batch, tiny_model

WIDTH = 24
MODULES = {
    "gelu_new": NewGELUActivation,
    "gelu_python": lambda: ACT2FN["gelu_python"],
    "gelu_fast": lambda: ACT2FN["gelu_fast"],
    "quick_gelu": lambda: ACT2FN["quick_gelu"],
    "relu": nn.ReLU,
    "relu2": lambda: ACT2FN["relu2"],
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "rms norm, default eps": lambda: nn.RMSNorm(WIDTH),
    "llama": lambda: LlamaRMSNorm(WIDTH),
    "t5": lambda: T5LayerNorm(WIDTH),
    "gemma": lambda: GemmaRMSNorm(WIDTH),
    # No norm, but autocast decides what it computes.
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
}


def numbers(*shape, seed=0, dtype=torch.float):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul_(3).to(dtype)


def made(name, dtype):
    torch.manual_seed(0)
    module = MODULES[name]()
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            parameter.add_(numbers(*parameter.shape, seed=place + 7), alpha=0.1)
    return module.to(dtype)


def recompute(module, hidden):
    return recomputed(module.forward, hidden, tuple(module.parameters()))


def replaced(module, hidden):
    model = nn.Sequential(module)
    lean = Rematerialization(model, RecomputeElementwiseConfig(("exact",)))
    lean.apply()
    result = module(hidden)
    lean.remove()
    return result


@pytest.mark.parametrize("way", [recompute, replaced])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_a_recomputed_module_gives_the_same_bits(name, dtype, autocast, way):
    """Other users of the input come before and after: the sum of all gradients depends on the order of its terms."""
    if name.startswith("rms norm") and way is recompute:
        pytest.skip("its operations cannot be seen one by one")
    if name == "linear" and way is replaced:
        pytest.skip("it is none of those that are replaced")

    def run(call):
        module = made(name, dtype)
        leaf = numbers(16, WIDTH, dtype=dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden = leaf * 1
            before = hidden.sin()
            result = call(module, hidden)
            total = before * 0.7 + result + hidden * 1.3
        total.backward(numbers(16, WIDTH, seed=1, dtype=total.dtype))
        return [result.detach(), leaf.grad, *(parameter.grad for parameter in module.parameters())]

    expected = run(lambda module, hidden: module(hidden))
    found = run(way)
    assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(expected, found, strict=True))


def test_the_order_of_terms_is_what_the_bits_depend_on():
    """The test above would see one gradient for all uses: this is one."""

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs, module):
            ctx.save_for_backward(inputs)
            ctx.module = module
            return module(inputs)

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                leaf = ctx.saved_tensors[0].detach().requires_grad_()
                result = ctx.module(leaf)
            return *torch.autograd.grad(result, leaf, gradient), None

    def run(call):
        leaf = numbers(64, WIDTH).requires_grad_()
        hidden = leaf * 1
        result = call(made("llama", torch.float), hidden) + hidden * 1.3
        result.backward(numbers(64, WIDTH, seed=1))
        return leaf.grad

    expected = run(lambda module, hidden: module(hidden))
    assert not torch.equal(run(lambda module, hidden: Summed.apply(hidden, module)), expected)
    assert torch.equal(run(recompute), expected)


class SlowerRoots(TorchFunctionMode):
    """What a user's mode may do to an operation, in forward alone."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 1.25 if getattr(func, "__name__", "") == "rsqrt" else result


@pytest.mark.parametrize("mode", [SlowerRoots, lambda: torch.device("cpu")])
def test_a_mode_of_the_forward_alone_changes_no_bit(mode):
    def run(switches):
        model = tiny_model("llama")
        torch.manual_seed(0)
        reduced = Rematerialization(model, RecomputeElementwiseConfig(switches) if switches else None)
        reduced.apply()
        with mode():
            loss = model(**tiny_batch("llama")).loss
        loss.backward()
        return gradients(model)

    expected, found = run(()), run(("exact",))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_second_derivative_is_an_error(name):
    model = tiny_model(name)
    Rematerialization(model, RecomputeElementwiseConfig(("exact",))).apply()
    loss = model(**tiny_batch(name)).loss
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match="recompute_elementwise='off'"):
        sum(one.square().sum() for one in found if one is not None).backward()


def test_no_second_derivative_is_lost_where_the_first_gradient_is_a_constant():
    leaf = numbers(4, WIDTH).requires_grad_()
    (found,) = torch.autograd.grad(recompute(made("llama", torch.float), leaf).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="recompute_elementwise='off'"):
        found.square().sum().backward()


def test_what_is_made_again_is_made_in_the_same_precision():
    module, hidden = nn.Linear(WIDTH, WIDTH), numbers(8, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        expected, again = module(hidden), rerun(module.forward, hidden.device)
    assert torch.equal(again(hidden), expected)
    assert expected.dtype == torch.bfloat16


def test_only_a_view_of_everything_in_order_is_made_again():
    hidden = numbers(WIDTH, WIDTH).requires_grad_() * 1
    made = hidden.sin()
    recipes = Formulas()
    recipes.remember(made, Formula((hidden,), torch.sin))
    for view in (made, made.view(2, -1), made.unsqueeze(0)):
        recipe = recipes.of(view)
        assert torch.equal(recipe.build(*recipe.tensors), view)
    assert [recipes.of(view) for view in (made.t(), made[1:], made.sin(), made.clone())] == [None] * 4


@pytest.mark.parametrize("frozen", [0, 1, None])
def test_a_product_saves_only_what_a_gradient_needs(frozen):
    hidden = numbers(8, WIDTH).requires_grad_() * 1
    other = numbers(8, WIDTH, seed=1).requires_grad_() * 1
    recipes, saved = Formulas(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        made = hidden.sin()
        recipes.remember(made, Formula((hidden,), torch.sin))
        factors = [made, other]
        if frozen is not None:
            factors[frozen] = factors[frozen].detach()
        if frozen == 0:  # a recipe belongs to the tensor
            recipes._known[id(factors[0])] = weakref.ref(factors[0]), recipes._known[id(made)][1]
        saved.clear()
        with Products(recipes):
            product = factors[0] * factors[1]
    needed = {0: [hidden], 1: [other], None: [hidden, other]}[frozen]
    assert {one.data_ptr() for one in saved} == {one.data_ptr() for one in needed}
    (found,) = torch.autograd.grad(product.sum(), hidden if frozen == 1 else other)
    assert torch.equal(found, other * hidden.cos() if frozen == 1 else made)


def test_a_parameter_that_needs_no_gradient_gets_none():
    module = made("llama", torch.float).requires_grad_(False)
    leaf = numbers(4, WIDTH).requires_grad_()
    recompute(module, leaf).sum().backward()
    assert module.weight.grad is None
    assert leaf.grad is not None


@pytest.mark.parametrize("changed", ["input", "weight"])
def test_what_is_changed_after_it_was_saved_is_told(changed):
    module = made("llama", torch.float)
    hidden = numbers(4, WIDTH).requires_grad_() * 1
    result = recompute(module, hidden)
    with torch.no_grad():
        (hidden if changed == "input" else module.weight).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


# -------------------------------------------------------------------------------------------------------------------- dropout


@given(st.lists(st.booleans(), max_size=70))
@settings(max_examples=60, deadline=None)
def test_bits_are_the_mask(values):
    mask = torch.tensor(values, dtype=torch.bool)
    bits = pack_bits(mask)
    assert bits.dtype == torch.uint8
    assert len(bits) == math.ceil(len(values) / 8)
    assert torch.equal(unpack_bits(bits, mask.shape), mask)


@pytest.mark.parametrize("shape", [(3, 5, 7), (64,), (1,), (0, 4)])
def test_packed_dropout_gives_the_same_bits_and_draws_the_same(shape):
    def run(call):
        torch.manual_seed(3)
        leaf = numbers(*shape)
        leaf.view(-1)[::3] = 0  # an element that is zero says nothing about its mask
        leaf.requires_grad_()
        result = call(leaf)
        result.backward(numbers(*shape, seed=1))
        return result.detach(), leaf.grad, torch.get_rng_state()

    expected = run(lambda leaf: nn.functional.dropout(leaf, 0.1))
    found = run(lambda leaf: packed_dropout(leaf, 0.1)[0])
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16, torch.float16, torch.float64])
def test_the_scale_of_dropout_is_torchs_for_every_probability(dtype):
    """What a mask is made into again has the bits of torch's own result and gradient."""
    values, gradient = numbers(257, dtype=dtype), numbers(257, seed=1, dtype=dtype)
    for percent in range(1, 100):
        probability = percent / 100
        usual, packed = (values.clone().requires_grad_() for _ in range(2))
        torch.manual_seed(percent)
        expected = nn.functional.dropout(usual, probability)
        torch.manual_seed(percent)
        found, mask = packed_dropout(packed, probability)
        expected.backward(gradient)
        found.backward(gradient)
        assert torch.equal(found, expected), probability
        assert torch.equal(packed.grad, usual.grad), probability
        assert torch.equal(dropped(values, mask, probability), expected), probability


# ------------------------------------------------------------------------------------------------------ derivatives in 8 bits

# Of rounding in 32 bits, over the range of the values: far below a 510th of it.
ROUNDING = 1e-6


@pytest.mark.parametrize("low", [-0.13, -1e6, 0.0, 3.0])
@pytest.mark.parametrize("span", [0.0, 1e-30, 1.26, 1e7])
def test_codes_are_within_their_bound(low, span):
    values = low + span * torch.rand(5000, generator=torch.Generator().manual_seed(0))
    values[0], values[1] = low, low + span
    codes, ends = to_codes(values)
    assert codes.dtype == torch.uint8
    width = (values.max() - values.min()).item()
    slack = ROUNDING * (abs(low) + width)
    error = (from_codes(codes, ends).double() - values.double()).abs().max().item()
    assert error <= width / 510 + slack
    if low == 0.0 and span == 1.26:
        assert error > 0.9 * width / 510  # and the bound is reached


def test_what_is_not_finite_is_not_hidden():
    codes, ends = to_codes(torch.tensor([0.5, float("nan"), 1.0]))
    assert from_codes(codes, ends).isnan().all()


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "silu", "quick_gelu"])
def test_coarse_gradients_are_within_their_bound(name):
    """Of a small network, for every element of every gradient: the bound goes through its matrices as absolute values."""
    function = ACT2FN[name]
    rows = numbers(50, 16)
    first, second = numbers(40, 16, seed=1) / 4, numbers(8, 40, seed=2) / 6
    targets = numbers(50, 8, seed=3)

    def run(call):
        inputs, lower, upper = (one.clone().requires_grad_() for one in (rows, first, second))
        hidden = nn.functional.linear(inputs, lower)
        hidden.retain_grad()
        result = call(hidden)
        result.retain_grad()
        loss = (nn.functional.linear(result, upper) - targets).square().mean()
        loss.backward()
        return loss.detach(), hidden, result, inputs.grad, lower.grad, upper.grad

    exact = run(function)
    coarse = run(lambda hidden: coarse_activation(function.forward, hidden))
    assert torch.equal(exact[0], coarse[0])
    assert torch.equal(exact[5], coarse[5])  # above the activation nothing changes
    hidden = exact[1].detach().requires_grad_()
    (derivative,) = torch.autograd.grad(function(hidden).sum(), hidden)
    bound = exact[2].grad.abs() * (derivative.max() - derivative.min()) / 510
    slack = 1 + 1e-4  # rounding in 32 bits
    errors = [(one - other).abs() for one, other in zip(exact[3:5], coarse[3:5], strict=True)]
    assert ((exact[1].grad - coarse[1].grad).abs() <= bound * slack + 1e-9).all()
    assert (errors[0] <= bound @ first.abs() * slack + 1e-8).all()
    assert (errors[1] <= bound.t() @ rows.abs() * slack + 1e-8).all()
    assert all(error.max() > 0 for error in errors)


def test_coarse_gradients_of_a_model_are_near_the_exact_ones():
    def run(config):
        model = tiny_model("gpt2", dropout=0.0)
        lean = Rematerialization(model, config)
        lean.apply()
        loss = model(**tiny_batch("gpt2")).loss
        loss.backward()
        return loss.detach(), gradients(model)

    loss, exact = run(None)
    same, coarse = run(RecomputeElementwiseConfig(("derivative-8bit",)))
    assert torch.equal(loss, same)
    errors = {name: float((coarse[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
    assert errors["transformer.ln_f.weight"] == 0
    assert errors["transformer.h.1.mlp.c_fc.weight"] > 0
    # Derivatives near 1/2 are off by up to a 510th of 1.26: half a percent, and less on average.
    assert max(errors.values()) < 0.005


def test_relu_lets_through_what_torch_lets_through():
    """Also zeros, infinities, and what is no number."""
    values = torch.tensor([1.0, -1.0, 0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45])
    usual, packed = values.clone().requires_grad_(), values.clone().requires_grad_()
    for leaf, function in ((usual, torch.relu), (packed, packed_relu)):
        function(leaf).backward(torch.arange(1.0, 10.0))
    assert torch.equal(packed.grad, usual.grad)
    assert torch.equal(packed_relu(values).isnan(), torch.relu(values).isnan())


def test_a_formula_goes_with_its_tensor_and_is_of_no_other():
    """Another tensor may have the address of one that has gone."""
    hidden = numbers(8, WIDTH).requires_grad_()
    recipes = Formulas()
    made, other = hidden.sin(), hidden.cos()
    recipes.remember(made, Formula((hidden,), torch.sin))
    assert recipes.of(made) is not None
    recipes._known[id(other)] = recipes._known[id(made)]
    assert recipes.of(other) is None
    del recipes._known[id(other)]
    del made
    assert not recipes._known
