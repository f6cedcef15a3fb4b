"""The trainings of one family, one after the other in a process whose live bytes are counted:
``python -m benchmarks.budgets.runs JSON`` prints a line of JSON for each.
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
_SETTLED = 4
"""Steps at the end of a run, of which the median counts."""
_STEPS = 20
"""Of ``auto``, which plans in the first dozen, and of the run in memory."""
_PAIRED_STEPS = 12
"""Of a simple way that takes turns with it."""
_FEW_STEPS = 3 + _SETTLED
"""Of a simple way that may not be among the fastest."""

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


def run(family: Family, job: Job, meter: Meter) -> dict[str, Any]:
    """Train, and say what it took; a refusal is a result."""
    gc.collect()
    before = meter.live()
    model: Any = build(family.name, family.layers, family.width, family.tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(1)
    session = attach(model, _settings(job, model, family.directory))
    peaks, seconds, losses = [], [], []
    predicted: tuple[int | None, float | None] = None, None
    refused: str | None = None
    least: int | None = None
    try:
        session.prepare_optimizer(optimizer)
        for step in range(_steps(job)):
            inputs = batch(family.rows, family.tokens, seed=step)
            meter.peak()
            begin = time.perf_counter()
            with session.scope():
                loss = model(**inputs).loss
                loss.backward()
            session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            session.end_step()
            seconds.append(time.perf_counter() - begin)
            peaks.append(meter.peak() - before)
            losses.append(loss.item())
            del loss, inputs
        if session.forecast is not None:
            predicted = session.forecast.peak_bytes, session.forecast.step_s
    except OffloadPlanError as error:
        refused, least = str(error), error.smallest_bytes
    result = {
        "peaks": peaks,
        "seconds": seconds,
        "losses": losses,
        "step_s": statistics.median(seconds[-_SETTLED:]) if seconds else None,
        "predicted_peak_bytes": predicted[0],
        "predicted_step_s": predicted[1],
        "refused": refused,
        "least_bytes": least,
        "placed": None if session.plan is None else session.plan.reason,
    }
    held = session.residency is not None, session.streams_optimizer
    session.detach()
    return result | {
        "weights_leave": held[0],
        "state_leaves": held[1],
        "weights_sha256": None if refused else digest_of(model.parameters()),
    }


def _steps(job: Job) -> int:
    if job.way in (AUTO, IN_MEMORY):
        return _STEPS
    return _FEW_STEPS if job.budget_bytes is None else _PAIRED_STEPS


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
        for job in asked["jobs"]:
            result = run(family, Job(**job), meter)
            sys.stdout.write(json.dumps(job | result) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
