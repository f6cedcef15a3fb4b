"""The NVMe tier: slots in private files, moved by direct I/O straight from and into the tensors' memory.

Note: no copies
    O_DIRECT wants addresses, offsets and lengths in whole blocks, and tensors are aligned to 64 bytes only. Only the
    block-aligned middle of a buffer goes to the file. What is left at both ends, less than a block each, stays in
    memory with the slot (:class:`_Image`). A target at the same address modulo the block can then be read into in
    place; any other target gets its middle through an aligned staging chunk.
"""

import ctypes
import dataclasses
import errno
import functools
import itertools
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hf_offload.errors import OffloadConfigError, StorageError, WriteLimitError
from hf_offload.interrupts import signals_deferred
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.buffers import PAGE, empty_at_phase, map_ranges
from hf_offload.storage.disk_io import DataFile
from hf_offload.storage.disk_room import Piece, round_down
from hf_offload.storage.forking import Gate, guard
from hf_offload.storage.queued import QueuedSlot, QueuedTier, QueuedTransfer, memory
from hf_offload.storage.service import ACTIVATIONS, RunStorage
from hf_offload.storage.tier import KeptSlot, Slot


@dataclasses.dataclass(slots=True, eq=False)
class _Image:
    """How a buffer was cut when it was written: ``lead`` and ``tail`` are kept here, the middle is in the file."""

    phase: int
    lead: bytes
    tail: bytes
    middle_bytes: int
    checksums: list[int]  # one a chunk, then one of lead and tail; empty without verification


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of the middle: ``start`` bytes into it, at ``offset`` of ``file``. ``nbytes`` may be 0."""

    index: int
    file: int
    offset: int
    start: int
    nbytes: int


@dataclasses.dataclass(slots=True, eq=False)
class DiskSlot(QueuedSlot):
    """Room in one or several files."""

    pieces: tuple[Piece, ...] = ()
    place: str = ""
    image: _Image | None = None
    prepaid_bytes: int = 0  # of its next writes: already counted against the write limit

    @property
    def location(self) -> str:
        return self.place


class DiskTier(QueuedTier):
    """A tier on one or several drives (striped).

    Args:
        directories: One local directory, or several, best on different drives.
        storage: The run's, whose limits hold for all its tiers together. Default: one for this tier alone.
        account: What the bytes are, for the run's counters.
        budget_bytes: Without ``storage``, most bytes of disk occupied at any time, over all directories, free slots included.
        chunk_bytes: Size of one system call. Large slots are cut so that several threads work on them.
        write_threads, read_threads: Threads per directory in each direction.
        checksum: Compare a CRC-32 of every buffer before the write with one after the read.

    Raises :class:`OffloadConfigError` for a directory that cannot be used, and
    :class:`~hf_offload.errors.StandstillError` for one whose drive does not answer.
    """

    def __init__(
        self,
        directories: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        storage: RunStorage | None = None,
        account: str = ACTIVATIONS,
        budget_bytes: int | None = None,
        chunk_bytes: int = 8 << 20,
        write_threads: int = 2,
        read_threads: int = 4,
        checksum: bool = False,
    ):
        paths = [directories] if isinstance(directories, (str, os.PathLike)) else list(directories)
        if not paths:
            raise OffloadConfigError("The disk tier was given no directory: name at least one.")
        threads = {"write_threads": write_threads * len(paths), "read_threads": read_threads * len(paths)}
        storage = RunStorage(disk_bytes=budget_bytes) if storage is None else storage
        super().__init__("ssd", storage, account, **threads)
        self.account = account
        self._directories = ", ".join(map(str, paths))
        self._room, self._number = storage.join_room(self, paths, chunk_bytes)
        weakref.finalize(self, self._room.abandoned.append, self._number).atexit = False
        self.block_bytes = self._room.block_bytes
        self.chunk_bytes = round_down(chunk_bytes, self.block_bytes)
        self.checksum = checksum
        self.gate = Gate()
        guard(self)

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The open files, one a directory."""
        return tuple(self._room.files)

    @property
    def where(self) -> str:
        return self._directories

    @property
    def occupied_bytes(self) -> int:
        """Disk space the files take, freed slots and reserves included."""
        return self._room.occupied_bytes

    def phase(self, slot: Slot) -> int:
        assert isinstance(slot, DiskSlot)
        image = slot.image
        return 0 if image is None else image.phase

    # -- room ----------------------------------------------------------------------------------------------------------

    @signals_deferred
    def reserve(self, nbytes: int, place: str | None = None) -> DiskSlot:
        self._check_usable("reserve")
        room = self._room.round_up(nbytes)
        self._check_usable("reserve")
        self._pay(nbytes)
        try:
            pieces = self._room.place(self._number, room, self.call_with_watchdog)
        except BaseException:
            self.storage.disk_writes.give(nbytes)
            raise
        self.stats.reserve(room)
        where = ", ".join(f"{self._room.files[piece.file]} at offset {piece.offset}" for piece in pieces[:4])
        where = where or "an empty slot"
        return DiskSlot(nbytes, room_bytes=room, pieces=tuple(pieces), place=where, prepaid_bytes=nbytes)

    def keep(self, slot: Slot) -> KeptSlot | None:
        assert isinstance(slot, DiskSlot)
        with self._lock:
            image = slot.image
            if image is None or slot.freed or slot.writing:
                return None
            self._room.hold(slot.pieces)
            return KeptSlot(functools.partial(self._room.let_go.append, slot.pieces))

    def map(self, slot: Slot, private: bool = False) -> torch.Tensor | None:
        assert isinstance(slot, DiskSlot)
        with self._lock:
            if slot.image is None or slot.image.lead or slot.image.tail or slot.freed:
                return None
            slot.image.checksums = []  # others may write from now on
        files = self._room.files
        ranges = [(files[file].descriptor, at, used) for file, at, _, used in _ranges(slot, 0, slot.nbytes)]
        return map_ranges(ranges, private)

    def _pay(self, nbytes: int) -> None:
        """Count a write before it happens, against what the drives may be worn by."""
        limit = self.storage.disk_writes
        if not limit.take(nbytes):
            raise WriteLimitError(
                f"No more disk writes: of max_disk_write_bytes={format_bytes(limit.limit_bytes or 0)}, "
                f"{format_bytes(limit.taken_bytes)} are spent and {format_bytes(nbytes)} are asked for. Raise it, or "
                "let the tensor stay in memory."
            )

    def _give_back(self, slot: QueuedSlot) -> None:
        assert isinstance(slot, DiskSlot)
        self._room.give(self._number, slot.pieces)
        self.stats.release(slot.room_bytes)
        slot.image = None
        self.storage.disk_writes.give(slot.prepaid_bytes)

    # -- transfers -----------------------------------------------------------------------------------------------------

    def _prepare(self, transfer: QueuedTransfer) -> Sequence[_Chunk]:
        slot = transfer.slot
        assert isinstance(slot, DiskSlot)
        if transfer.kind == "write":
            prepaid = min(slot.prepaid_bytes, len(transfer.part))
            self._pay(len(transfer.part) - prepaid)
            slot.prepaid_bytes -= prepaid
            transfer.payload = self._cut(transfer.address, len(transfer.part))
        else:
            transfer.payload = slot.image
        if len(transfer.part) < slot.nbytes:
            transfer.payload = _Image(0, b"", b"", len(transfer.part), [])
        chunks = self._chunks(slot, transfer.part.start, transfer.payload.middle_bytes)
        if self.checksum and transfer.kind == "write" and len(transfer.part) == slot.nbytes:
            image = transfer.payload
            image.checksums = [0] * len(chunks) + [zlib.crc32(image.tail, zlib.crc32(image.lead))]
        return chunks

    def _cut(self, address: int, nbytes: int) -> _Image:
        lead = min(-address % self.block_bytes, nbytes)
        middle = (nbytes - lead) // self.block_bytes * self.block_bytes
        tail_at = lead + middle
        return _Image(
            phase=address % PAGE,
            lead=ctypes.string_at(address, lead),
            tail=ctypes.string_at(address + tail_at, nbytes - tail_at),
            middle_bytes=middle,
            checksums=[],
        )

    def _chunks(self, slot: DiskSlot, begin: int, middle_bytes: int) -> list[_Chunk]:
        per_file: dict[int, list[tuple[int, int, int, int]]] = {}
        for file, offset, start, used in _ranges(slot, begin, middle_bytes):
            for at in range(0, used, self.chunk_bytes):
                size = min(self.chunk_bytes, used - at)
                per_file.setdefault(file, []).append((file, offset + at, start + at, size))
        # One chunk of each file in turn, so that all drives start at once.
        turns = itertools.chain.from_iterable(itertools.zip_longest(*per_file.values()))
        cuts = [cut for cut in turns if cut is not None]
        return [_Chunk(index, *cut) for index, cut in enumerate(cuts or [(0, 0, 0, 0)])]

    def _work(self, transfer: QueuedTransfer, part: Any) -> None:
        chunk: _Chunk = part
        image: _Image = transfer.payload
        if transfer.kind == "read" and chunk.index == 0:
            self._restore_ends(transfer, image)
        if not chunk.nbytes:
            return
        address = transfer.address + len(image.lead) + chunk.start
        file = self._room.files[chunk.file]
        if transfer.kind == "write":
            data = memory(address, chunk.nbytes)
            if image.checksums:
                image.checksums[chunk.index] = zlib.crc32(data)
            self._call(transfer, chunk, functools.partial(file.write, data, chunk.offset, self.account))
        elif address % self.block_bytes == 0 or not file.direct.usable:
            data = memory(address, chunk.nbytes)
            self._call(transfer, chunk, functools.partial(file.read, data, chunk.offset))
        else:
            staging = empty_at_phase(chunk.nbytes + self.block_bytes, 0)
            aligned = staging.data_ptr() + -staging.data_ptr() % self.block_bytes
            data = memory(aligned, chunk.nbytes)
            self._call(transfer, chunk, functools.partial(file.read, data, chunk.offset))
            ctypes.memmove(address, aligned, chunk.nbytes)
            data = memory(address, chunk.nbytes)  # from here on staging may go, and the target is what has to be right
        if transfer.kind == "read" and image.checksums and zlib.crc32(data) != image.checksums[chunk.index]:
            raise StorageError(
                f"The bytes read from {file} at offset {chunk.offset} ({chunk.nbytes} bytes) are not those that were "
                "written: their checksums differ. The drive, its controller or the memory is faulty; do not trust this run's "
                "result."
            )

    def _call(self, transfer: QueuedTransfer, chunk: _Chunk, call: Any) -> None:
        done = 0
        try:
            with self.gate.passing():
                self.stats.begin(transfer.kind)
                try:
                    call()
                    done = chunk.nbytes
                finally:
                    self.stats.end(transfer.kind, done)
        except OSError as error:
            advice = {
                errno.ENOSPC: "The disk is full: free space there, or set a smaller disk_budget.",
                errno.EIO: "The drive reports an error: look at the kernel's log, and use another drive.",
            }.get(error.errno or 0, "Check the drive, or name another directory.")
            verb = "Writing to" if transfer.kind == "write" else "Reading from"
            raise StorageError(
                f"{verb} {self._room.files[chunk.file]} at offset {chunk.offset} ({chunk.nbytes} bytes) failed: "
                f"{error.strerror or error} (errno {error.errno}). {advice}"
            ) from error

    def _restore_ends(self, transfer: QueuedTransfer, image: _Image) -> None:
        ctypes.memmove(transfer.address, image.lead, len(image.lead))
        tail_at = transfer.address + transfer.slot.nbytes - len(image.tail)
        ctypes.memmove(tail_at, image.tail, len(image.tail))
        if image.checksums and zlib.crc32(image.tail, zlib.crc32(image.lead)) != image.checksums[-1]:
            raise StorageError(
                f"The ends of {transfer.slot.location}, which stay in memory, have changed since they were written: "
                "the memory is faulty; do not trust this run's result."
            )

    def _written(self, transfer: QueuedTransfer, outcome: str) -> None:
        slot = transfer.slot
        assert isinstance(slot, DiskSlot)
        if outcome == "done" and not slot.freed:
            is_part = len(transfer.part) < slot.nbytes
            slot.image = _Image(0, b"", b"", slot.nbytes, []) if is_part else transfer.payload
        if outcome == "cancelled":
            slot.prepaid_bytes += len(transfer.part)

    # -- end -----------------------------------------------------------------------------------------------------------

    def _shut(self) -> None:
        self.call_with_watchdog(functools.partial(self._room.leave, self._number))

    def abandon_in_child(self) -> None:
        """After a fork, in the child: close its copies of the files, so that they do not keep the disk space. Takes no lock:
        its holder may not exist there.
        """
        for file in self._room.files:
            file.close()


def _ranges(slot: DiskSlot, begin: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Where the slot's ``nbytes`` from ``begin`` on are: file, offset in it, bytes behind ``begin``, how many."""
    start = 0
    for piece in slot.pieces:
        first, last = max(begin, start), min(begin + nbytes, start + piece.nbytes)
        if first < last:
            yield piece.file, piece.offset + first - start, first - begin, last - first
        start += piece.nbytes
