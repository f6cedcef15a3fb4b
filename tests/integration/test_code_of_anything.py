"""Whatever a block names or holds, and wherever it holds it: ``tier="auto"`` trains as PyTorch does, and says nothing."""

import functools
import types

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_offload import OffloadConfig
from hf_offload.session import attach
from hf_offload.structure.block_state import changed_name, state_of
from hf_offload.structure.reach import UNKNOWN
from tests.helpers.callables import CALLED, HELD, RAISING, TORCHSCRIPT

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*was never awaited")

WIDTH = 4
KINDS = {**CALLED, **HELD}
NOT_STATIC = {"a module that raises", "attributes that raise", "a dead proxy", "an unreachable object"}
"""Of which Python makes no static method."""


class Block(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x)


def of_class(name, forward, **attributes):
    return type("Made", (Block,), {"forward": forward, "__module__": __name__, **attributes})()


def by_global(thing, used):
    def forward(self, x):
        return used(named, self.linear(x))  # noqa: F821

    function = types.FunctionType(forward.__code__, {**globals(), "named": thing}, "forward", None, forward.__closure__)
    return of_class("by_global", function)


def by_class(thing, used):
    def forward(self, x):
        return used(vars(type(self))["held"], self.linear(x))

    return of_class("by_class", forward, held=thing)


def by_static_method(thing, used):
    def forward(self, x):
        return used(type(self).held, self.linear(x))

    return of_class("by_static_method", forward, held=staticmethod(thing))


def by_instance(thing, used):
    def forward(self, x):
        return used(vars(self)["held"], self.linear(x))

    block = of_class("by_instance", forward)
    vars(block)["held"] = thing
    return block


def by_closure(thing, used):
    def forward(self, x):
        return used(thing, self.linear(x))

    return of_class("by_closure", forward)


def by_default(thing, used):
    def forward(self, x, held=thing):
        return used(held, self.linear(x))

    return of_class("by_default", forward)


def by_hook(thing, used):
    block = Block()
    block.linear.register_forward_hook(functools.partial(lambda held, module, args, output: used(held, output), thing))
    return block


def by_decorated_hook(thing, used):
    def hook(module, args, output):
        return used(thing, output)

    hook.__wrapped__ = thing
    block = Block()
    block.linear.register_forward_hook(hook)
    return block


def by_decorator(thing, used):
    def forward(self, x):
        return used(thing, self.linear(x))

    forward.__wrapped__ = thing
    return of_class("by_decorator", forward)


def in_containers(thing, used):
    def forward(self, x):
        return used(self.held[0]["a"][0], self.linear(x))

    block = of_class("in_containers", forward)
    block.held = [{"a": (thing, {"b": thing})}]
    return block


PLACES = (
    by_global,
    by_class,
    by_static_method,
    by_instance,
    by_closure,
    by_default,
    by_hook,
    by_decorated_hook,
    by_decorator,
    in_containers,
)


def call(thing, x):
    return thing(x)


def hold(thing, x):
    return x


def kinds(place):
    return [kind for kind in KINDS if place is not by_static_method or kind not in NOT_STATIC]


def made(place, kind):
    thing = KINDS[kind]()
    torch.manual_seed(0)
    return place(thing, call if kind in CALLED else hold)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_trains_as_without(place):
    def train(attached):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(made(place, kind) for kind in kinds(place)))
        session = attach(model, OffloadConfig(tier="auto", memory_budget="1GiB")) if attached else None
        torch.manual_seed(1)
        for _ in range(2):
            model(torch.ones(3, WIDTH)).sum().backward()
            if session is not None:
                session.end_step()
        if session is not None:
            assert session.planned is not None
            session.detach()
        return [parameter.grad for parameter in model.parameters()]

    plain = train(False)
    assert any(gradient.any() for gradient in plain)
    for one, other in zip(plain, train(True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_stays_the_same_for_a_look(place):
    """Nothing but what cannot be looked into keeps a block from being recomputed."""
    changed = set()
    for kind in kinds(place):
        block = made(place, kind)
        name = changed_name(*(state_of(block, values=True) for _ in range(2)))
        assert name in ("", UNKNOWN)
        changed |= {kind} if name else set()
    assert changed <= {*RAISING, *TORCHSCRIPT}
    assert changed >= set(TORCHSCRIPT)
