"""The disk tier against what the drive can do: the same bytes, blocks and threads, in turns.

The tier is driven as the engine drives it: through its contract, with several records of average size in flight and
buffers that begin where tensors do, not on page boundaries. The ceiling is what ``fio --direct=1 --ioengine=psync`` does: a
plain loop of direct system calls in as many threads. Neither side pays for the first allocation of disk blocks: a pass that
is not counted has written everything once.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import inspect
import itertools
import math
import mmap
import os
import statistics
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from hf_offload.errors import OffloadConfigError, StorageError
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.buffers import empty_at_phase
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.disk_io import DataFile
from hf_offload.storage.file_systems import MEMORY_FILE_SYSTEMS, file_system_of, free_disk_bytes

Direction = Literal["write", "read"]
DIRECTIONS: tuple[Direction, ...] = ("write", "read")

# Attention weights of GPT-2 in float32 for 4 x 512 tokens: 4 x 12 x 512 x 512 x 4 bytes.
RECORD_BYTES = 48 << 20
BLOCK_BYTES = 8 << 20
"""Of a system call."""
# Between the engine's smallest and largest read-ahead, four and ten records.
_RECORDS_IN_FLIGHT = 8
# Where CPU allocators let a tensor begin.
_TENSOR_PHASE = 64


@dataclasses.dataclass(frozen=True)
class Workload:
    """What both sides move in one pass."""

    size_bytes: int
    block_bytes: int
    record_bytes: int
    write_threads: int
    read_threads: int

    @classmethod
    def of(cls, size_bytes: int) -> "Workload":
        """The largest workload of at most ``size_bytes`` that divides evenly into records, threads and blocks.

        Raises :class:`~hf_offload.errors.OffloadConfigError` for too little.
        """
        # As many threads as the tier has in a run; they are the depth of the queue.
        tier = inspect.signature(DiskTier).parameters
        threads = {kind: int(tier[f"{kind}_threads"].default) for kind in DIRECTIONS}
        unit_bytes = math.lcm(RECORD_BYTES, *(count * BLOCK_BYTES for count in threads.values()))
        if size_bytes < unit_bytes:
            raise OffloadConfigError(
                f"size={format_bytes(size_bytes)} is too little: records of {format_bytes(RECORD_BYTES)} and "
                f"{threads['read']} threads need at least {format_bytes(unit_bytes)}."
            )
        size_bytes -= size_bytes % unit_bytes
        return cls(size_bytes, BLOCK_BYTES, RECORD_BYTES, threads["write"], threads["read"])

    def threads(self, direction: Direction) -> int:
        """Threads that move bytes in this direction."""
        return self.write_threads if direction == "write" else self.read_threads


@dataclasses.dataclass(frozen=True)
class Rates:
    """Both sides, one right after the other; ``ratio`` is the tier's share of the ceiling."""

    ceiling_bytes_per_s: float
    tier_bytes_per_s: float
    ratio: float

    @property
    def bytes_per_s(self) -> tuple[float, float]:
        """Of ceiling and tier."""
        return self.ceiling_bytes_per_s, self.tier_bytes_per_s


@dataclasses.dataclass(frozen=True)
class Comparison(Rates):
    """All rounds of one direction: medians, and the smallest and the largest ratio.

    ``ratio`` is the median of the rounds' own ratios: a drive's speed drifts, but little between two neighbours.
    """

    rounds: tuple[Rates, ...]
    ratio_range: tuple[float, float]

    @classmethod
    def of(cls, rates: Sequence[tuple[float, float]]) -> "Comparison":
        """From the bytes per second of ceiling and tier in each round."""
        rounds = tuple(Rates(ceiling, tier, tier / ceiling) for ceiling, tier in rates)
        ceilings, tiers, ratios = zip(*(dataclasses.astuple(each) for each in rounds), strict=True)
        ceiling, tier, ratio = (statistics.median(values) for values in (ceilings, tiers, ratios))
        return cls(ceiling, tier, ratio, rounds, (min(ratios), max(ratios)))


@dataclasses.dataclass(frozen=True)
class DriveReport:
    """One directory's comparison in both directions."""

    directory: Path
    file_system: str
    direct_io: str
    ceiling: str
    workload: Workload
    write: Comparison
    read: Comparison

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = dataclasses.asdict(self) | {"directory": str(self.directory)}
        return values | values.pop("workload")


def check_drives(directories: Sequence[Path], workload: Workload) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for the first directory that cannot be measured."""
    for directory in directories:
        kind = file_system_of(directory) if directory.is_dir() else ""
        if kind in MEMORY_FILE_SYSTEMS:
            raise OffloadConfigError(
                f"directory {str(directory)!r} is a {kind}, which is RAM: there is no drive to measure, and direct I/O "
                "does not work there. Name a directory on a drive."
            )
        with contextlib.closing(DataFile(directory)) as file:
            if not file.direct.usable:
                raise OffloadConfigError(
                    f"directory {str(directory)!r} cannot be measured past the page cache: {file.direct.reason}. Name a "
                    "directory on a local drive."
                )
        free, needed = free_disk_bytes([directory]), 2 * workload.size_bytes
        if free < needed:
            raise OffloadConfigError(
                f"directory {str(directory)!r} has {format_bytes(free)} free, and two files of "
                f"{format_bytes(workload.size_bytes)} need {format_bytes(needed)}: free some space, name another "
                "directory, or give a smaller size."
            )


def compare_drive(
    directory: Path, workload: Workload, rounds: int, on_pass: Callable[[str], None] = lambda _: None
) -> DriveReport:
    """Let the tier and the ceiling take turns; which goes first changes every round.

    ``on_pass`` is called with what runs next. Files have no name in the directory: nothing is left there however this ends.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_file_without_a_name(directory, workload.size_bytes))
        ceiling = _PlainLoop(file, workload)
        tier = stack.enter_context(contextlib.closing(_TierSide(directory, workload)))
        for side in (ceiling, tier):
            on_pass(f"{side.name}, first write")
            side.measure("write")
        found: dict[Direction, list[tuple[float, float]]] = {direction: [] for direction in DIRECTIONS}
        for index in range(rounds):
            order: list[_PlainLoop | _TierSide] = [ceiling, tier] if index % 2 == 0 else [tier, ceiling]
            for direction in DIRECTIONS:
                rates = {}
                for side in order:
                    on_pass(f"{side.name}, {direction} {index + 1}/{rounds}")
                    rates[side] = side.measure(direction)
                found[direction].append((rates[ceiling], rates[tier]))
        write, read = (Comparison.of(found[direction]) for direction in DIRECTIONS)
        return DriveReport(
            directory, tier.file.file_system, tier.file.direct.reason, ceiling.name, workload, write, read
        )


PASSES_BEFORE_ROUNDS = 2
PASSES_PER_ROUND = 4


@contextlib.contextmanager
def _file_without_a_name(directory: Path, nbytes: int) -> Iterator[int]:
    """A descriptor of ``nbytes`` of reserved disk, gone with the last process that has it open."""
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            raise StorageError(
                f"Reserving {format_bytes(nbytes)} in {directory} failed: {error.strerror} (errno {error.errno}). Give a "
                "smaller size, or name another directory."
            ) from error
        yield file.fileno()


class _PlainLoop:
    """Threads that call ``pwritev`` or ``preadv`` with one aligned buffer each, each in a part of the file of its own.

    Nothing is closed by hand: a pool does not wait for a thread during whose start Ctrl-C came, and what such a thread still
    uses goes with its last reference.
    """

    name = "O_DIRECT loop"

    def __init__(self, fd: int, workload: Workload):
        self._workload = workload
        self._stopped = False
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        weakref.finalize(self, os.close, self._fd)
        threads = max(workload.write_threads, workload.read_threads)
        self._buffers = [mmap.mmap(-1, workload.block_bytes) for _ in range(threads)]
        for buffer in self._buffers:
            buffer.write(os.urandom(workload.block_bytes))

    def measure(self, direction: Direction) -> float:
        threads = self._workload.threads(direction)
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            start = time.perf_counter()
            try:
                for part in [pool.submit(self._move_part, direction, index, threads) for index in range(threads)]:
                    part.result()
            except BaseException:
                self._stopped = True  # or leaving the pool would wait for all of it
                raise
        return self._workload.size_bytes / (time.perf_counter() - start)

    def _move_part(self, direction: Direction, index: int, threads: int) -> None:
        part, block = self._workload.size_bytes // threads, self._workload.block_bytes
        call = os.pwritev if direction == "write" else os.preadv
        for offset in range(index * part, (index + 1) * part, block):
            if self._stopped:
                return
            try:
                moved = call(self._fd, [self._buffers[index]], offset)
            except OSError as error:
                raise StorageError(f"The plain {direction} at offset {offset} failed: {error.strerror}.") from error
            if moved != block:
                raise StorageError(f"The plain {direction} at offset {offset} moved {moved} of {block} bytes.")


class _TierSide:
    """The disk tier, with several records in flight."""

    name = "disk tier"

    def __init__(self, directory: Path, workload: Workload):
        self._workload = workload
        # Pages touched, and neither zeros nor all alike, which some drives and hosts store without writing.
        self._buffers = [
            empty_at_phase(workload.record_bytes, _TENSOR_PHASE).random_(0, 256) for _ in range(_RECORDS_IN_FLIGHT)
        ]
        self._tier = DiskTier(
            directory,
            budget_bytes=workload.size_bytes,
            chunk_bytes=workload.block_bytes,
            write_threads=workload.write_threads,
            read_threads=workload.read_threads,
        )
        try:
            count = workload.size_bytes // workload.record_bytes
            self._slots = [self._tier.reserve(workload.record_bytes) for _ in range(count)]
        except BaseException:
            self._tier.close()
            raise

    @property
    def file(self) -> DataFile:
        return self._tier.files[0]

    def close(self) -> None:
        self._tier.close()

    def measure(self, direction: Direction) -> float:
        move: Callable[[Any, torch.Tensor], concurrent.futures.Future[None]]
        move = self._tier.write if direction == "write" else self._tier.read
        in_flight: collections.deque[concurrent.futures.Future[None]] = collections.deque()
        start = time.perf_counter()
        for slot, buffer in zip(self._slots, itertools.cycle(self._buffers), strict=False):
            if len(in_flight) == len(self._buffers):
                in_flight.popleft().result()
            in_flight.append(move(slot, buffer))
        for future in in_flight:
            future.result()
        return self._workload.size_bytes / (time.perf_counter() - start)
