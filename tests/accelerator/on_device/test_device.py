"""What the engine asks of an accelerator, by itself."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_offload.engine.device import AcceleratorDevice
from hf_offload.storage.buffers import empty_at_phase
from hf_offload.storage.ram import RamTier

DEVICE = torch.device("late:0")
OTHER = torch.device("late:1")  # the main thread's own is the first
N = 1 << 12


class _Meeting:
    """Stands where a tensor would be copied to: who comes first leaves first, while the other is in the midst of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._came = 0
        self._second_came = threading.Event()
        self.one_has_left = threading.Event()

    def copy_(self, source: object, non_blocking: bool) -> None:
        with self._lock:
            self._came += 1
            is_first = self._came == 1
        if is_first:
            assert self._second_came.wait(60)
        else:
            self._second_came.set()
            assert self.one_has_left.wait(60)


def test_two_threads_may_copy_on_one_stream(late):
    """A stream object remembers what was current: two threads that entered the same one would restore each other's."""
    device = AcceleratorDevice(DEVICE)
    stream, target = device.new_stream(), _Meeting()

    def work(own: torch.Stream) -> bool:
        device.make_current()
        torch.accelerator.set_stream(own)
        device.copy(target, target, stream)
        target.one_has_left.set()
        return device.current_stream() == own

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, [device.new_stream(), device.new_stream()])) == [True, True]


def test_an_event_is_awaited_without_a_busy_core(late, monkeypatch):
    """The wait asks, pauses, and asks again; it ends when the event has happened."""
    device = AcceleratorDevice(DEVICE)
    pauses: list[float] = []
    monkeypatch.setattr("hf_offload.engine.device._LONGEST_PAUSE_S", 1e-3)
    monkeypatch.setattr("hf_offload.engine.device.time.sleep", pauses.append)
    late.reseed(0, pace=0.0)
    torch.ones(8, device=DEVICE).mul_(2)
    event = device.record(device.current_stream())
    assert not device.has_happened(event)
    device.synchronize(event)
    assert device.has_happened(event)
    assert pauses
    assert sorted(pauses) == pauses
    assert pauses[0] < max(pauses) <= 1e-3


def test_memory_of_the_host_is_there_whatever_the_default_device_is(late):
    """Hooks that autograd calls run without the default; what runs around a forward does not."""
    torch.set_default_device("late")
    try:
        tier = RamTier(pinned=True, arena_bytes=1 << 16)
        views = [tier.host_view(tier.reserve(nbytes)) for nbytes in (0, 100)]
        buffers = [empty_at_phase(100, phase) for phase in (0, 3)]
    finally:
        torch.set_default_device(None)
    assert {one.device.type for one in (*views, *buffers)} == {"cpu"}
    assert views[1].is_pinned()
    tier.close()


def pinned(value: float) -> torch.Tensor:
    return torch.full((N,), value, pin_memory=True)


def test_what_is_asked_of_a_device_is_asked_of_the_models_own(late):
    """And leaves the thread's own alone."""
    device = AcceleratorDevice(OTHER)
    assert device.current_stream().device == OTHER
    stream = device.new_stream()
    assert stream.device == OTHER
    assert stream != device.current_stream()
    assert device.record(stream).device == OTHER
    assert device.allocate(100, 3).device == OTHER
    with stream:
        assert device.current_stream() == stream
        device.copy(device.allocate(N, 0), pinned(1.0).view(torch.uint8)[:N], device.new_stream())
        assert device.current_stream() == stream
    assert torch.accelerator.current_device_index() == DEVICE.index


@pytest.mark.parametrize("phase", [0, 3, 64, 511, 512 + 16])
def test_memory_is_at_the_address_that_kernels_care_about(late, phase):
    buffer = AcceleratorDevice(DEVICE).allocate(1000, phase)
    assert buffer.numel() == 1000
    assert buffer.data_ptr() % 512 == phase % 512


def test_a_copy_is_queued_on_the_stream_that_is_named(late):
    """On no other, and nobody waits for it."""
    device = AcceleratorDevice(OTHER)
    target, stream = torch.empty(N, device=OTHER), device.new_stream()
    torch.accelerator.synchronize(OTHER)
    late.reseed(0, pace=0.0)
    device.copy(target, pinned(1.0), stream)
    assert device.current_stream().query()
    assert not stream.query()
    stream.synchronize()
    assert bool((target == 1).all())


def test_a_stream_waits_for_what_was_queued_on_another_when_it_was_recorded(late):
    device = AcceleratorDevice(OTHER)
    first, second = device.new_stream(), device.new_stream()
    target, result = torch.empty(N, device=OTHER), pinned(0.0)
    torch.accelerator.synchronize(OTHER)
    late.reseed(0, pace=0.0)
    device.copy(target, pinned(1.0), first)
    event = device.record(first)
    assert not device.has_happened(event)
    device.copy(target, pinned(2.0), first)
    device.wait(second, event)
    device.copy(result, target, second)
    second.synchronize()
    assert bool((result == 1).all())
    assert device.has_happened(event)
    assert not first.query()


def test_memory_that_another_stream_uses_is_not_given_away(late):
    device = AcceleratorDevice(DEVICE)
    late.reseed(0, pace=0.0)
    value, user, result = torch.full((N,), 3.0, device=DEVICE), device.new_stream(), pinned(0.0)
    device.wait(user, device.record(device.current_stream()))
    device.copy(result, value, user)
    device.use(value, user)
    address = value.data_ptr()
    del value
    other = torch.zeros(N, device=DEVICE)
    assert other.data_ptr() != address
    user.synchronize()
    assert bool((result == 3).all())


def test_whoever_waits_for_an_event_finds_it_happened(late):
    device = AcceleratorDevice(DEVICE)
    stream = device.new_stream()
    torch.accelerator.synchronize()
    late.reseed(0, pace=0.0)
    source, result = torch.full((N,), 3.0, device=DEVICE), pinned(0.0)
    device.wait(stream, device.record(device.current_stream()))
    device.copy(result, source, stream)
    device.synchronize(device.record(stream))
    assert bool((result == 3).all())


def test_a_stream_says_when_it_becomes_part_of_a_graph(late):
    device = AcceleratorDevice(DEVICE)
    assert not device.is_capturing()
    late.set_capturing(True)
    try:
        assert device.is_capturing()
    finally:
        late.set_capturing(False)
