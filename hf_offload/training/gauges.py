"""Gauges: how much memory is used, by device.

On a CPU the level is the process's resident memory, the peak is the kernel's own high-water mark (a spike of a
microsecond counts), and how freed memory is kept depends on the allocator, which every report names. An allocator that
keeps freed memory at hand shows a flat line there, so the bytes in use according to the allocator itself are read,
too. On an accelerator all of these are PyTorch's counters.
"""

import ctypes
import gc
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from hf_offload.allocator import current_allocator, release_free_memory
from hf_offload.errors import OffloadError

logger = logging.getLogger(__name__)


class Gauge:
    """Reads one kind of memory. The base class is any device whose memory can only be sampled as the process's own."""

    peak_source = "sampled resident memory"

    def settle(self) -> None:
        """Give back what is free, so that a level counts only what is used."""
        gc.collect()
        if sys.platform == "linux":
            release_free_memory()

    def level(self) -> int:
        import psutil

        return psutil.Process().memory_info().rss

    def peak(self) -> int:
        return self.level()

    def reset_peak(self) -> None:
        pass

    def in_use(self) -> int | None:
        return None

    def synchronize(self) -> None:
        pass


class _LinuxGauge(Gauge):
    """Resident memory of this process, from /proc."""

    peak_source = "VmHWM, reset before each step"

    def __init__(self) -> None:
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._in_use = _allocator_counter()

    def level(self) -> int:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * self._page_bytes

    def peak(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise OffloadError("/proc/self/status has no line VmHWM: memory cannot be measured on this kernel.")

    def reset_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def in_use(self) -> int | None:
        return None if self._in_use is None else self._in_use()


class _AcceleratorGauge(Gauge):
    """PyTorch's counters of allocated memory. Raises where a backend has none."""

    peak_source = "torch.accelerator.max_memory_allocated"

    def __init__(self, device: torch.device):
        # Samples are taken in a thread of their own, whose current device is another.
        self._index = torch.accelerator.current_device_index() if device.index is None else device.index
        torch.accelerator.memory_allocated(device)

    def settle(self) -> None:
        gc.collect()
        torch.accelerator.synchronize(self._index)
        torch.accelerator.empty_cache()

    def level(self) -> int:
        return torch.accelerator.memory_allocated(self._index)

    def peak(self) -> int:
        return torch.accelerator.max_memory_allocated(self._index)

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._index)

    def in_use(self) -> int | None:
        return self.level()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._index)


def choose_gauge(device: torch.device) -> Gauge:
    """The most exact gauge there is for a run on ``device``."""
    if device.type != "cpu":
        try:
            return _AcceleratorGauge(device)
        except (RuntimeError, ValueError) as error:  # not every backend counts, nor is each one the accelerator
            logger.warning(f"PyTorch does not count the memory of {device} ({error}): the process's own is measured.")
    if sys.platform == "linux":
        gauge = _LinuxGauge()
        try:
            gauge.reset_peak()
        except OSError as error:  # some containers forbid it
            logger.warning(f"The kernel's memory peak cannot be reset ({error}): it is sampled every 10 ms instead.")
        else:
            return gauge
    return Gauge()


class _Mallinfo2(ctypes.Structure):
    """<malloc.h>: what glibc's allocator counts, over all of its arenas."""

    _names = (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )  # fmt: skip
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def _allocator_counter() -> Callable[[], int] | None:
    """A function that returns the bytes which tcmalloc or glibc has handed out; ``None`` for other allocators."""
    process = ctypes.CDLL(None)
    if hasattr(process, "MallocExtension_GetNumericProperty"):
        value = ctypes.c_size_t()

        def tcmalloc() -> int:
            process.MallocExtension_GetNumericProperty(b"generic.current_allocated_bytes", ctypes.byref(value))
            return value.value

        return tcmalloc
    if hasattr(process, "mallinfo2") and current_allocator().startswith("glibc"):
        mallinfo2 = process.mallinfo2
        mallinfo2.restype = _Mallinfo2

        def glibc() -> int:
            info = mallinfo2()
            return info.uordblks + info.hblkhd

        return glibc
    return None
