"""What the late device is for: a script that forgets to wait, to set a device or to tell the allocator goes wrong on it.

Each mistake is made by plain PyTorch code, and the same code without the mistake is right whatever the seed.
"""

import ctypes
import faulthandler
import os
import signal
import threading

import pytest
import torch
from torch import nn

DEVICE = torch.device("late:0")
SEEDS = 40
N = 1 << 14


def _pinned() -> torch.Tensor:
    return torch.empty(N, pin_memory=True)


def _offload(source: torch.Tensor, side: torch.Stream, wait: bool) -> torch.Tensor:
    """A copy to the host on a side stream, complete when this returns."""
    host = _pinned()
    if wait:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(source, non_blocking=True)
    side.synchronize()
    return host


def _wrong_seeds(late, run) -> int:
    """In how many of the seeds' orders ``run`` is wrong."""
    wrong = 0
    for seed in range(SEEDS):
        late.reseed(seed)
        wrong += not run()
    return wrong


@pytest.mark.parametrize("wait", [True, False])
def test_a_side_stream_has_to_wait_for_compute(late, wait):
    def run() -> bool:
        x = torch.ones(N, device=DEVICE)
        y = x * 3
        return torch.equal(_offload(y, torch.Stream(device=DEVICE), wait), torch.full((N,), 3.0))

    assert (_wrong_seeds(late, run) == 0) == wait


@pytest.mark.parametrize("wait", [True, False])
def test_compute_has_to_wait_for_a_side_stream(late, wait):
    def run() -> bool:
        host = _pinned().fill_(2)
        target = torch.empty(N, device=DEVICE)
        side = torch.Stream(device=DEVICE)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            target.copy_(host, non_blocking=True)
        if wait:
            torch.accelerator.current_stream().wait_stream(side)
        right = torch.equal((target + 1).cpu(), torch.full((N,), 3.0))
        side.synchronize()
        return right

    assert (_wrong_seeds(late, run) == 0) == wait


@pytest.mark.parametrize("tell", [True, False])
def test_the_allocator_has_to_be_told_of_other_streams(late, tell):
    def run() -> bool:
        y = torch.ones(N, device=DEVICE) * 3
        host, side = _pinned(), torch.Stream(device=DEVICE)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            host.copy_(y, non_blocking=True)
        if tell:
            y.record_stream(side)
        del y
        for _ in range(3):
            torch.zeros(N, device=DEVICE).add_(1)
        side.synchronize()
        return torch.equal(host, torch.full((N,), 3.0))

    assert (_wrong_seeds(late, run) == 0) == tell


def test_a_thread_has_to_set_its_device(late):
    failed: list[str] = []
    stream = torch.Stream(device=DEVICE)

    def work(set_device: bool) -> None:
        try:
            if set_device:
                torch.accelerator.set_device_index(0)
            stream.record_event()
        except RuntimeError as error:
            failed.append(str(error))

    for set_device in (True, False):
        thread = threading.Thread(target=work, args=(set_device,))
        thread.start()
        thread.join()
        assert len(failed) == (not set_device)
    assert "set no device" in failed[0]
    assert len(late.violations()) == 1


def of_the_device():
    x = torch.ones(1000, device="late")
    torch.accelerator.synchronize()
    return x, x.data_ptr()


def pinned_and_freed():
    return None, torch.ones(1000, pin_memory=True).data_ptr()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("memory", [of_the_device, pinned_and_freed])
def test_who_touches_what_is_out_of_reach_crashes(late, memory):
    _held, address = memory()
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        ctypes.string_at(address, 8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV


def test_memory_is_counted_cached_and_limited(late):
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    late.set_capacity(0, torch.accelerator.memory_reserved() + (8 << 20))
    try:
        x = torch.ones(4 << 20, dtype=torch.uint8, device=DEVICE)
        assert torch.accelerator.memory_allocated() == before + (4 << 20)
        del x
        assert torch.accelerator.memory_allocated() == before
        assert torch.accelerator.memory_reserved() >= 4 << 20
        y = torch.ones(7 << 20, dtype=torch.uint8, device=DEVICE)  # what is cached makes room
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(2 << 20, dtype=torch.uint8, device=DEVICE)
        del y
        late.fail_allocation(1)
        torch.ones(1000, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(1000, device=DEVICE)
    finally:
        late.set_capacity(0, 1 << 40)


def test_memory_that_is_fresh_or_was_given_back_is_poison(late):
    assert bool(torch.empty(N, device=DEVICE).isnan().all())
    torch.zeros(N, device=DEVICE)
    assert bool(torch.empty(N, device=DEVICE).isnan().all())


def test_a_network_learns_the_same_as_on_a_cpu(late):
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(device)
            nn.functional.cross_entropy(model(x), torch.arange(16, device=device) % 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    torch.testing.assert_close(run("late:0"), run("cpu"))
    assert all(map(torch.equal, run("late:1"), run("late:0")))
