"""What a step of each memory mode costs: bytes alive, and time against AdamW, measured in turns."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.measure import now_s, peak_bytes
from benchmarks.modes.runs import BATCH, Text, state_bytes

PEAK_STEPS = 5
PERIODS = 3


class Stepper:
    """The model and the optimizer of a Trainer, stepped by hand at a constant rate."""

    def __init__(self, trainer: Any, text: Text):
        self.model = trainer.model.train()
        self.optimizer = trainer.create_optimizer()
        self._limit = trainer.args.max_grad_norm
        self._text = text
        self._next = 0
        self.device = next(self.model.parameters()).device

    def step(self) -> None:
        """Forward, backward, clipping, update."""
        rows = [(self._next + row) % len(self._text) for row in range(BATCH)]
        self._next += BATCH
        tokens = self._text.train[rows].to(self.device)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], self._limit)
        self.optimizer.step()
        self.model.zero_grad()

    def peak_bytes(self) -> int:
        """Most bytes alive in a few steps after the first: weights, state, gradients, activations, whatever a step makes.

        A block-wise mode is in its first turn then.
        """

        def several() -> None:
            for _ in range(PEAK_STEPS):
                self.step()

        self.step()
        kept = sum(p.nbytes for p in self.model.parameters()) + state_bytes(self.optimizer)
        return kept + peak_bytes(several, self.device)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of each step by mode; steps at the same place were made right after each other. ``period`` is in steps."""

    period: int
    seconds: Mapping[str, Sequence[float]]

    def ratio(self, mode: str, to: str) -> float:
        """Time of a step of ``mode`` over that of ``to``: of the means over each period, the median of all periods.

        A period holds as many refreshes and turns as any other, so their cost is spread over the steps they serve.
        """
        ours, theirs = self.seconds[mode], self.seconds[to]
        starts = range(0, len(ours) - self.period + 1, self.period)
        return statistics.median(
            sum(ours[start : start + self.period]) / sum(theirs[start : start + self.period]) for start in starts
        )


def step_times(steppers: Mapping[str, Stepper], period: int, periods: int = PERIODS) -> Times:
    """Let all modes make a step in turns, each round another one first. The first step of all is not counted."""
    names = list(steppers)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for stepper in steppers.values():
        stepper.step()
    for number in range(period * periods):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            stepper = steppers[name]
            began = now_s(stepper.device)
            stepper.step()
            seconds[name].append(now_s(stepper.device) - began)
    return Times(period, seconds)
