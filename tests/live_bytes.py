"""Bytes that are alive during some work, counted by somebody else than the planner."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hf_offload.reports.gauges import choose_gauge


def peak_live_bytes(work: Callable[[], Any]) -> int:
    """Most bytes that ``work`` had allocated at once, above what was there when it began, as PyTorch's profiler sees it.

    The profiler sees what the calling thread and backward's do, and not what I/O threads free: with offloading it counts
    too much.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def peak_bytes_in_use(work: Callable[[], Any]) -> int | None:
    """The same of all threads, as the C allocator counts it, sampled; None where the allocator does not tell."""
    gauge = choose_gauge(torch.device("cpu"))
    gauge.settle()
    before = gauge.in_use()
    if before is None:
        return None
    most = [before]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.0005):
            most[0] = max(most[0], gauge.in_use() or 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        over.set()
        watcher.join()
    return most[0] - before
