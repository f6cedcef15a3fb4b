"""What a saved tensor costs in Python, without the copies.

The engine's own :meth:`~hf_offload.engine.hooks.Engine.pack` and :meth:`~hf_offload.engine.hooks.Engine.unpack` are called
directly, over a tier that is done at once: an operation's forward and backward take longer, and vary more, than what is
to be found. What autograd itself adds to call any hooks is a row of its own, measured through real operations with and
without hooks that do nothing; a saved tensor costs both. Where there is an accelerator, streams, events and copies that are
queued have a row.
"""

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from hf_offload.engine.device import CpuDevice, open_device
from hf_offload.engine.hooks import Engine
from hf_offload.plan.plan import Placement, Plan
from hf_offload.planning.machine import default_device
from hf_offload.storage.ram import RamTier
from hf_offload.storage.tier import Slot, Tier, TierStats

_SIDE = 64  # of square float32 tensors: large enough to be worth a record, small enough to stay in the CPU's cache


@dataclasses.dataclass(frozen=True)
class Quartiles:
    """Microseconds per tensor: the median of the repetitions and the quartiles around it."""

    median_us: float
    low_us: float
    high_us: float

    @classmethod
    def of(cls, samples_us: list[float]) -> "Quartiles":
        """From one sample per repetition."""
        low, median, high = statistics.quantiles(samples_us, n=4, method="inclusive")
        return cls(median, low, high)


@dataclasses.dataclass(frozen=True)
class Cost:
    """One kind of saved tensor."""

    name: str
    meaning: str
    pack: Quartiles
    unpack_and_free: Quartiles
    total: Quartiles


_Sample = tuple[float, float]
"""Seconds for packing, and for unpacking and freeing."""


class InstantTier(Tier):
    """Keeps no bytes: what is written is forgotten and what is read is left as it was, both before the call returns."""

    name = "instant"

    def __init__(self) -> None:
        self.stats = TierStats()

    def reserve(self, nbytes: int, place: str | None = None) -> Slot:
        return Slot(nbytes)

    def write(self, slot: Slot, buffer: torch.Tensor, begin: int = 0) -> "Future[None]":
        return _done()

    def read(self, slot: Slot, into: torch.Tensor, urgent: bool = False, begin: int = 0) -> "Future[None]":
        return _done()

    def free(self, slot: Slot) -> None:
        pass

    def close(self) -> None:
        pass


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future


def measure_overhead(
    tensors: int, repetitions: int, on_repetition: Callable[[], None] = lambda: None
) -> tuple[Cost, ...]:
    """Every kind of saved tensor in turn, ``repetitions`` times over; ``tensors`` of each at a time.

    The cycle collector rests while the clock runs. ``on_repetition`` is called after each repetition.
    """
    kinds: dict[str, tuple[str, Callable[[int], _Sample]]] = {
        "hooks alone": ("what autograd adds for hooks that do nothing", _hooks_alone),
        "kept": ("smaller than min_bytes", _kept),
        "weight": ("a view of a Parameter, as nn.Linear saves it", _weight_view),
        "offloaded": ("stored, and loaded again", _offloaded),
        "deduplicated": ("a second view of what is stored", _deduplicated),
    }
    if torch.accelerator.is_available():
        kinds["from the device"] = ("stored from it in pinned RAM, and loaded again: its host's time", _from_the_device)
    samples: dict[str, list[_Sample]] = {name: [] for name in kinds}
    for _, measure in kinds.values():
        measure(tensors)  # the first calls of anything are slow
    for _ in range(repetitions):
        for name, (_, measure) in kinds.items():
            with _quiet_collector():
                samples[name].append(measure(tensors))
        on_repetition()
    costs = []
    for name, (meaning, _) in kinds.items():
        in_us = [(1e6 * pack_s / tensors, 1e6 * unpack_s / tensors) for pack_s, unpack_s in samples[name]]
        parts = ([pack for pack, _ in in_us], [unpack for _, unpack in in_us], [sum(one) for one in in_us])
        pack, unpack, total = map(Quartiles.of, parts)
        costs.append(Cost(name, meaning, pack, unpack, total))
    return tuple(costs)


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _plan(min_bytes: int = 0) -> Plan:
    return Plan(
        default=Placement.SSD,
        min_bytes=min_bytes,
        read_ahead_bytes=None,
        write_behind_bytes=1 << 40,
        reason="measuring",
    )


def _engine(model: nn.Module | None = None, min_bytes: int = 0) -> Engine:
    return Engine(model or nn.Identity(), _plan(min_bytes), CpuDevice(), InstantTier())


def _activations(count: int, device: torch.device | None = None) -> list[torch.Tensor]:
    return [torch.ones(_SIDE, _SIDE, device=device) for _ in range(count)]


def _pack_and_unpack(engine: Engine, tensors: list[torch.Tensor], first: list[torch.Tensor] | None = None) -> _Sample:
    """Every tensor goes as soon as it is packed, as in forward, and every handle as soon as it is unpacked.

    Those of ``first`` are packed before the clock runs, and live until it has stopped.
    """
    alive = [engine.pack(tensor) for tensor in first or ()]
    if first is not None:
        first.clear()
        engine.operation_ended()  # else they were stored while the clock runs
    handles: list[Any] = []
    start = time.perf_counter()
    while tensors:
        handles.append(engine.pack(tensors.pop()))
    packed = time.perf_counter()
    while handles:
        engine.unpack(handles.pop())
    unpacked = time.perf_counter()
    alive.clear()
    engine.close()
    return packed - start, unpacked - packed


def _kept(count: int) -> _Sample:
    return _pack_and_unpack(_engine(min_bytes=1 << 40), _activations(count))


def _weight_view(count: int) -> _Sample:
    model = nn.ParameterList(_activations(count))
    return _pack_and_unpack(_engine(model), [parameter.t() for parameter in model])


def _offloaded(count: int) -> _Sample:
    return _pack_and_unpack(_engine(), _activations(count))


def _from_the_device(count: int) -> _Sample:
    device = default_device()
    engine = Engine(nn.Identity(), _plan(), open_device(device), RamTier(pinned=True))
    # One more, packed before: so that pinned memory is there, and what is measured is not the system's share.
    return _pack_and_unpack(engine, _activations(count, device), _activations(1, device))


def _deduplicated(count: int) -> _Sample:
    """The second of two handles of the same bytes: the first is packed and unpacked off the clock, and lives longer."""
    engine = _engine()
    tensors = _activations(count)
    firsts = [engine.pack(tensor) for tensor in tensors]
    views = [tensor.view(-1) for tensor in tensors]
    tensors.clear()
    handles: list[Any] = []
    start = time.perf_counter()
    while views:
        handles.append(engine.pack(views.pop()))
    pack_s = time.perf_counter() - start
    unpack_s = 0.0
    handles.reverse()
    while handles:
        engine.unpack(firsts[-1])
        start = time.perf_counter()
        engine.unpack(handles.pop())
        unpack_s += time.perf_counter() - start
        firsts.pop()
    engine.close()
    return pack_s, unpack_s


def _hooks_alone(count: int) -> _Sample:
    plain = _operations(count, contextlib.nullcontext())
    hooked = _operations(count, torch.autograd.graph.saved_tensors_hooks(_same, _same))
    return hooked[0] - plain[0], hooked[1] - plain[1]


def _same(value: Any) -> Any:
    return value


def _operations(count: int, hooks: contextlib.AbstractContextManager[object]) -> _Sample:
    """Operations that save one tensor each, under ``hooks``; then each is asked for what it saved, and goes."""
    operands = [torch.ones(1, requires_grad=True) * 1.0 for _ in range(count)]
    with hooks:
        start = time.perf_counter()
        results = [torch.sin(operand) for operand in operands]
        forward_s = time.perf_counter() - start
    start = time.perf_counter()
    while results:
        node: Any = results.pop().grad_fn
        node._saved_self  # noqa: B018  reading the attribute unpacks, as backward does
    del node
    return forward_s, time.perf_counter() - start
