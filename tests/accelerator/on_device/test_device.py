"""What the engine asks of an accelerator, by itself."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from hf_offload.engine.device import AcceleratorDevice
from hf_offload.storage.buffers import empty_at_phase
from hf_offload.storage.ram import RamTier

DEVICE = torch.device("late:0")


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
            assert self._second_came.wait(20)
        else:
            self._second_came.set()
            assert self.one_has_left.wait(20)


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
