"""Optimizers that keep values of their own, or draw random numbers: trying them changes nothing."""

import functools
import itertools
import random
import types
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from hf_offload import OffloadConfig, attach
from hf_offload.errors import OffloadConfigError
from hf_offload.optimizers.streamed import streaming_of
from hf_offload.optimizers.streamed.trial import state_per_weight, traits_of
from tests.helpers.told import told

GLOBAL = {"steps": 0}


class Counter:
    def __init__(self):
        self.steps = 0


class Slotted:
    __slots__ = ("steps",)

    def __init__(self):
        self.steps = 0


def _add(holder, place):
    holder[place] += 1
    return holder[place]


def _add_to(counter):
    counter.steps += 1
    return counter.steps


def _append(holder):
    holder.append(1)
    return len(holder)


class Scaled(Optimizer):
    """Weights fall by the gradient times a number that ``draw`` returns, of what the optimizer holds."""

    steps = 0

    def __init__(self, params, make, draw, **options):
        super().__init__(params, {"lr": 1e-2, **options})
        self.held = make()
        self.draw = draw

    @torch.no_grad()
    def step(self, closure=None):
        factor = float(self.draw(self)) % 7
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * (1 + factor / 10))


def _in_enclosing_function():
    held = [0]

    class Enclosed(Scaled):
        def step(self, closure=None):
            held[0] += 1
            self.held["factor"] = held[0]
            super().step()

    return Enclosed, held


class Late(Scaled):
    """Counts where no update of the first steps shows it."""

    def step(self, closure=None):
        self.held["steps"] += 1
        if self.held["steps"] % 1000 == 0:
            self.param_groups[0]["lr"] *= 0.5
        super().step()


class OfItsClass(Scaled):
    def step(self, closure=None):
        OfItsClass.steps += 1
        super().step()


class OfItsModule(Scaled):
    def step(self, closure=None):
        GLOBAL["steps"] += 1
        super().step()


class OfItsGroups(Scaled):
    def step(self, closure=None):
        for group in self.param_groups:
            group["history"].append(len(group["history"]))
        super().step()


class Wrapping(Scaled):
    """Another optimizer steps."""

    def step(self, closure=None):
        self.held.step()


def _closure():
    count = itertools.count()
    return lambda: next(count)


HELD = {
    "dictionary": (lambda: {"n": 0}, lambda o: _add(o.held, "n")),
    "nested dictionary": (lambda: {"n": [{"n": 0}]}, lambda o: _add(o.held["n"][0], "n")),
    "list": (list, lambda o: _append(o.held)),
    "deque": (deque, lambda o: _append(o.held)),
    "tuple of lists": (lambda: ([0], [0]), lambda o: _add(o.held[1], 0)),
    "object": (Counter, lambda o: _add_to(o.held)),
    "namespace": (lambda: types.SimpleNamespace(steps=0), lambda o: _add_to(o.held)),
    "object with slots": (Slotted, lambda o: _add_to(o.held)),
    "array": (lambda: np.zeros(2), lambda o: _add(o.held, 0)),
    "tensor in a dictionary": (lambda: {"n": torch.zeros(())}, lambda o: o.held["n"].add_(1)),
    "iterator": (itertools.count, lambda o: next(o.held)),
    "closure": (_closure, lambda o: o.held()),
    "partial": (lambda: functools.partial(_append, []), lambda o: o.held()),
    "method": (lambda: functools.partial(_add_to, Counter()).__call__, lambda o: o.held()),
    "generator of PyTorch": (lambda: torch.Generator().manual_seed(3), lambda o: torch.rand((), generator=o.held)),
    "generator of Python": (lambda: random.Random(3), lambda o: o.held.random()),
    "generator of NumPy": (lambda: np.random.default_rng(3), lambda o: o.held.random()),
    "former generator of NumPy": (lambda: np.random.RandomState(3), lambda o: o.held.random()),
    "PyTorch's random numbers": (dict, lambda o: torch.rand(())),
    "Python's random numbers": (dict, lambda o: random.random()),
    "NumPy's random numbers": (dict, lambda o: np.random.random()),  # noqa: NPY002  what users have
    "random numbers without an effect": (dict, lambda o: 0 * random.random()),
}


def _optimizer(kind, params):
    """An optimizer, and what of it is outside."""
    if kind in HELD:
        return Scaled(params, *HELD[kind]), None
    if kind == "late":
        return Late(params, lambda: {"steps": 0}, lambda o: 0), None
    if kind == "class":
        return OfItsClass(params, dict, lambda o: OfItsClass.steps), OfItsClass
    if kind == "module":
        return OfItsModule(params, dict, lambda o: GLOBAL["steps"]), GLOBAL
    if kind == "group":
        return OfItsGroups(params, dict, lambda o: len(o.param_groups[0]["history"]), history=[]), None
    if kind == "wrapped":
        return Wrapping(params, lambda: torch.optim.AdamW(params, lr=1e-2), None), None
    enclosed, held = _in_enclosing_function()
    return enclosed(params, lambda: {"factor": 0}, lambda o: o.held["factor"]), held


KINDS = [*HELD, "late", "class", "module", "group", "wrapped", "enclosing"]


def _everything(optimizer, outside):
    own = {name: value for name, value in vars(optimizer).items() if name != "param_groups"}
    held = own.get("held")
    if isinstance(held, Optimizer):
        own["held"] = [held.param_groups, dict(held.state)]
    steps = OfItsClass.steps
    return told([own, optimizer.param_groups, outside if not isinstance(outside, type) else steps, *_random_states()])


def _random_states():
    return [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]  # noqa: NPY002  what users have


@pytest.mark.parametrize("kind", KINDS)
def test_trying_an_optimizer_changes_nothing_and_refuses_what_counts_for_all(kind):
    params = [nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))]
    for one in params:
        one.grad = torch.ones_like(one)
    optimizer, outside = _optimizer(kind, params)
    before = _everything(optimizer, outside)

    with pytest.raises(OffloadConfigError, match=r"cannot be streamed|which decides whether its state can be streamed"):
        traits_of(optimizer, type(optimizer))
    state_per_weight(optimizer)

    assert _everything(optimizer, outside) == before


@pytest.mark.parametrize("kind", ["generator of PyTorch", "wrapped"])
def test_a_planned_training_has_the_bits_of_one_in_memory(kind, tmp_path):
    def train(config):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  what users draw from
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
        optimizer, _ = _optimizer(kind, list(model.parameters()))
        session = None if config is None else attach(model, config)
        if session is not None:
            session.prepare_optimizer(optimizer)
        for _ in range(3):
            model(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                session.end_step()
        assert streaming_of(optimizer) is None
        weights = [p.detach().clone() for p in model.parameters()]
        if session is not None:
            session.detach()
        return told([weights, *_random_states()])

    settings = OffloadConfig(tier="auto", memory_budget="6MiB", min_bytes="1KiB", directory=tmp_path)
    assert train(settings) == train(None)


def test_where_auto_may_choose_an_optimizer_that_cannot_be_streamed_stays_in_memory(tmp_path, caplog):
    model = nn.Linear(512, 512)
    session = attach(
        model, OffloadConfig(tier="none", optimizer="auto", memory_budget="1MiB", min_bytes="1KiB", directory=tmp_path)
    )
    optimizer, _ = _optimizer("generator of PyTorch", list(model.parameters()))
    session.prepare_optimizer(optimizer)
    assert streaming_of(optimizer) is None
    assert "stay in memory" in caplog.text
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    session.detach()
