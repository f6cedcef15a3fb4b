"""What several benchmarks measure: memory of some work, and the time."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], Any], device: torch.device) -> int:
    """Most bytes alive at once during ``work``, above those before. On an accelerator it is called twice."""
    if device.type != "cpu":
        work()  # what libraries take once
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        work()
        return torch.accelerator.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    live = peak = 0
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def now_s(device: torch.device) -> float:
    """The clock, once the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
