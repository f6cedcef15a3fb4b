"""Trainings of one family in a process whose live bytes are counted: ``python -m benchmarks.budgets.runs JSON``.

It trains one job after the other and prints a line of JSON for each; or, ``in_turns``, one job, of which it takes so many
steps as each line of its input says and prints an empty line after them: its result comes when the input ends.
"""

import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.budgets.families import batch, build
from benchmarks.budgets.meter import Meter
from benchmarks.cells import digest_of
from hf_offload import OffloadConfig, attach
from hf_offload.errors import OffloadPlanError

IN_MEMORY = "memory"
"""The way that everything is compared with."""
AUTO = "auto"
TURNS = 8
"""Steps that ``auto`` and simple ways take in turns."""
_SETTLED = 4
"""Steps at the end of a run, of which the median counts."""
_STEPS = 20
"""Of the run in memory, and of ``auto``, which plans in the first dozen."""
_FIRST_STEPS = 3
"""Of a simple way, in which its files and buffers come."""

_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "": {"tier": "none"},
    "ssd": {"tier": "ssd"},
    "recompute": {"tier": "none"},
}
STATE: dict[str, dict[str, Any]] = {
    "": {"optimizer": "none", "params": "none"},
    "state ssd": {"optimizer": "ssd", "params": "none"},
    "weights ssd": {"optimizer": "none", "params": "ssd"},
    "state, weights ssd": {"optimizer": "ssd", "params": "ssd"},
}
"""Settings of what has weights, gradients and state where."""
SIMPLE = {
    ", ".join(filter(None, [one and f"activations {one}", other])) or IN_MEMORY: (one, other)
    for other in STATE
    for one in _ACTIVATIONS
}
"""Every simple way over kinds and tiers: its name, and where activations and the rest are."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One training: a simple way, or ``auto`` within ``budget_bytes``, or a simple way that takes turns with that."""

    way: str
    budget_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """What is trained, and how often."""

    name: str
    layers: int
    width: int
    rows: int
    tokens: int
    directory: str


class Training:
    """One training of a family. A refusal ends it, and is its result."""

    def __init__(self, family: Family, job: Job, meter: Meter):
        gc.collect()
        self._family, self._job, self._meter = family, job, meter
        self._before = meter.live()
        self._model: Any = build(family.name, family.layers, family.width, family.tokens)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True)
        torch.manual_seed(1)
        self._session = attach(self._model, _settings(job, self._model, family.directory))
        self._peaks: list[int] = []
        self._seconds: list[float] = []
        self._losses: list[float] = []
        self._refusal: OffloadPlanError | None = None
        try:
            self._session.prepare_optimizer(self._optimizer)
        except OffloadPlanError as error:
            self._refusal = error

    def train(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            if self._refusal is not None:
                return
            try:
                self._step()
            except OffloadPlanError as error:
                self._refusal = error

    def _step(self) -> None:
        session, family = self._session, self._family
        inputs = batch(family.rows, family.tokens, seed=len(self._seconds))
        self._meter.peak()
        begin = time.perf_counter()
        with session.scope():
            loss = self._model(**inputs).loss
            loss.backward()
        session.clip_grad_norm_(1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        session.end_step()
        self._seconds.append(time.perf_counter() - begin)
        self._peaks.append(self._meter.peak() - self._before)
        self._losses.append(loss.item())

    def result(self) -> dict[str, Any]:
        """What all of it took; the training is over."""
        session, refusal = self._session, self._refusal
        forecast = None if refusal is not None else session.forecast
        result = {
            "peaks": self._peaks,
            "seconds": self._seconds,
            "losses": self._losses,
            "step_s": statistics.median(self._seconds[-_SETTLED:]) if self._seconds else None,
            "predicted_peak_bytes": None if forecast is None else forecast.peak_bytes,
            "predicted_step_s": None if forecast is None else forecast.step_s,
            "refused": None if refusal is None else str(refusal),
            "least_bytes": None if refusal is None else refusal.smallest_bytes,
            "placed": None if session.plan is None else session.plan.reason,
            "weights_leave": session.residency is not None,
            "state_leaves": session.streams_optimizer,
        }
        session.detach()
        weights = None if refusal is not None else digest_of(self._model.parameters())
        return self._job.__dict__ | result | {"weights_sha256": weights}


def first_steps(job: Job) -> int:
    """Before those that it takes in turns with others, or that count."""
    return _STEPS - TURNS if job.way in (AUTO, IN_MEMORY) else _FIRST_STEPS


def _settings(job: Job, model: Any, directory: str) -> OffloadConfig:
    if job.way == AUTO:
        return OffloadConfig(tier="auto", memory_budget=job.budget_bytes, directory=directory)
    activations, state = SIMPLE[job.way]
    if activations == "recompute":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    places = {**_ACTIVATIONS[activations], **STATE[state]}
    return OffloadConfig(**places, directory=directory if "ssd" in places.values() else None)


def main() -> None:
    """Every job that is named in the argument."""
    asked = json.loads(sys.argv[1])
    meter = Meter()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=asked["directory"]) as folder:
        family = Family(**asked["family"], directory=folder)
        for job in (Job(**one) for one in asked["jobs"]):
            _say(json.dumps(_result_of(family, job, meter, asked["in_turns"])))


def _result_of(family: Family, job: Job, meter: Meter, in_turns: bool) -> dict[str, Any]:
    """Of a whole training, of which nothing is left when this returns: it would count among what was there before the next,
    and lessen the peaks of that when it goes.
    """
    training = Training(family, job, meter)
    if in_turns:
        for steps in sys.stdin:
            training.train(int(steps))
            _say("")
    else:
        training.train(first_steps(job) + (TURNS if job.way == IN_MEMORY else _SETTLED))
    return training.result()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
