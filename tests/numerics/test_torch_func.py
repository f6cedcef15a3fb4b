"""Transforms of torch.func, alone and nested: the same bits as without offloading in every step, or torch's own refusal."""

import contextlib
import itertools
import logging
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)

from hf_offload import OffloadConfig, attach
from tests.operators.probes import bits

STEPS = 3
INPUTS = torch.linspace(-1, 1, 8 * 16).view(8, 16).sin()
ONES = torch.ones_like(INPUTS)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))


class Cubed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(inputs):
        return inputs**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (inputs,) = ctx.saved_tensors
        return gradient * 3 * inputs**2

    @staticmethod
    def jvp(ctx, tangent):
        (inputs,) = ctx.saved_tensors
        return tangent * 3 * inputs**2


def called(model, parameters, inputs):
    return functional_call(model, parameters, (inputs,))


def parameters_of(model, factor=1.0):
    return {name: one * factor for name, one in model.named_parameters()}


def ensemble(model):
    several = {name: torch.stack([one, one * 1.1, one * 0.9]) for name, one in model.named_parameters()}
    return vmap(lambda own, inputs: called(model, own, inputs), (0, None))(several, INPUTS)


def random_vmap(model):
    return vmap(lambda one: nn.functional.dropout(model(one), 0.5), randomness="different")(INPUTS)


def dual(model):
    with forward_ad.dual_level():
        return sum(forward_ad.unpack_dual(model(forward_ad.make_dual(INPUTS, ONES))))


def linearized(model):
    result, pushed = linearize(model, INPUTS)
    return result + pushed(ONES)


def gradients_of_parameters(model):
    found = grad(lambda own: called(model, own, INPUTS).square().sum())(parameters_of(model))
    return torch.cat([one.flatten() for one in found.values()])


def gradients_of_samples(model):
    def loss(own, one):
        return called(model, own, one).square().sum()

    found = vmap(grad(loss), (None, 0))(parameters_of(model), INPUTS)
    return torch.cat([one.flatten() for one in found.values()])


def pulled_back(model):
    result, pull = vjp(model, INPUTS)
    return result.sum() + pull(torch.ones_like(result))[0]


def batched_gradients(model):
    inputs = INPUTS.clone().requires_grad_()
    result = model(inputs)
    directions = torch.eye(4).view(4, 1, 4).expand(4, 8, 4)
    (found,) = torch.autograd.grad(result, inputs, directions, is_grads_batched=True, create_graph=True)
    return found


def vectorized(model):
    inputs = INPUTS[0].clone().requires_grad_()
    return torch.autograd.functional.jacobian(model, inputs, create_graph=True, vectorize=True)


ALLOWED = {
    "functional_call": lambda model: called(model, parameters_of(model, 2.0), INPUTS),
    "vmap": lambda model: vmap(model)(INPUTS),
    "vmap, random": random_vmap,
    "vmap of parameters": ensemble,
    "vmap of a function of one's own": lambda model: vmap(lambda one: Cubed.apply(model(one)))(INPUTS),
    "jvp of a function of one's own": lambda model: sum(jvp(lambda one: Cubed.apply(model(one)), (INPUTS,), (ONES,))),
    "vmap of jvp": lambda model: vmap(lambda one: jvp(model, (one,), (one * 2,))[1])(INPUTS),
    "jvp": lambda model: sum(jvp(model, (INPUTS,), (ONES,))),
    "dual numbers": dual,
    "jacfwd": lambda model: jacfwd(model)(INPUTS[0]),
    "functionalize": lambda model: functionalize(model)(INPUTS),
    "linearize": linearized,
    "batched gradients": batched_gradients,
    "jacobian": vectorized,
}
REFUSING_HOOKS = {
    "grad": gradients_of_parameters,
    "vmap of grad": gradients_of_samples,
    "vjp": pulled_back,
    "jacrev": lambda model: jacrev(model)(INPUTS[0]),
    "hessian": lambda model: hessian(lambda one: model(one).sum())(INPUTS[0]),
}


def train(transform, config, scoped=False):
    model = network().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = None if config is None else attach(model, config)
    found = []
    try:
        for step in range(STEPS):
            torch.manual_seed(step)
            with session.scope() if scoped else contextlib.nullcontext(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, about its own graphs (linearize)
                loss = transform(model).square().mean()
            loss.backward()
            found += [bits(loss), *(bits(one.grad) for one in model.parameters() if one.grad is not None)]
            assert loss.isfinite()
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                session.end_step()
        moved = 0 if session is None else session.stats.total.offloaded_bytes
    finally:
        if session is not None:
            session.detach()
    return found, moved


def settings(tier, directory):
    return OffloadConfig(tier=tier, min_bytes=0, **({"directory": directory} if tier == "ssd" else {}))


@pytest.mark.filterwarnings("ignore:The model is on the CPU")
@pytest.mark.parametrize(("name", "scoped"), list(zip(ALLOWED, itertools.cycle((False, True)))))
def test_the_same_bits(name, scoped, tmp_path):
    expected, _ = train(ALLOWED[name], None)
    found, moved = train(ALLOWED[name], settings("ram" if scoped else "ssd", tmp_path), scoped)
    assert found == expected
    assert moved > 0 or name == "linearize"


@pytest.mark.parametrize("name", REFUSING_HOOKS)
def test_transforms_that_allow_no_hooks_run_without_offloading(name, tmp_path, caplog):
    expected, _ = train(REFUSING_HOOKS[name], None)
    with caplog.at_level(logging.WARNING):
        found, _ = train(REFUSING_HOOKS[name], settings("ssd", tmp_path))
    assert found == expected
    warned = [one for one in caplog.messages if "don't yet support saved tensor hooks" in one]
    assert len(warned) == 1


@pytest.mark.parametrize("name", REFUSING_HOOKS)
def test_inside_a_scope_torch_refuses_them(name, tmp_path):
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        train(REFUSING_HOOKS[name], settings("ssd", tmp_path), scoped=True)
