"""``python -m tests.fuzz.broken_steps --count 1000``: random trainings with a budget, whose forwards and backwards break off.

What a training does about an error or Ctrl-C is up to it: it repeats the step, leaves the batch out, goes on with the
gradients that are there, or holds the loss for a while. In all of them, losses and weights have to be those of the same
training in memory; where gradients are thrown away, and nothing is held, it has to stay within its budget, too, as it does
without what broke off. ``--seed N`` repeats one.
"""

import contextvars
import dataclasses
import functools
import gc
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_offload import OffloadConfig
from hf_offload.errors import OffloadPlanError
from hf_offload.session import OffloadSession, attach
from tests.helpers.heard import listening, named_later
from tests.helpers.seed_search import LeftOut, try_seeds

_WIDTH = 128
_LAYERS = 4
_STEPS = 9
_ENOUGH = 1 << 30
_PATIENCE = 6
_FIRST_STEPS = 4  # until state is there, and has been measured where it is then


class _BrokenOff(Exception):
    pass


class _Block(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.dropout(nn.functional.gelu(self.up(self.norm(hidden)))))


class Model(nn.Module):
    """Blocks of one kind, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(_LAYERS))
        self.head = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


@dataclasses.dataclass(frozen=True)
class Break:
    """Where a micro-batch breaks off, and what the training does then.

    Attributes:
        at: Of all moments at which a module's forward has ended, backward is about to begin, or a weight gets its gradient:
            the one at which ``error`` is raised.
        then: ``repeat`` the step, leave out the rest of it (``skip``), or leave out the micro-batch alone (``go on``).
    """

    at: int
    error: type[BaseException]
    then: str
    throws_gradients_away: bool
    holds_loss: bool

    @property
    def is_clean(self) -> bool:
        """Whether nothing of it stays."""
        return self.throws_gradients_away and not self.holds_loss


@dataclasses.dataclass(frozen=True)
class Program:
    """A training: rows of every micro-batch of each step, and what breaks off, by number of step and micro-batch; the
    optimizer, the share of the budget in what it takes in memory, whether it clips, and whether zeros take the place of
    gradients.
    """

    rows: tuple[tuple[int, ...], ...]
    breaks: dict[tuple[int, int], Break]
    kind: str
    share: float
    clips: bool = False
    zeros: bool = False

    @classmethod
    def random(cls, seed: int) -> "Program":
        """That of ``seed``."""
        rng = random.Random(seed)
        lengths = rng.choice(((64,), (64,), (96, 32, 64), (64, 128), (128, 64, 32)))
        micro_batches = rng.choice((1, 1, 2, 3))
        rows = tuple(tuple(rng.choice(lengths) for _ in range(micro_batches)) for _ in range(_STEPS))
        forward = sum(1 for module in Model().modules() if not isinstance(module, nn.ModuleList))
        moments = forward + 1 + sum(1 for _ in Model().parameters())
        is_clean = rng.random() < 0.6
        breaks = {}
        for step in range(_STEPS):
            if rng.random() < 0.4:
                at = rng.randrange(moments)
                breaks[step, rng.randrange(micro_batches)] = Break(
                    at=at,
                    error=rng.choice((_BrokenOff, KeyboardInterrupt)),
                    then=rng.choice(("repeat", "repeat", "skip", "go on")),
                    # Which of a layer's weights gets its gradient first is another one where recompute takes part.
                    throws_gradients_away=is_clean or at > forward or rng.random() < 0.5,
                    holds_loss=not is_clean and rng.random() < 0.5,
                )
        kind, share = rng.choice(("adamw", "sgd")), rng.choice((0.75, 0.6, 0.5, 0.4, 0.3))
        return cls(rows, breaks, kind, share, clips=rng.random() < 0.3, zeros=rng.random() < 0.3)


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


_moments: contextvars.ContextVar[tuple[Iterator[int], Break | None]] = contextvars.ContextVar("moments")


def _pass_moment(*args: Any) -> None:
    passed, stop = _moments.get()
    if stop is not None and next(passed) == stop.at:
        raise stop.error


def _leave_module(*args: Any) -> None:
    if torch._C._current_graph_task_id() == -1:  # else a recompute, which the other run has not
        _pass_moment()


class Training:
    """One run of a program; in memory where there is no ``config``."""

    def __init__(self, program: Program, config: OffloadConfig | None):
        self.program = program
        torch.manual_seed(0)
        self.model = Model()
        for module in self.model.modules():
            module.register_forward_hook(_leave_module)
        for parameter in self.model.parameters():
            parameter.register_hook(_pass_moment)
        self.optimizer = _optimizer(program.kind, self.model)
        self.session: OffloadSession | None = None
        if config is not None:
            self.session = attach(self.model, config)
            self.session.prepare_optimizer(self.optimizer)
            self.session.defer_updates()
        self.losses: list[float] = []
        self.steps = self.most = 0
        self._held: list[Tensor] = []

    def run(self) -> list[Tensor]:
        """The weights at the end."""
        for step in range(len(self.program.rows)):
            self._step(step)
            if self.session is not None and self.session.forecast is not None:
                forecast = self.session.forecast
                self.most = max(self.most, forecast.peak_bytes, forecast.measured_peak_bytes or 0)
        if self.session is not None:
            self.session.detach()
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def _step(self, step: int, repeated: bool = False) -> None:
        for number, rows in enumerate(self.program.rows[step]):
            stop = None if repeated else self.program.breaks.get((step, number))
            torch.manual_seed(100 * step + number)
            try:
                self._micro_batch(torch.randn(rows, _WIDTH), stop)
            except (_BrokenOff, KeyboardInterrupt):
                assert stop is not None, "nothing else breaks off"
                if stop.throws_gradients_away:
                    self._zero_grad()
                if stop.then == "repeat":
                    self._step(step, repeated=True)
                if stop.then != "go on":
                    return
        if self.program.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self._zero_grad()
        self._held.clear()
        self.steps += 1
        if self.session is not None:
            self.session.end_step()

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.program.zeros)

    def _micro_batch(self, inputs: Tensor, stop: Break | None) -> None:
        _moments.set((itertools.count(), stop))
        loss = self.model(inputs)
        if stop is not None and stop.holds_loss:
            self._held.append(loss)
        _pass_moment()
        loss.backward()
        self.losses.append(loss.item())


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hf_offload-broken-steps-")


def _config(budget: int) -> OffloadConfig:
    return OffloadConfig(tier="auto", memory_budget=budget, directory=_directory().name, min_bytes=4096)


@functools.cache
def _in_memory(rows: tuple[tuple[int, ...], ...], kind: str) -> int:
    """What a training takes with everything in memory."""
    training = Training(Program(rows, {}, kind, 1.0), _config(_ENOUGH))
    training.run()
    return training.most


def run(seed: int) -> list[str]:
    """What went wrong with the program of ``seed``: nothing, as a rule."""
    program = Program.random(seed)
    expected = Training(program, None)
    weights = expected.run()
    plain = dataclasses.replace(program, breaks={})
    budget = int(program.share * _in_memory(program.rows, program.kind))
    without = _within(plain, budget)
    if isinstance(without, str):
        return [f"without what breaks off, {without}"]
    found = _within(program, without.budget)
    # With zeros, a step is taken of what goes on, before the next forward lets go of what broke off.
    is_clean = all(one.is_clean and not (program.zeros and one.then == "go on") for one in program.breaks.values())
    if isinstance(found, str):
        return [found if is_clean else LeftOut("what is held takes more than the budget")]
    for one in (without, found) if is_clean else (without,):
        if one.over:
            return [f"{'with' if one is found else 'without'} what breaks off, {one.budget} bytes: {one.over[0]}"]
    if found.losses != expected.losses or not all(map(torch.equal, weights, found.weights)):
        return ["losses or weights differ"]
    return []


@dataclasses.dataclass
class _Found:
    budget: int
    losses: list[float]
    weights: list[Tensor]
    over: list[str]  # said of steps that were to be within the budget: the first one of its kind cannot be known to be


def _within(program: Program, budget: int) -> _Found | str:
    """What the program does with a budget: that, or one that a refusal or a warning names; else what went wrong."""
    for _ in range(_PATIENCE):
        training = Training(program, _config(budget))
        with listening() as heard:
            try:
                weights = training.run()
            except OffloadPlanError as error:
                if training.steps > _FIRST_STEPS:
                    return f"refused in step {training.steps} with {budget} bytes: {error}"
                budget = int(1.02 * max(budget, error.smallest_bytes or 0))
                continue
        named = named_later(heard)
        if named is not None:
            budget = int(1.02 * max(budget, named))
            continue
        return _Found(budget, training.losses, weights, [one for one in heard if one.startswith("A step took")])
    return f"refused with {budget} bytes, which refusals named"


if __name__ == "__main__":
    gc.freeze()
    sys.exit(try_seeds(run, "tests.fuzz.broken_steps"))
