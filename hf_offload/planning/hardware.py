"""This machine as a plan sees it: rates of its device, link and drives, measured once and kept in the user's cache folder."""

import functools
import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_offload.errors import OffloadConfigError
from hf_offload.plan.hardware import DTYPES, Hardware, Measurement
from hf_offload.planning.machine import NO_OPTIONS, default_device, probe_machine
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.host_memory import RAM_SHARE

logger = logging.getLogger(__name__)

_CACHE_VERSION = 4
_MATMUL_SIZE = 768
_COPY_BYTES = 64 << 20
_REPEATS = 7
# Of which no more begin after this: a CPU without 16-bit instructions takes seconds for one product of matrices.
_ENOUGH_S = 0.25
# Accelerators are measured with twice the size until it takes so long: what is shorter measures the launch.
_LONG_ENOUGH_S = 1e-3
_LARGEST = 8192


def measure_hardware(
    directories: Sequence[str | os.PathLike[str]],
    device: torch.device | None = None,
    *,
    disk_options: Mapping[str, Any] = NO_OPTIONS,
    fresh: bool = False,
) -> Hardware:
    """This machine, ``device`` (default: the current accelerator, or the CPU) and the drives under ``directories``, as a
    :class:`~hf_offload.storage.disk.DiskTier` with ``disk_options`` uses them.

    Takes some seconds; results are kept in the user's cache folder, for the device and for each drive, and measured again
    with ``fresh``.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a directory that cannot be used, and for a device on which there
    is no room to measure, or that does not say how much memory it has.
    """
    device = device or default_device()
    machine = probe_machine(directories, sample_bytes=0, device=device)
    if machine.device.usable_bytes is None:
        raise OffloadConfigError(
            f"{machine.device.name} does not report its memory, so nothing can be planned for it: set tier='ram' or 'ssd'."
        )
    # The device is measured once, whichever drives are: a new directory costs two seconds.
    about = [machine.device.name, torch.__version__, str(torch.get_num_threads())]
    rates = _kept(about, _device_rates(device.type), lambda: _measure_device(device), fresh)
    if directories:
        about = [
            *(str(Path(directory).resolve()) for directory in directories),
            json.dumps(disk_options, sort_keys=True),
        ]
        rates |= _kept(about, _DRIVE_RATES, lambda: _measure_drives(directories, disk_options), fresh)
    measured = {name: Measurement(value, "measured") for name, value in rates.items()}
    store, load, both, room = {}, {}, {}, {}
    if device.type != "cpu":
        store["ram"], load["ram"], both["ram"] = (measured[f"ram {way}"] for way in ("store", "load", "both"))
        room["ram"] = Measurement((machine.ram_available_bytes or 0) * RAM_SHARE, "measured")
    if machine.drives:
        store["ssd"], load["ssd"], both["ssd"] = (measured[f"ssd {way}"] for way in ("store", "load", "both"))
        room["ssd"] = Measurement(sum({drive.free_bytes for drive in machine.drives}), "measured")
    return Hardware(
        name=machine.device.name,
        device=device.type,
        memory_bytes=Measurement(machine.device.usable_bytes, "measured"),
        flops_per_s={dtype: measured[f"matmul {dtype}"] for dtype in DTYPES},
        memory_bytes_per_s=measured["memory"],
        store_bytes_per_s=store,
        load_bytes_per_s=load,
        room_bytes=room,
        both_bytes_per_s=both,
    )


def _measure_device(device: torch.device) -> dict[str, float]:
    return _measure_cpu(device) if device.type == "cpu" else _measure_accelerator(device)


def _measure_cpu(device: torch.device) -> dict[str, float]:
    rates = {f"matmul {name}": _matmul_rate(name, _MATMUL_SIZE, device)[0] for name in DTYPES}
    return rates | {"memory": _memory_rate(_COPY_BYTES, device)[0]}


def _measure_accelerator(device: torch.device) -> dict[str, float]:
    with torch.accelerator.device_index(device.index):
        try:
            rates = {f"matmul {name}": _at_length(_matmul_rate, name, device=device) for name in DTYPES}
            rates["memory"] = _at_length(_memory_rate, device=device)
            return rates | link_rates(device)
        except torch.OutOfMemoryError as error:
            free, total = torch.accelerator.get_memory_info(device)
            raise OffloadConfigError(
                f"{device} cannot be measured: {format_bytes(free)} of {format_bytes(total)} are free. Stop other "
                "processes that use it (nvidia-smi lists them), or plan before the model is loaded."
            ) from error
        finally:
            # What was only needed here would be missing in training.
            torch.accelerator.empty_cache()
            if hasattr(torch.accelerator, "empty_host_cache"):
                torch.accelerator.empty_host_cache()


def _at_length(measure: Any, *args: Any, device: torch.device) -> float:
    """The rate at the first size that takes long enough."""
    size = _MATMUL_SIZE if measure is _matmul_rate else _COPY_BYTES
    rate, seconds = measure(*args, size, device)
    while seconds < _LONG_ENOUGH_S and 2 * size <= (_LARGEST if measure is _matmul_rate else 4 * _COPY_BYTES):
        size *= 2
        rate, seconds = measure(*args, size, device)
    return rate


def _matmul_rate(name: str, size: int, device: torch.device) -> tuple[float, float]:
    """Operations a second, and the seconds it took."""
    left, right = (torch.ones(size, size, dtype=getattr(torch, name), device=device) for _ in range(2))
    seconds = _median_s(lambda: left @ right, device)
    return 2 * size**3 / seconds, seconds


def _memory_rate(nbytes: int, device: torch.device) -> tuple[float, float]:
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    seconds = _median_s(lambda: torch.mul(source, 2.0, out=target), device)
    return 2 * nbytes / seconds, seconds


def link_rates(device: torch.device) -> dict[str, float]:
    """Bytes a second between ``device`` and pinned memory: ``"ram store"``, ``"ram load"``, and ``"ram both"`` at once."""
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


def _measure_drives(directories: Sequence[str | os.PathLike[str]], disk_options: Mapping[str, Any]) -> dict[str, float]:
    rates: dict[str, float] = {}
    drives = probe_machine(directories, disk_options=disk_options).drives
    for name, kind in zip(_DRIVE_RATES, ("write", "read", "both"), strict=True):
        each = [getattr(drive, kind) for drive in drives]
        missing = [rate.reason for rate in each if rate.bytes_per_s is None]
        if missing:
            raise OffloadConfigError(
                f"The drive under {', '.join(map(str, directories))} could not be measured: {missing[0]}."
            )
        # Stripes move together: as fast as the slowest of them times their number.
        rates[name] = min(rate.bytes_per_s for rate in each) * len(each)
    return rates


def _median_s(work: Any, device: torch.device) -> float:
    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    times: list[float] = []
    while len(times) < _REPEATS and sum(times) < _ENOUGH_S:
        wait()
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


_LINK_RATES = ("ram store", "ram load", "ram both")
_DRIVE_RATES = ("ssd store", "ssd load", "ssd both")


def _device_rates(device_type: str) -> list[str]:
    return [*(f"matmul {name}" for name in DTYPES), "memory", *(() if device_type == "cpu" else _LINK_RATES)]


def _kept(
    about: Sequence[str], names: Collection[str], measure: Callable[[], dict[str, float]], fresh: bool
) -> dict[str, float]:
    """The rates ``names`` of what ``about`` says, from the cache, or measured and kept there."""
    key = hashlib.sha256(json.dumps([_CACHE_VERSION, platform.node(), *about]).encode()).hexdigest()[:16]
    rates = None if fresh else _read(key)
    if rates is None or not rates.keys() >= set(names):
        rates = measure()
        _write(key, rates)
    return rates


def _cache_file(key: str) -> Path:
    """Among the user's files. Raises ``OSError`` for a user without a home folder, as containers have."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"{error} Set XDG_CACHE_HOME to a folder that can be written to") from error
    return folder / "hf_offload" / f"machine-{key}.json"


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
    logger.warning("Measurements of this machine cannot be kept (%s); they will be repeated.", error)
