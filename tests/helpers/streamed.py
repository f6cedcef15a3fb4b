"""Runs with an optimizer in memory or streamed, whose logs are compared."""

import functools
import random
from typing import Any

import torch
from torch import nn

from hf_offload import OffloadConfig
from hf_offload.session import OffloadSession, attach
from hf_offload.state import setting
from hf_offload.state.step import Streaming

PART_BYTES = 4 * 4096 * 2
"""Small enough for matrices of tests to step in several parts."""


def stream_in_parts(monkeypatch) -> None:
    """Let parameters of more than :data:`PART_BYTES` step in parts."""
    monkeypatch.setattr(setting, "part_bytes", lambda _: PART_BYTES)


def let_state_come_and_go(monkeypatch, seed: int) -> list[int]:
    """After each step, let the state of some parameters stay, drawn at random. Returns how
    many stayed after each.
    """
    draw, counts = random.Random(seed), []

    def and_then(method: Any) -> Any:
        @functools.wraps(method)
        def changing(self: Streaming, *args: Any) -> None:
            method(self, *args)
            staying = [parameter for parameter in self.parameters() if draw.random() < 0.5]
            self.let_stay(staying)
            counts.append(len(staying))

        return changing

    monkeypatch.setattr(Run, "state_comes_and_goes", True)
    monkeypatch.setattr(Streaming, "step", and_then(Streaming.step))
    return counts


class Run:
    """A run on ``place``: ``none``, ``ram`` or ``ssd``. What it logs is compared with the log of another one."""

    state_comes_and_goes = False
    """Whether weights are not streamed for some of the time."""

    def __init__(self, place: str, directory: Any, *, defers: bool = True, **settings: Any):
        self.place = place
        self.defers = defers
        self.settings = {"tier": "none", "min_bytes": 256, **settings}
        if place == "ssd":
            self.settings["directory"] = directory
        self.session: OffloadSession | None = None
        self.logged: list[Any] = []

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer, streamed unless it is to stay in memory."""
        if self.place != "none":
            if self.session is None or self.session.model is not model:
                self.session = attach(model, OffloadConfig(optimizer=self.place, **self.settings))
            assert self.session.prepare_optimizer(optimizer) is optimizer
            if self.defers:
                self.session.defer_updates()
        return optimizer

    def clip(self, model: nn.Module, max_norm: float, **options: Any) -> torch.Tensor:
        """The norm of all gradients, before it was clipped."""
        if self.session is None:
            return nn.utils.clip_grad_norm_(list(model.parameters()), max_norm, **options)
        return self.session.clip_grad_norm_(max_norm, **options)

    def log(self, *values: Any) -> None:
        """Copies of these values."""
        self.logged += [copied(value) for value in values]

    def log_all(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """All weights, and the whole state of the optimizer."""
        self.log(model.state_dict(), optimizer.state_dict())


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list | tuple) else value


def same(one: Any, other: Any) -> bool:
    """Whether two logs are the same to the bit."""
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def mlp(width: int = 96, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(width, 128, bias), nn.GELU(), nn.Linear(128, 160, bias), nn.GELU(), nn.Linear(160, width, bias)]
    return nn.Sequential(*layers)


def batch(number: int, width: int = 96) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(number))


def train(run, model, optimizer, steps=3, first=0, loss=None, before=None, after=None, zero=True) -> None:
    """Steps that log their losses; ``before`` and ``after`` a step, with its number."""
    for number in range(first, first + steps):
        inputs = batch(number)
        value = model(inputs).square().mean() if loss is None else loss(model, inputs)
        run.log(value)
        value.backward()
        if before is not None:
            before(number)
        optimizer.step()
        if after is not None:
            after(number)
        if zero:
            optimizer.zero_grad()
