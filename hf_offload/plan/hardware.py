"""The machine as a plan sees it: a few figures, each with where it comes from. Measured here, or described by the user.

A description is read without torch, which takes seconds to import.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_offload.errors import OffloadConfigError
from hf_offload.folders import user_folder
from hf_offload.plan.simulate import Channel
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")

BUDGET_SHARE = 0.9
"""Of the device's free memory: the rest is left to the allocator's slack and to kernels' workspaces."""

# Of a card's published rates, training reaches about these shares.
_MATMUL_SHARE = 0.5
_MEMORY_SHARE = 0.75
_DEFAULT_SSD = 3e9
_DEFAULT_PCIE = 20e9
_CACHE_VERSION = 3
_MATMUL_SIZE = 768
_COPY_BYTES = 64 << 20
_REPEATS = 7
# Accelerators are measured with twice the size until it takes so long: what is shorter measures the launch.
_LONG_ENOUGH_S = 1e-3
_LARGEST = 8192


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number and its source: ``"measured"``, ``"given"``, ``"data sheet"`` or ``"default"``."""

    value: float
    source: str


@dataclasses.dataclass(frozen=True)
class Card:
    """Published figures of an accelerator: memory, dense 16-bit and 32-bit matrix rates with 32-bit sums, memory bandwidth
    and one direction of its link to the host.
    """

    memory_bytes: int
    half_flops_per_s: float
    single_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float


# NVIDIA's data sheets; without sparsity. The single-precision rate is TF32's where the card has it.
CARDS: Mapping[str, Card] = {
    "t4": Card(16 * 10**9, 65e12, 8.1e12, 320e9, 16e9),
    "a10": Card(24 * 10**9, 125e12, 62.5e12, 600e9, 32e9),
    "l4": Card(24 * 10**9, 121e12, 60e12, 300e9, 32e9),
    "rtx3090": Card(24 * 10**9, 71e12, 35.6e12, 936e9, 32e9),
    "rtx4090": Card(24 * 10**9, 165e12, 82.6e12, 1008e9, 32e9),
    "l40s": Card(48 * 10**9, 362e12, 183e12, 864e9, 32e9),
    "a100-40gb": Card(40 * 10**9, 312e12, 156e12, 1555e9, 32e9),
    "a100-80gb": Card(80 * 10**9, 312e12, 156e12, 2039e9, 32e9),
    "h100-80gb": Card(80 * 10**9, 989e12, 495e12, 3350e9, 64e9),
    "h200": Card(141 * 10**9, 989e12, 495e12, 4800e9, 64e9),
}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a plan needs to know.

    Attributes:
        name: For people.
        device: Its type, such as ``"cpu"`` or ``"cuda"``.
        memory_bytes: Memory of the device that training may use.
        flops_per_s: Matrix multiplication, per dtype.
        memory_bytes_per_s: Reading and writing in the device's memory, for everything else.
        store_bytes_per_s, load_bytes_per_s: Per tier.
        room_bytes: What each tier has room for.
        both_bytes_per_s: Per tier, storing and loading at once: the sum of the two. Where it is missing, neither
            direction slows the other.
    """

    name: str
    device: str
    memory_bytes: Figure
    flops_per_s: Mapping[str, Figure]
    memory_bytes_per_s: Figure
    store_bytes_per_s: Mapping[str, Figure]
    load_bytes_per_s: Mapping[str, Figure]
    room_bytes: Mapping[str, Figure]
    both_bytes_per_s: Mapping[str, Figure] = dataclasses.field(default_factory=dict)

    def seconds(self, flops: int, moved_bytes: int, dtype: "torch.dtype") -> float:
        """How long an operation takes that is bound by arithmetic or by memory, whichever is longer."""
        name = str(dtype).removeprefix("torch.")
        rate = self.flops_per_s.get(name) or self.flops_per_s["float32"]
        return max(flops / rate.value, moved_bytes / self.memory_bytes_per_s.value)

    def shared_by(self, processes: int) -> "Hardware":
        """What is left for one of several processes on the machine: its part of drives, RAM, and of a CPU's memory."""

        def part(figures: Mapping[str, Figure], names: Sequence[str]) -> dict[str, Figure]:
            return {
                name: dataclasses.replace(figure, value=figure.value / processes) if name in names else figure
                for name, figure in figures.items()
            }

        memory = self.memory_bytes
        if self.device == "cpu":
            memory = dataclasses.replace(memory, value=memory.value / processes)
        return dataclasses.replace(
            self,
            memory_bytes=memory,
            store_bytes_per_s=part(self.store_bytes_per_s, ["ssd"]),
            load_bytes_per_s=part(self.load_bytes_per_s, ["ssd"]),
            both_bytes_per_s=part(self.both_bytes_per_s, ["ssd"]),
            room_bytes=part(self.room_bytes, ["ram", "ssd"]),
        )

    @property
    def channels(self) -> dict[str, Channel]:
        """The tiers as the simulation takes them."""
        channels = {}
        for tier, store in self.store_bytes_per_s.items():
            load, both = self.load_bytes_per_s[tier], self.both_bytes_per_s.get(tier)
            channels[tier] = Channel(store.value, load.value, math.inf if both is None else both.value)
        return channels

    @property
    def room(self) -> dict[str, int]:
        """Room per tier."""
        return {tier: int(figure.value) for tier, figure in self.room_bytes.items()}


# -- described ---------------------------------------------------------------------------------------------------------


def describe_hardware(
    gpu: str,
    *,
    tflops: float | None = None,
    memory_bandwidth: str | None = None,
    pcie: str | None = None,
    ssd: str | None = None,
    ram: str | None = None,
    disk: str | None = None,
) -> Hardware:
    """A CUDA machine in words: ``gpu`` is a card's name or a size of memory; the rest replaces what the card says.

    ``pcie`` and ``ssd`` are bandwidths such as ``"25GB/s"``; two with a slash-free comma, ``"5GB/s,7GB/s"``, are for storing
    and loading. ``tflops`` is what matrix multiplication in 16 bits really reaches.

    Raises :class:`~hf_offload.errors.OffloadConfigError` that lists all mistakes.
    """
    with collect_errors("machine description") as check:
        card, memory = None, None
        with check:
            card, memory = _card(gpu)
        with check:
            if tflops is not None and not 0.01 <= tflops <= 100_000:
                raise OffloadConfigError(f"tflops={tflops:g} is not a rate of one device: a card reaches 10 to 1000.")
        rates: dict[str, tuple[float, float] | None] = {}
        for name, value in (("pcie", pcie), ("ssd", ssd), ("memory_bandwidth", memory_bandwidth)):
            with check:
                rates[name] = None if value is None else _bandwidths(name, value)
        sizes: dict[str, int | None] = {}
        for name, value in (("ram", ram), ("disk", disk)):
            with check:
                sizes[name] = None if value is None else parse_bytes(value, name)
        with check:
            if card is None and memory is not None and tflops is None:
                raise OffloadConfigError(
                    f"gpu={gpu!r} says nothing about speed: add --tflops, or name a card ({', '.join(CARDS)})."
                )
    assert memory is not None
    if tflops is not None:
        half, single = Figure(tflops * 1e12, "given"), Figure(tflops * 0.5e12, "given")
    else:
        assert card is not None
        half = Figure(card.half_flops_per_s * _MATMUL_SHARE, "data sheet")
        single = Figure(card.single_flops_per_s * _MATMUL_SHARE, "data sheet")
    if rates["memory_bandwidth"] is not None:
        bandwidth = Figure(rates["memory_bandwidth"][0], "given")
    elif card is not None:
        bandwidth = Figure(card.memory_bytes_per_s * _MEMORY_SHARE, "data sheet")
    else:
        # Cards of one generation have about this many FLOPs per byte.
        bandwidth = Figure(half.value / 100, "default")
    link = rates["pcie"]
    if link is not None:
        pcie_figures = Figure(link[0], "given"), Figure(link[1], "given")
    elif card is not None:
        pcie_figures = (Figure(card.link_bytes_per_s * _MEMORY_SHARE, "data sheet"),) * 2
    else:
        pcie_figures = (Figure(_DEFAULT_PCIE, "default"),) * 2
    drive = rates["ssd"]
    ssd_figures = (Figure(_DEFAULT_SSD, "default"),) * 2 if drive is None else tuple(Figure(r, "given") for r in drive)
    # Bytes on their way to the drive go over the link first.
    ssd_figures = tuple(min(a, b, key=lambda f: f.value) for a, b in zip(ssd_figures, pcie_figures, strict=True))
    room = {
        "ram": Figure(64e9, "default") if sizes["ram"] is None else Figure(sizes["ram"], "given"),
        "ssd": Figure(1e12, "default") if sizes["disk"] is None else Figure(sizes["disk"], "given"),
    }
    return Hardware(
        name=gpu if card is not None else f"a card with {format_bytes(memory.value)}",
        device="cuda",
        memory_bytes=memory,
        flops_per_s={"float32": single, "bfloat16": half, "float16": half},
        memory_bytes_per_s=bandwidth,
        store_bytes_per_s={"ram": pcie_figures[0], "ssd": ssd_figures[0]},
        load_bytes_per_s={"ram": pcie_figures[1], "ssd": ssd_figures[1]},
        room_bytes=room,
        both_bytes_per_s={
            # A link carries both ways at once; a drive that is busy both ways moves about as much as one way.
            "ram": Figure(pcie_figures[0].value + pcie_figures[1].value, "default"),
            "ssd": Figure(max(ssd_figures[0].value, ssd_figures[1].value), "default"),
        },
    )


def _card(gpu: str) -> tuple[Card | None, Figure]:
    key = gpu.strip().lower().replace(" ", "")
    if key in CARDS:
        return CARDS[key], Figure(CARDS[key].memory_bytes, "data sheet")
    if re.match(r"[0-9.]", key):
        size = parse_bytes(gpu, "gpu")
        if not 1 << 30 <= size <= 1 << 40:
            raise OffloadConfigError(f"gpu={gpu!r} is no card's memory: give something like 24GB.")
        return None, Figure(size, "given")
    choose("gpu", key, CARDS)
    raise AssertionError


def _bandwidths(name: str, text: str) -> tuple[float, float]:
    parts = [part.strip() for part in text.split(",")]
    if not 1 <= len(parts) <= 2:
        raise OffloadConfigError(f"{name}={text!r}: give one bandwidth, or two for storing and loading: '5GB/s,7GB/s'.")
    rates = []
    for part in parts:
        size = parse_bytes(re.sub(r"\s*/\s*s$", "", part), name)
        if not 1 << 20 <= size <= 1 << 45:
            raise OffloadConfigError(f"{name}={part!r} is no bandwidth of a machine: give something like 5GB/s.")
        rates.append(float(size))
    return rates[0], rates[-1]


# -- measured ----------------------------------------------------------------------------------------------------------


def measure_hardware(
    directories: Sequence[str | os.PathLike[str]], device: "torch.device | None" = None, *, fresh: bool = False
) -> Hardware:
    """This machine, ``device`` (default: the current accelerator, or the CPU) and the drives under ``directories``.

    Takes some seconds; the result is kept in the user's cache folder per machine and directory, and measured again with
    ``fresh``.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a directory that cannot be used, and for a device on which there
    is no room to measure, or that does not say how much memory it has.
    """
    from hf_offload.planning.machine import default_device, probe_machine
    from hf_offload.storage.host_memory import RAM_SHARE

    device = device or default_device()
    machine = probe_machine(directories, sample_bytes=0, device=device)
    if machine.device.usable_bytes is None:
        raise OffloadConfigError(
            f"{machine.device.name} does not say how much memory it has, so nothing can be planned for it: set tier='ram' or "
            "tier='ssd'."
        )
    key = _cache_key(machine.device.name, directories)
    rates = None if fresh else _read(key)
    if rates is None or not rates.keys() >= _measured_names(directories, machine.device.type):
        rates = _measure(directories, device)
        _write(key, rates)
    measured = {name: Figure(value, "measured") for name, value in rates.items()}
    store, load, both, room = {}, {}, {}, {}
    if device.type != "cpu":
        store["ram"], load["ram"], both["ram"] = (measured[f"ram {way}"] for way in ("store", "load", "both"))
        room["ram"] = Figure((machine.ram_available_bytes or 0) * RAM_SHARE, "measured")
    if machine.drives:
        store["ssd"], load["ssd"], both["ssd"] = (measured[f"ssd {way}"] for way in ("store", "load", "both"))
        room["ssd"] = Figure(sum({drive.free_bytes for drive in machine.drives}), "measured")
    return Hardware(
        name=machine.device.name,
        device=device.type,
        memory_bytes=Figure(machine.device.usable_bytes, "measured"),
        flops_per_s={dtype: measured[f"matmul {dtype}"] for dtype in DTYPES},
        memory_bytes_per_s=measured["memory"],
        store_bytes_per_s=store,
        load_bytes_per_s=load,
        room_bytes=room,
        both_bytes_per_s=both,
    )


def _measure(directories: Sequence[str | os.PathLike[str]], device: "torch.device") -> dict[str, float]:
    rates = _measure_cpu(device) if device.type == "cpu" else _measure_accelerator(device)
    return rates | _measure_drives(directories)


def _measure_cpu(device: "torch.device") -> dict[str, float]:
    rates = {f"matmul {name}": _matmul_rate(name, _MATMUL_SIZE, device)[0] for name in DTYPES}
    return rates | {"memory": _memory_rate(_COPY_BYTES, device)[0]}


def _measure_accelerator(device: "torch.device") -> dict[str, float]:
    import torch

    with torch.accelerator.device_index(device.index):
        try:
            rates = {f"matmul {name}": _at_length(_matmul_rate, name, device=device) for name in DTYPES}
            rates["memory"] = _at_length(_memory_rate, device=device)
            return rates | link_rates(device)
        except torch.OutOfMemoryError as error:
            free, total = torch.accelerator.get_memory_info(device)
            raise OffloadConfigError(
                f"{device} cannot be measured: {format_bytes(free)} of {format_bytes(total)} are free. End what else uses it "
                "(nvidia-smi lists processes), or plan before the model is there."
            ) from error
        finally:
            # What was only needed here would be missing in training.
            torch.accelerator.empty_cache()
            if hasattr(torch.accelerator, "empty_host_cache"):
                torch.accelerator.empty_host_cache()


def _at_length(measure: Any, *args: Any, device: "torch.device") -> float:
    """The rate at the first size that takes long enough."""
    size = _MATMUL_SIZE if measure is _matmul_rate else _COPY_BYTES
    rate, seconds = measure(*args, size, device)
    while seconds < _LONG_ENOUGH_S and 2 * size <= (_LARGEST if measure is _matmul_rate else 4 * _COPY_BYTES):
        size *= 2
        rate, seconds = measure(*args, size, device)
    return rate


def _matmul_rate(name: str, size: int, device: "torch.device") -> tuple[float, float]:
    """Operations a second, and the seconds it took."""
    import torch

    left, right = (torch.ones(size, size, dtype=getattr(torch, name), device=device) for _ in range(2))
    seconds = _median_s(lambda: left @ right, device)
    return 2 * size**3 / seconds, seconds


def _memory_rate(nbytes: int, device: "torch.device") -> tuple[float, float]:
    import torch

    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    seconds = _median_s(lambda: torch.mul(source, 2.0, out=target), device)
    return 2 * nbytes / seconds, seconds


def link_rates(device: "torch.device") -> dict[str, float]:
    """Bytes a second between ``device`` and pinned memory: ``"ram store"``, ``"ram load"``, and ``"ram both"`` at once."""
    import torch

    nbytes = _COPY_BYTES
    source, target = torch.ones(nbytes // 4, device=device), torch.ones(nbytes // 4, device=device)
    host, other = (torch.empty(nbytes // 4, device="cpu", pin_memory=True) for _ in range(2))
    stream = torch.Stream(device=device)

    def both_ways() -> None:
        with stream:
            other.copy_(target, non_blocking=True)
        source.copy_(host, non_blocking=True)

    return {
        "ram store": nbytes / _median_s(lambda: host.copy_(source, non_blocking=True), device),
        "ram load": nbytes / _median_s(lambda: source.copy_(host, non_blocking=True), device),
        "ram both": 2 * nbytes / _median_s(both_ways, device),
    }


def _measure_drives(directories: Sequence[str | os.PathLike[str]]) -> dict[str, float]:
    from hf_offload.planning.machine import probe_machine

    rates: dict[str, float] = {}
    if directories:
        drives = probe_machine(directories).drives
        for name, kind in (("store", "write"), ("load", "read"), ("both", "both")):
            each = [getattr(drive, kind) for drive in drives]
            missing = [rate.reason for rate in each if rate.bytes_per_s is None]
            if missing:
                raise OffloadConfigError(
                    f"The drive under {', '.join(map(str, directories))} could not be measured: {missing[0]}."
                )
            # Stripes move together: as fast as the slowest of them times their number.
            slowest = min(rate.bytes_per_s for rate in each)
            rates[f"ssd {name}"] = slowest * len(each)
    return rates


def _median_s(work: Any, device: "torch.device") -> float:
    import torch

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    times = []
    for _ in range(_REPEATS):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


def _measured_names(directories: Sequence[str | os.PathLike[str]], device_type: str) -> set[str]:
    tiers = [*(["ram"] if device_type != "cpu" else []), *(["ssd"] if directories else [])]
    ways = [f"{tier} {way}" for tier in tiers for way in ("store", "load", "both")]
    return {*(f"matmul {name}" for name in DTYPES), "memory", *ways}


def _cache_key(device_name: str, directories: Sequence[str | os.PathLike[str]]) -> str:
    import torch

    key = json.dumps(
        [_CACHE_VERSION, platform.node(), device_name, torch.__version__, torch.get_num_threads()]
        + [str(Path(directory).resolve()) for directory in directories]
    )
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _cache_file(key: str) -> Path:
    return user_folder("XDG_CACHE_HOME", "~/.cache") / f"machine-{key}.json"


def _read(key: str) -> dict[str, float] | None:
    try:
        found = json.loads(_cache_file(key).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    sound = isinstance(found, dict) and all(isinstance(rate, float) and 0 < rate < math.inf for rate in found.values())
    return found if sound else None


def _write(key: str, rates: Mapping[str, float]) -> None:
    try:
        path = _cache_file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            unfinished.write_text(json.dumps(rates, indent=2))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        _warn(str(error))


@functools.cache  # a run measures the machine and its drives, and says this once
def _warn(error: str) -> None:
    logger.warning("What was measured cannot be kept (%s); it will be measured again.", error)
