"""How much memory training takes above what weights, gradients and optimizer need, and how long a step takes.

What is reported is a difference: the peak while training, minus the level of a process that holds weights, gradients
and optimizer state and has freed everything else. That level exists at no moment of an ordinary run, since gradients and
optimizer state appear during the first step: it is the level before training, with the bytes of those added.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_offload.integrations.two_losses import mezo_of
from hf_offload.tensors import nbytes_of
from hf_offload.training.gauges import Gauge, choose_gauge

SAMPLE_PERIOD_S = 0.01
MOST_SAMPLES = 20_000


@dataclasses.dataclass
class MemoryRecord:
    """Bytes and seconds of one run; times count from the moment the baseline was read."""

    device: str
    baseline_bytes: int = 0
    peak_bytes: int = 0
    peak_source: str = ""
    step_peak_bytes: list[int] = dataclasses.field(default_factory=list)
    step_start_s: list[float] = dataclasses.field(default_factory=list)
    step_end_s: list[float] = dataclasses.field(default_factory=list)
    baseline_in_use_bytes: int | None = None
    """What the allocator has handed out and not got back; ``None`` where the allocator does not tell."""
    peak_in_use_bytes: int | None = None
    """Sampled every 10 ms, so a lower bound."""
    timeline_s: list[float] = dataclasses.field(default_factory=list)
    timeline_bytes: list[int] = dataclasses.field(default_factory=list)
    timeline_in_use_bytes: list[int] | None = None


class MemoryMeter(TrainerCallback):
    """Measures memory and step times of a Trainer; add it with :meth:`install`.

    Afterwards ``record`` holds the result. Losses, gradients and weights are the same bits with and without it.
    """

    def __init__(self) -> None:
        self.record: MemoryRecord | None = None
        self._gauge: Gauge | None = None
        self._sampler: _Sampler | None = None
        self._begin_s = 0.0
        self._optimizer: Any = None
        self._gradient_bytes = self._state_bytes = 0

    def install(self, trainer: Trainer) -> None:
        """Start measuring before, and stop after, what other callbacks do at the same event.

        What another callback sets up for training is then part of what training takes.
        """
        trainer.callback_handler.callbacks.insert(0, _First(self))
        trainer.add_callback(self)

    def on_train_begin(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        if self.record is not None:
            return
        gauge = choose_gauge(args.device)
        gauge.settle()
        self.record = MemoryRecord(device=str(args.device), peak_source=gauge.peak_source)
        self.record.baseline_bytes, self.record.baseline_in_use_bytes = gauge.level(), gauge.in_use()
        self._optimizer = kwargs.get("optimizer")
        self._gradient_bytes = _missing_gradients(kwargs["model"], self._optimizer)
        self._state_bytes = _state_bytes(self._optimizer)
        gauge.reset_peak()
        self._gauge = gauge
        self._begin_s = time.perf_counter()
        self._sampler = _Sampler(gauge.level, gauge.in_use, self._begin_s)
        self._sampler.start()

    def on_step_begin(self, *_: Any, **_kwargs: Any) -> None:
        if self.record is None or self._gauge is None or len(self.record.step_start_s) > len(self.record.step_end_s):
            return
        self._read_peak(self.record, self._gauge)
        self._gauge.reset_peak()
        self._gauge.synchronize()
        self.record.step_start_s.append(time.perf_counter() - self._begin_s)

    def on_step_end(self, *_: Any, **_kwargs: Any) -> None:
        if self.record is None or self._gauge is None:
            return
        self._gauge.synchronize()
        self.record.step_end_s.append(time.perf_counter() - self._begin_s)
        self.record.step_peak_bytes.append(self._read_peak(self.record, self._gauge))

    def on_train_end(self, *_: Any, **_kwargs: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """End the measurement; also needed after an exception, for which Trainer calls no callback."""
        if self.record is None or self._gauge is None or self._sampler is None:
            return
        self._sampler.stop()
        self._add_to_baseline(self.record, self._gradient_bytes + _state_bytes(self._optimizer) - self._state_bytes)
        self._optimizer = None
        self._read_peak(self.record, self._gauge)
        self.record.timeline_s, self.record.timeline_bytes = self._sampler.times_s, self._sampler.bytes
        if self.record.baseline_in_use_bytes is not None:
            self.record.timeline_in_use_bytes = self._sampler.in_use_bytes
            self.record.peak_in_use_bytes = max(self._sampler.in_use_bytes, default=self.record.baseline_in_use_bytes)
        # A sample can never exceed an exact peak by more than what was read in the same instant.
        sampled = self.record.peak_source.startswith("sampled")
        seen = self._sampler.bytes if sampled else self.record.step_peak_bytes
        self.record.peak_bytes = max([self.record.peak_bytes, *seen])
        self._gauge = self._sampler = None

    @staticmethod
    def _add_to_baseline(record: MemoryRecord, nbytes: int) -> None:
        record.baseline_bytes += nbytes
        if record.baseline_in_use_bytes is not None:
            record.baseline_in_use_bytes += nbytes

    @property
    def step_times_s(self) -> list[float]:
        """Time of each finished step, from its first micro-batch to after its optimizer step."""
        if self.record is None:
            return []
        return [end - start for start, end in zip(self.record.step_start_s, self.record.step_end_s, strict=False)]

    @staticmethod
    def _read_peak(record: MemoryRecord, gauge: Gauge) -> int:
        peak = gauge.peak()
        record.peak_bytes = max(record.peak_bytes, peak)
        return peak


class _First(TrainerCallback):
    """Passes the two opening events on, from the first place in the list of callbacks."""

    def __init__(self, meter: MemoryMeter):
        self.on_train_begin = meter.on_train_begin  # type: ignore[method-assign]
        self.on_step_begin = meter.on_step_begin  # type: ignore[method-assign]


def _missing_gradients(model: torch.nn.Module, optimizer: Any) -> int:
    """Bytes of the gradients that there will be and are not yet."""
    if mezo_of(optimizer) is not None:  # there are none
        return 0
    return sum(nbytes_of(one) for one in model.parameters() if one.requires_grad and one.grad is None)


def _state_bytes(optimizer: Any) -> int:
    """Bytes of an optimizer's state, wherever they are."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    states = tree_leaves(list(getattr(optimizer, "state", {}).values()))
    return sum(nbytes_of(one) for one in states if isinstance(one, torch.Tensor))


class _Sampler:
    """Reads levels every 10 ms in a thread of its own; a long run keeps the maxima of ever longer intervals."""

    def __init__(self, level: Callable[[], int], in_use: Callable[[], int | None], begin_s: float):
        self.times_s: list[float] = []
        self.bytes: list[int] = []
        self.in_use_bytes: list[int] = []
        self._level = level
        self._read_in_use = in_use
        self._begin_s = begin_s
        self._period_s = SAMPLE_PERIOD_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_offload memory sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        highest = most_in_use = 0
        due_s = time.perf_counter()
        while not self._stop.wait(SAMPLE_PERIOD_S):
            now_s = time.perf_counter()
            highest = max(highest, self._level())
            most_in_use = max(most_in_use, self._read_in_use() or 0)
            if now_s < due_s:
                continue
            self.times_s.append(now_s - self._begin_s)
            self.bytes.append(highest)
            self.in_use_bytes.append(most_in_use)
            highest, most_in_use, due_s = 0, 0, now_s + self._period_s - SAMPLE_PERIOD_S / 2
            if len(self.bytes) >= MOST_SAMPLES:
                self.times_s = self.times_s[1::2]
                self.bytes = _pairwise_max(self.bytes)
                self.in_use_bytes = _pairwise_max(self.in_use_bytes)
                self._period_s *= 2


def _pairwise_max(values: list[int]) -> list[int]:
    return [max(pair) for pair in zip(values[::2], values[1::2], strict=True)]
