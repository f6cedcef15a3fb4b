"""What the machine is and how fast its drives are, each figure with how it was found."""

import contextlib
import dataclasses
import importlib
import itertools
import os
import platform
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from hf_offload.allocator import current_allocator
from hf_offload.storage.buffers import empty_at_phase
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.disk_io import DirectIo
from hf_offload.storage.file_systems import check_directory, free_disk_bytes
from hf_offload.storage.host_memory import process_bytes, ram_bytes
from hf_offload.versions import find_versions

PACKAGES = (
    "hf-offload",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "trl",
    "bitsandbytes",
    "safetensors",
)

SAMPLE_BYTES = 256 << 20
NO_OPTIONS: Mapping[str, Any] = {}
_BUFFER_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class Rate:
    """A bandwidth and where it comes from: ``"measured"`` or ``"unknown"``, the latter with the reason."""

    bytes_per_s: float | None
    source: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """The device that trains. ``free_bytes`` is what other processes and this one leave now, ``usable_bytes`` the most that
    this process can have in all, what it has already included.
    """

    name: str
    type: str
    total_bytes: int | None
    free_bytes: int | None
    usable_bytes: int | None


@dataclasses.dataclass(frozen=True)
class DriveFacts:
    """A directory that may hold offload files."""

    directory: Path
    file_system: str
    free_bytes: int
    direct_io: DirectIo
    write: Rate
    read: Rate
    both: Rate  # writing and reading at once, the sum of the two


@dataclasses.dataclass(frozen=True)
class GpuDirectFacts:
    """Whether files can be read into device memory without a stop in RAM."""

    usable: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class AllocatorFacts:
    """The CPU allocator of this process: it decides how much of the memory that a tensor frees really goes."""

    name: str
    environment: dict[str, str]
    transparent_huge_pages: str


@dataclasses.dataclass(frozen=True)
class Machine:
    """Everything ``hf-offload doctor`` shows and recipes and settings are judged by."""

    device: DeviceFacts
    cpu_count: int
    ram_total_bytes: int | None
    ram_available_bytes: int | None
    drives: tuple[DriveFacts, ...]
    gpu_direct: GpuDirectFacts
    allocator: AllocatorFacts
    versions: dict[str, str | None]


def probe_machine(
    directories: Sequence[str | os.PathLike[str]] = (),
    *,
    sample_bytes: int = SAMPLE_BYTES,
    device: torch.device | None = None,
    disk_options: Mapping[str, Any] = NO_OPTIONS,
) -> Machine:
    """Look at the machine and ``device`` (default: the current accelerator, or the CPU); write and read ``sample_bytes`` in
    each directory (0: do not measure), through a :class:`DiskTier` with ``disk_options``.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a directory that cannot be used.
    """
    for directory in directories:  # all of them before the first is measured
        check_directory(directory)
    ram_total, ram_available = ram_bytes()
    return Machine(
        device=_device(device or default_device(), ram_total, ram_available),
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        ram_total_bytes=ram_total,
        ram_available_bytes=ram_available,
        drives=tuple(_drive(Path(directory), sample_bytes, disk_options) for directory in directories),
        gpu_direct=_gpu_direct(),
        allocator=_allocator(),
        versions=find_versions(PACKAGES),
    )


def default_device() -> torch.device:
    """The current accelerator, or the CPU where there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def device_name(device: torch.device) -> str:
    """What its backend calls it, such as ``"NVIDIA H100 80GB HBM3"``; its type where the backend has no names, as the CPU."""
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name_of is None else name_of(device)


def _device(device: torch.device, ram_total: int | None, ram_available: int | None) -> DeviceFacts:
    if device.type == "cpu":
        usable = None if ram_available is None else ram_available + process_bytes()
        return DeviceFacts(_cpu_name(), "cpu", ram_total, ram_available, usable)
    name = device_name(device)
    try:
        free, total = torch.accelerator.get_memory_info(device)
        reserved = torch.accelerator.memory_reserved(device)
    except (RuntimeError, NotImplementedError):  # not every backend tells
        return DeviceFacts(name, device.type, None, None, None)
    # torch.accelerator has no word for the share that a process may have at most.
    share_of = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", lambda device: 1.0)
    share = share_of(device)
    return DeviceFacts(name, device.type, total, free, min(free + reserved, int(share * total)))


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _drive(directory: Path, sample_bytes: int, options: Mapping[str, Any]) -> DriveFacts:
    with contextlib.closing(DiskTier(directory, **options)) as tier:
        file = tier.files[0]
        free = tier.call_with_watchdog(lambda: free_disk_bytes([directory]))
        write, read, both = _measure(tier, sample_bytes, free)
        return DriveFacts(directory, file.file_system, free, file.direct, write, read, both)


def _measure(tier: DiskTier, sample_bytes: int, free_bytes: int) -> tuple[Rate, Rate, Rate]:
    """Write and read the sample through the tier's own path: same threads, chunks and alignment as in a run."""
    if sample_bytes <= 0:
        unknown = Rate(None, "unknown", "not measured")
        return unknown, unknown, unknown
    if free_bytes < 4 * sample_bytes:
        unknown = Rate(None, "unknown", f"only {free_bytes} bytes are free")
        return unknown, unknown, unknown
    count = max(sample_bytes // _BUFFER_BYTES, 2)
    size = sample_bytes // count
    # Written to beforehand, so that page faults are not counted as the drive's; not zeros, which some drives compress.
    # Drawn from a generator of their own: this may run in a training whose dropout must not change.
    draw = torch.Generator().manual_seed(0)
    buffers = [empty_at_phase(size, 64).random_(0, 256, generator=draw) for _ in range(count)]
    slots = [tier.reserve(size) for _ in buffers]
    pairs = list(zip(slots, buffers, strict=True))
    others = [(tier.reserve(size), buffer) for buffer in buffers[: count // 2]]
    rates = []
    for writes, reads in ((pairs, []), ([], pairs), (others, pairs[count // 2 :])):
        start = time.perf_counter()
        futures: list[Future[None]] = []
        for write, read in itertools.zip_longest(writes, reads):
            futures += [tier.write(*write)] if write is not None else []
            futures += [tier.read(*read)] if read is not None else []
        tier.wait_until_done(*futures)
        for future in futures:
            future.result()
        rates.append(Rate((len(writes) + len(reads)) * size / (time.perf_counter() - start), "measured"))
    return rates[0], rates[1], rates[2]


def _gpu_direct() -> GpuDirectFacts:
    if not torch.cuda.is_available():
        return GpuDirectFacts(False, "there is no CUDA device")
    try:
        cufile = importlib.import_module("cuda.bindings.cufile")
    except ImportError as error:
        return GpuDirectFacts(False, f"the cuFile bindings are missing ({error}): install cuda-bindings")
    if not Path("/proc/driver/nvidia-fs").exists():
        reason = "the kernel module nvidia-fs is not loaded: cuFile would copy through RAM all the same"
        return GpuDirectFacts(False, reason)
    try:
        cufile.driver_open()
    except Exception as error:  # the bindings raise types of their own, which differ between versions
        return GpuDirectFacts(False, f"cuFile does not start: {error}")
    cufile.driver_close()
    return GpuDirectFacts(True, "nvidia-fs is loaded and cuFile starts")


def _allocator() -> AllocatorFacts:
    names = ("LD_PRELOAD", "THP_MEM_ALLOC_ENABLE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in names or name.startswith(("MALLOC_", "MIMALLOC_"))
    }
    huge_pages = "unknown"
    with contextlib.suppress(OSError):
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        huge_pages = text.partition("[")[2].partition("]")[0] or "unknown"
    return AllocatorFacts(current_allocator(), environment, huge_pages)
