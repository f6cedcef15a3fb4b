"""What a saved tensor costs in Python, without the copies.

The engine's own :meth:`~hf_offload.engine.hooks.Engine.pack` and :meth:`~hf_offload.engine.hooks.Engine.unpack` are called
directly, over a tier that is done at once: an operation's forward and backward take longer, and vary more, than what is
to be found. What autograd itself adds to call any hooks is a row of its own, measured through real operations with and
without hooks that do nothing; a saved tensor costs both. A tier's own share is not in these figures, except for what a slot
in RAM costs, which is a row, too. Where there is an accelerator, streams, events and copies that are queued have a row.

In a large model thousands of records are alive at a time: two rows measure among as many others, and should cost no more.
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
_OTHERS = 2000  # a forward of a large model saves about as many


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


@dataclasses.dataclass(frozen=True)
class _Sample:
    pack_s: float
    unpack_s: float


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
        "parameter": ("a Parameter itself", _parameter),
        "weight": ("a view of a Parameter, as nn.Linear saves it", _weight_view),
        "offloaded": ("stored, and loaded again", _offloaded),
        "among others": (f"offloaded while {_OTHERS} more are stored", _among_others),
        "deduplicated": ("a second view of what is stored", _deduplicated),
        "slot in RAM": (f"reserved and freed among {_OTHERS} others, in arenas that hold one each", _slot_in_ram),
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
    return tuple(
        Cost(
            name,
            meaning,
            Quartiles.of([1e6 * sample.pack_s / tensors for sample in samples[name]]),
            Quartiles.of([1e6 * sample.unpack_s / tensors for sample in samples[name]]),
            Quartiles.of([1e6 * (sample.pack_s + sample.unpack_s) / tensors for sample in samples[name]]),
        )
        for name, (meaning, _) in kinds.items()
    )


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


def _pack_and_unpack(engine: Engine, tensors: list[torch.Tensor], others: list[torch.Tensor] | None = None) -> _Sample:
    """Every tensor goes as soon as it is packed, as in forward, and every handle as soon as it is unpacked.

    Those of ``others`` are packed before the clock runs, and live until it has stopped.
    """
    alive = [engine.pack(tensor) for tensor in others or ()]
    if others is not None:
        others.clear()
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
    return _Sample(packed - start, unpacked - packed)


def _kept(count: int) -> _Sample:
    return _pack_and_unpack(_engine(min_bytes=1 << 40), _activations(count))


def _parameter(count: int) -> _Sample:
    model = nn.ParameterList(_activations(count))
    return _pack_and_unpack(_engine(model), list(model))


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


def _among_others(count: int) -> _Sample:
    return _pack_and_unpack(_engine(), _activations(count), _activations(_OTHERS))


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
    return _Sample(pack_s, unpack_s)


def _slot_in_ram(count: int) -> _Sample:
    """Finding room in the tier, and giving it back."""
    nbytes = _SIDE * _SIDE * torch.float32.itemsize
    tier = RamTier(arena_bytes=nbytes)
    for _ in range(_OTHERS):
        tier.reserve(nbytes)
    for slot in [tier.reserve(nbytes) for _ in range(count)]:
        tier.free(slot)  # so that arenas are there, and what is measured is not the system's share
    start = time.perf_counter()
    slots = [tier.reserve(nbytes) for _ in range(count)]
    reserved = time.perf_counter()
    while slots:
        tier.free(slots.pop())
    freed = time.perf_counter()
    tier.close()
    return _Sample(reserved - start, freed - reserved)


def _hooks_alone(count: int) -> _Sample:
    plain = _operations(count, contextlib.nullcontext())
    hooked = _operations(count, torch.autograd.graph.saved_tensors_hooks(_same, _same))
    return _Sample(hooked.pack_s - plain.pack_s, hooked.unpack_s - plain.unpack_s)


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
    return _Sample(forward_s, time.perf_counter() - start)
