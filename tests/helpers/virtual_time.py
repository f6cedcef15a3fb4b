"""The real engine in a time that a test makes up: bandwidths, copies and compute take exactly as long as they are told to."""

import contextlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future

import torch
from torch import nn

from hf_offload.engine.device import CpuDevice, Device
from hf_offload.engine.hooks import Engine
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.plan import Plan
from hf_offload.plan.timeline import Channel
from hf_offload.storage.tier import Slot, Tier, TierStats
from tests.helpers.seeded_scheduler import Workers


class Clock:
    """Virtual seconds; ``settle`` lets threads do what they can before time goes on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.settle: Callable[[], None] = lambda: None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, what: Callable[[], None] = lambda: None) -> None:
        """Call ``what`` then."""
        heapq.heappush(self._events, (time_s, next(self._numbers), what))

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def next(self) -> None:
        """Go on to whatever comes next."""
        time_s, _, what = heapq.heappop(self._events)
        self.now = max(self.now, time_s)
        what()

    def run_until(self, time_s: float) -> None:
        """Go on to that time."""
        self.settle()
        while self._events and self._events[0][0] <= time_s:
            self.next()
            self.settle()
        self.now = max(self.now, time_s)

    def run_out(self) -> None:
        """Until nothing is on its way any more; then time begins anew."""
        while self._events:
            self.run_until(self._events[0][0])
        self.now = 0.0


class TimedSlot(Slot):
    """Slots hash by identity; ``memory`` is where the bytes are."""

    __slots__ = ("memory", "place")


class TimedTier(Tier):
    """Parts whose transfers take as long as their channels say, in the order in which they are asked for."""

    name = "ssd"

    def __init__(self, channels: Mapping[str, Channel], clock: Clock):
        self.stats = TierStats()
        self._channels = channels
        self._clock = clock
        self._writes: dict[str, list[tuple[Future, TimedSlot, torch.Tensor]]] = {tier: [] for tier in channels}
        self._writing = dict.fromkeys(channels, False)
        self.load_free_s = dict.fromkeys(channels, 0.0)

    def reserve(self, nbytes: int, place: str | None = None) -> TimedSlot:
        slot = TimedSlot(nbytes)
        slot.place = place or self.name
        slot.memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.stats.reserve(nbytes)
        return slot

    def host_view(self, slot: TimedSlot) -> torch.Tensor | None:
        channel = self._channels[slot.place]
        return slot.memory if channel.link_bytes_per_s is not None and not channel.ring_bytes else None

    def write(self, slot: TimedSlot, buffer: torch.Tensor) -> "Future[None]":
        future: Future[None] = Future()
        self._writes[slot.place].append((future, slot, buffer))
        self._go_on(slot.place)
        return future

    def _go_on(self, place: str) -> None:
        queue = self._writes[place]
        while queue and not self._writing[place]:
            future, slot, buffer = queue.pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            self._writing[place] = True
            box = [buffer]

            def written(future: Future = future, slot: TimedSlot = slot, box: list[torch.Tensor] = box) -> None:
                slot.memory.copy_(box.pop())
                self._writing[place] = False
                future.set_result(None)
                self._go_on(place)

            self._clock.at(self._clock.now + slot.nbytes / self._channels[place].store_bytes_per_s, written)

    def load_ends_s(self, place: str, nbytes: int) -> float:
        """When a load ends that is asked for now."""
        begin_s = max(self._clock.now, self.load_free_s[place])
        self.load_free_s[place] = begin_s + nbytes / self._channels[place].load_bytes_per_s
        return self.load_free_s[place]

    def read(self, slot: TimedSlot, into: torch.Tensor, urgent: bool = False) -> "Future[None]":
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        box = [into]

        def was_read() -> None:
            box.pop().copy_(slot.memory)
            future.set_result(None)

        self._clock.at(self.load_ends_s(slot.place, slot.nbytes), was_read)
        return future

    def wait_for(self, wait: Callable[[float], bool]) -> None:
        while not wait(0):
            self._clock.next()

    def free(self, slot: TimedSlot) -> None:
        self.stats.release(slot.nbytes)

    def close(self) -> None:
        pass

    def begin_anew(self) -> None:
        """Nothing is on its way, and time begins again."""
        self.load_free_s = dict.fromkeys(self._channels, 0.0)


class _Stream:
    def __init__(self) -> None:
        self.free_s = 0.0


class TimedDevice(Device):
    """Computes on the host's clock; copies on other streams take as long as the channels say."""

    torch_device = torch.device("cpu")
    is_host = False

    def __init__(self, channels: Mapping[str, Channel], clock: Clock, workers: Workers):
        self._link_bytes_per_s = channels["ram"].link_bytes_per_s
        self._channels = channels
        self._clock = clock
        self._workers = workers
        self._compute = _Stream()
        self._streams: list[_Stream] = []  # the mover's: for stores, then for loads
        self.tier: TimedTier | None = None

    def make_current(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def allocate(self, nbytes: int, phase: int) -> torch.Tensor:
        return torch.empty(nbytes + phase % 512, dtype=torch.uint8)[phase % 512 :]

    def current_stream(self) -> _Stream:
        return self._compute

    def new_stream(self) -> _Stream:
        self._streams.append(_Stream())
        return self._streams[-1]

    def record(self, stream: _Stream, timed: bool = False) -> float:
        happens_s = self._clock.now if stream is self._compute else max(self._clock.now, stream.free_s)
        self._clock.at(happens_s)
        return happens_s

    def seconds_between(self, first: float, second: float) -> float:
        return second - first

    def wait(self, stream: _Stream, event: float) -> None:
        if stream is self._compute:
            self._clock.run_until(event)
        else:
            stream.free_s = max(stream.free_s, event)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: _Stream) -> None:
        target.copy_(source)
        begin_s = max(self._clock.now, stream.free_s)
        if stream is self._streams[0]:
            stream.free_s = begin_s + source.numel() / self._link_bytes_per_s
        elif isinstance(source, torch.Tensor) and self._is_rams(source):
            stream.free_s = self.tier.load_ends_s("ram", source.numel())
        else:
            stream.free_s = begin_s  # the drive was slower

    def _is_rams(self, source: torch.Tensor) -> bool:
        return any(source.data_ptr() == memory.data_ptr() for memory in self.rams_memory())

    rams_memory: Callable[[], Iterator[torch.Tensor]]

    def use(self, tensor: torch.Tensor, stream: _Stream) -> None:
        pass

    def has_happened(self, event: float) -> bool:
        return event <= self._clock.now

    def synchronize(self, event: float) -> None:
        self._workers.wait_until(lambda: event <= self._clock.now)

    def begin_anew(self) -> None:
        """Nothing is on its way, and time begins again."""
        for stream in self._streams:
            stream.free_s = 0.0


class _Workers(Workers):
    """Time goes on where everybody waits."""

    def __init__(self, clock: Clock):
        super().__init__(random.Random(0))
        self._clock = clock

    def _hand_on(self) -> None:
        while not any(task.ready for task in self._tasks) and self._clock.has_events:
            self._clock.next()
        super()._hand_on()


class Stage:
    """The engine under a plan, on a device with tiers, and a footprint that is played on it."""

    def __init__(self, plan: Plan, channels: Mapping[str, Channel], on_host: bool, workers: Workers, clock: Clock):
        self._clock = clock
        self._plan = plan
        self.tier = TimedTier(channels, clock)
        device: Device = CpuDevice() if on_host else TimedDevice(channels, clock, workers)
        self._device = device
        self.engine = Engine(nn.Identity(), plan, device, self.tier)
        if isinstance(device, TimedDevice):
            device.tier = self.tier
            device.rams_memory = self._rams_memory
        self._handles: dict[int, object] = {}

    def _rams_memory(self) -> Iterator[torch.Tensor]:
        for handle in self._handles.values():
            slot = getattr(getattr(handle, "record", None), "slot", None)
            if isinstance(slot, TimedSlot) and slot.place == "ram":
                yield slot.memory

    def play(self, footprint: Footprint) -> tuple[list[frozenset[int]], float]:
        """Which saved bytes the engine holds at every moment, by number, and when the step ends."""
        engine, clock, held = self.engine, self._clock, []
        originals: dict[int, torch.Tensor] = {}
        for index, segment in enumerate(footprint.segments):
            for number, one in enumerate(footprint.saved):
                if one.released == index:
                    del self._handles[number]
            for number, one in enumerate(footprint.saved):
                if one.packed == index:
                    engine.unit = one.unit
                    engine.transfer.reap()
                    tensor = torch.full((one.nbytes,), number % 251, dtype=torch.uint8)
                    self._handles[number] = engine.pack(tensor)
                    if one.gone > index:
                        originals[number] = tensor
                    del tensor
                    engine.operation_ended()
            for number, one in enumerate(footprint.saved):
                if one.gone == index and one.packed < index:
                    del originals[number]
            for number, one in enumerate(footprint.saved):
                if one.needed == index and one.needed < one.released:
                    engine.transfer.reap()
                    assert (engine.unpack(self._handles[number]) == number % 251).all()
            engine.transfer.reap()
            held.append(frozenset(number for number, handle in self._handles.items() if _is_held(handle)))
            clock.run_until(clock.now + segment.seconds)
        end_s = clock.now
        self._handles.clear()
        originals.clear()
        engine.transfer.reap()
        clock.run_out()
        engine.transfer.reap()
        self.tier.begin_anew()
        if isinstance(self._device, TimedDevice):
            self._device.begin_anew()
        return held, end_s


def _is_held(handle: object) -> bool:
    record = getattr(handle, "record", None)
    return True if record is None else record.buffer is not None


@contextlib.contextmanager
def stage(plan: Plan, channels: Mapping[str, Channel], on_host: bool) -> Iterator[Stage]:
    """An engine in virtual time."""
    clock = Clock()
    workers = _Workers(clock)
    with contextlib.ExitStack() as stack:
        if not on_host:
            stack.enter_context(workers.installed())
            clock.settle = workers.finish
        yield Stage(plan, channels, on_host, workers, clock)
        assert not workers.faults, workers.faults
