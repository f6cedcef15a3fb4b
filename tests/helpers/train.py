"""Trains small models in memory or offloaded, and compares the logs of both runs bit by bit."""

import functools
import io
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hf_offload import OffloadConfig
from hf_offload.session import OffloadSession, attach
from hf_offload.state import setting
from hf_offload.state.optimizer import streaming_of
from hf_offload.state.step import Streaming
from hf_offload.storage.store import Store
from tests.helpers.parked import let_weights_leave

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
    """A run whose log is compared with that of another one.

    ``place`` of gradients and the optimizer's state is ``none``, ``ram`` or ``ssd``. With ``params``, weights leave memory
    after each use. ``defers`` lets updates of weights wait for the next forward, ``in_backward`` makes them in backward.
    """

    state_comes_and_goes = False
    """Whether weights are not streamed for some of the time."""

    def __init__(self, place: str, directory: Any, *, defers: bool = True, in_backward: bool = False, **settings: Any):
        self.place = place
        self.defers = defers
        self.settings = {"tier": "none", "min_bytes": 256, "params": "none", **settings}
        if in_backward:
            self.settings["update_in_backward"] = True
        if "ssd" in (place, self.settings["params"]):
            self.settings["directory"] = directory
        self.offloads = (place, self.settings["params"]) != ("none", "none")
        self.sessions: list[OffloadSession] = []
        self.stores: list[Store] = []
        self.logged: list[Any] = []

    @property
    def session(self) -> OffloadSession | None:
        """That of the model that was attached last."""
        return self.sessions[-1] if self.sessions else None

    def attach(self, model: nn.Module) -> nn.Module:
        """The model, offloaded unless all of it is to stay in memory. Weights that it has got since leave memory, too."""
        if self.offloads and all(session.model is not model for session in self.sessions):
            session = attach(model, OffloadConfig(optimizer=self.place, **self.settings))
            if session.residency is not None:
                session.residency.limit_bytes = 1
                self.stores.append(session.residency.store)
            self.sessions.append(session)
        self.let_weights_leave()
        return model

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer, streamed unless it is to stay in memory."""
        self.attach(model)
        for session in self.sessions:
            if session.model is model:
                assert session.prepare_optimizer(optimizer) is optimizer
                if self.defers:
                    session.defer_updates()
        if (streaming := streaming_of(optimizer)) is not None:
            self.stores += [store for store in (streaming.state_store, streaming.gradient_store) if store is not None]
        return optimizer

    def let_weights_leave(self) -> None:
        """All weights leave memory, also those that were used just now."""
        for session in self.sessions:
            if session.residency is not None:
                let_weights_leave(session)

    def written_bytes(self) -> int:
        """Bytes of weights, gradients and state that were written to tiers."""
        return sum(store.tier.stats.written_bytes for store in self.stores)

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
    return next(differences(one, other), None) is None


def assert_same(found: Any, expected: Any) -> None:
    """As :func:`same`, and an error that says what is different."""
    assert list(differences(expected, found)) == []


def differences(one: Any, other: Any, where: str = "all") -> Iterator[str]:
    """Where two values are not the same to the bit."""
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        if not alike or not torch.equal(bits(one), bits(other)):
            yield where
    elif isinstance(one, dict):
        if not isinstance(other, dict) or one.keys() != other.keys():
            yield f"keys of {where}"
        else:
            for key in one:
                yield from differences(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        if not isinstance(other, list | tuple) or len(one) != len(other):
            yield f"length of {where}"
        else:
            for number, pair in enumerate(zip(one, other, strict=True)):
                yield from differences(*pair, f"{where}[{number}]")
    elif one != other:
        yield f"{where}: {one} or {other}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def mlp(width: int = 96, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(width, 128, bias), nn.GELU(), nn.Linear(128, 160, bias), nn.GELU(), nn.Linear(160, width, bias)]
    return nn.Sequential(*layers)


def batch(number: int, width: int = 96) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(number))


def adamw(run: Run, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW for all that is trained of a model, prepared."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return run.prepare(model, torch.optim.AdamW(trained, lr=1e-2, **options))


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


def take_steps(
    model: nn.Module, optimizer: Any, batches: Iterable[dict[str, torch.Tensor]], scheduler: Any = None
) -> list[float]:
    """A step for each batch of a model of transformers; the losses."""
    losses = []
    for inputs in batches:
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved_and_loaded(state: Any) -> Any:
    """What ``torch.load`` makes of it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
