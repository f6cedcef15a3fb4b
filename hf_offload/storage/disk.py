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
import threading
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

from hf_offload.errors import OffloadConfigError, StorageError, TierFullError
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.buffers import PAGE, empty_at_phase
from hf_offload.storage.disk_io import DataFile
from hf_offload.storage.extents import Extents
from hf_offload.storage.forking import Gate, guard
from hf_offload.storage.queued import QueuedSlot, QueuedTier, Transfer, memory
from hf_offload.storage.tier import Slot

_GROW_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """A range of one file."""

    file: int
    offset: int
    nbytes: int


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

    pieces: tuple[_Piece, ...] = ()
    place: str = ""
    image: _Image | None = None
    prepaid: bool = True  # its next write is already counted against max_write_bytes

    @property
    def location(self) -> str:
        return self.place


class DiskTier(QueuedTier):
    """A tier on one or several drives (striped).

    Args:
        directories: One local directory, or several, best on different drives.
        budget_bytes: Most bytes of disk occupied at any time, over all directories, free slots included. Default: the
        disk. max_write_bytes: Most bytes written in the tier's life; then :meth:`reserve` raises ``TierFullError``.
        chunk_bytes: Size of one system call. Large slots are cut so that several threads work on them.
        write_threads, read_threads: Threads per directory in each direction.
        direct: False forbids O_DIRECT. Default: used wherever a probe shows that it works.
        align_bytes: A block larger than the probed one.
        checksum: Compare a CRC-32 of every buffer before the write with one after the read.

    Raises :class:`OffloadConfigError` for a directory that cannot be used.
    """

    def __init__(
        self,
        directories: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        budget_bytes: int | None = None,
        max_write_bytes: int | None = None,
        chunk_bytes: int = 8 << 20,
        write_threads: int = 2,
        read_threads: int = 4,
        direct: bool = True,
        align_bytes: int | None = None,
        checksum: bool = False,
    ):
        paths = [directories] if isinstance(directories, (str, os.PathLike)) else list(directories)
        if not paths:
            raise OffloadConfigError("The disk tier was given no directory: name at least one.")
        self._files: list[DataFile] = []
        try:
            for path in paths:
                self._files.append(DataFile(path, allow_direct=direct))
            self.block_bytes = max(align_bytes or 1, *(file.direct.align_bytes for file in self._files))
            if any(self.block_bytes % file.direct.align_bytes for file in self._files):
                raise OffloadConfigError(f"align_bytes={align_bytes} is not a multiple of what the drives need.")
        except BaseException:
            _close_files(self._files, os.getpid())
            raise
        super().__init__("disk", write_threads=write_threads * len(paths), read_threads=read_threads * len(paths))
        weakref.finalize(self, _close_files, self._files, os.getpid()).atexit = False
        self.budget_bytes = budget_bytes
        self.max_write_bytes = max_write_bytes
        self.checksum = checksum
        granule = max(self.block_bytes, 4096)
        self.chunk_bytes = max(chunk_bytes // granule, 1) * granule
        self._extents = [Extents(granule_bytes=granule) for _ in paths]
        self._paid_bytes = 0
        self._next_file = itertools.cycle(range(len(paths)))
        self._reserving = threading.Lock()  # growing a file may take a while, and free() must not wait for that
        self.gate = Gate()
        guard(self)

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The open files, one a directory."""
        return tuple(self._files)

    @property
    def occupied_bytes(self) -> int:
        """Disk space the files take, freed slots and reserves included."""
        return sum(extents.capacity_bytes for extents in self._extents)

    def phase(self, slot: Slot) -> int:
        assert isinstance(slot, DiskSlot)
        image = slot.image
        return 0 if image is None else image.phase

    # -- room ----------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> DiskSlot:
        self._check_usable("reserve")
        room = self._extents[0].round_up(nbytes)
        with self._reserving:
            with self._lock:
                self._check_usable("reserve")
                if self.max_write_bytes is not None and self._paid_bytes + nbytes > self.max_write_bytes:
                    raise TierFullError(
                        f"No more disk writes: {format_bytes(self._paid_bytes)} of max_write_bytes="
                        f"{format_bytes(self.max_write_bytes)} are spent and {format_bytes(nbytes)} are asked for. "
                        "Raise it, or "
                        "let the tensor stay in memory."
                    )
            pieces = self._place(room)
            with self._lock:
                self._paid_bytes += nbytes
                self.stats.reserve(room)
        place = (
            ", ".join(f"{self._files[piece.file]} at offset {piece.offset}" for piece in pieces[:4]) or "an empty slot"
        )
        return DiskSlot(nbytes, room_bytes=room, pieces=tuple(pieces), place=place)

    def _place(self, room: int) -> list[_Piece]:
        """Find room: striped if large, in one file if small, and in as many pieces as it takes if there is no other
        way.
        """
        if room == 0:
            return []
        count = len(self._files)
        if count > 1 and room >= count * self.chunk_bytes:
            chunks = -(-room // self.chunk_bytes)
            ends = [min(room, -(-chunks * (file + 1) // count) * self.chunk_bytes) for file in range(count)]
            sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
            striped: list[_Piece] = []
            for file, size in enumerate(sizes):
                piece = self._take(file, size) or self._grow_and_take(file, size)[0]
                if piece is None:
                    self._give(striped)
                    break
                striped.append(piece)
            else:
                return striped
        first = next(self._next_file)
        order = [(first + step) % count for step in range(count)]
        refusals = []
        for file in order:
            piece = self._take(file, room)
            if piece is None:
                piece, refusal = self._grow_and_take(file, room)
                refusals.append(refusal)
            if piece is not None:
                return [piece]
        return self._scatter(order, room, refusals)

    def _take(self, file: int, nbytes: int) -> _Piece | None:
        with self._lock:
            offset = self._extents[file].take(nbytes)
        return None if offset is None else _Piece(file, offset, nbytes)

    def _grow_and_take(self, file: int, nbytes: int) -> tuple[_Piece | None, str]:
        """Enlarge the file by a generous step, or else by just enough; else None and the limit that was met."""
        with self._lock:
            extents = self._extents[file]
            needed = max(nbytes - extents.free_at_end_bytes, 0)
            allowed = None if self.budget_bytes is None else self.budget_bytes - self.occupied_bytes
        granule = extents.granule_bytes
        if allowed is not None and needed > allowed:
            return None, f"the budget of {format_bytes(self.budget_bytes or 0)}"
        step = max(needed, _GROW_BYTES // granule * granule)
        if allowed is not None:
            step = max(min(step, allowed // granule * granule), needed)
        refusal = ""
        for size in dict.fromkeys((step, needed)):
            try:
                self._files[file].grow(size) if size else None
            except OSError as error:
                refusal = f"the disk under {self._files[file].directory}: {error.strerror}"
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise StorageError(
                        f"Enlarging {self._files[file]} by {format_bytes(size)} failed: {error.strerror} (errno "
                        f"{error.errno}). "
                        "Check the drive, or name another directory."
                    ) from error
                continue
            with self._lock:
                if size:
                    extents.grow(size)
                offset = extents.take(nbytes)
            if offset is not None:
                return _Piece(file, offset, nbytes), ""
        return None, refusal

    def _scatter(self, order: list[int], room: int, refusals: list[str]) -> list[_Piece]:
        """Fill what lies free between other slots, so that the budget can be used to the last block."""
        pieces: list[_Piece] = []
        left = room
        for may_grow in (False, True):
            for file in order:
                if may_grow and left:
                    size = left if self.budget_bytes is None else min(left, self.budget_bytes - self.occupied_bytes)
                    size = size // self._extents[file].granule_bytes * self._extents[file].granule_bytes
                    piece = self._grow_and_take(file, size)[0] if size > 0 else None
                    found = [] if piece is None else [(piece.offset, piece.nbytes)]
                else:
                    with self._lock:
                        found = self._extents[file].take_pieces(left)
                pieces += [_Piece(file, offset, size) for offset, size in found]
                left -= sum(size for _, size in found)
        if not left:
            return pieces
        self._give(pieces)
        raise TierFullError(
            f"No room for {format_bytes(room)} on disk: {format_bytes(self.stats.used_bytes)} are in use, and what "
            "stands in the "
            f"way is {' and '.join(dict.fromkeys(filter(None, refusals)))}. Raise disk_budget, free disk space, add a "
            "directory, "
            "or let the tensor stay in memory."
        )

    def _give(self, pieces: Sequence[_Piece]) -> None:
        with self._lock:
            for piece in pieces:
                self._extents[piece.file].give(piece.offset, piece.nbytes)

    def _give_back(self, slot: QueuedSlot) -> None:
        assert isinstance(slot, DiskSlot)
        for piece in slot.pieces:
            self._extents[piece.file].give(piece.offset, piece.nbytes)
        self.stats.release(slot.room_bytes)
        slot.image = None
        if slot.prepaid:
            self._paid_bytes -= slot.nbytes

    # -- transfers -----------------------------------------------------------------------------------------------------

    def _prepare(self, transfer: Transfer) -> Sequence[_Chunk]:
        slot = transfer.slot
        assert isinstance(slot, DiskSlot)
        if transfer.kind == "write":
            if not slot.prepaid:
                if self.max_write_bytes is not None and self._paid_bytes + slot.nbytes > self.max_write_bytes:
                    raise TierFullError(
                        f"No more disk writes: max_write_bytes={format_bytes(self.max_write_bytes)} is spent."
                    )
                self._paid_bytes += slot.nbytes
            slot.prepaid = False
            transfer.payload = self._cut(transfer.address, slot.nbytes)
        else:
            transfer.payload = slot.image
        chunks = self._chunks(slot, transfer.payload.middle_bytes)
        if self.checksum and transfer.kind == "write":
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

    def _chunks(self, slot: DiskSlot, middle_bytes: int) -> list[_Chunk]:
        per_file: dict[int, list[tuple[int, int, int, int]]] = {}
        start = 0
        for piece in slot.pieces:
            used = min(piece.nbytes, middle_bytes - start)
            for at in range(0, used, self.chunk_bytes):
                size = min(self.chunk_bytes, used - at)
                per_file.setdefault(piece.file, []).append((piece.file, piece.offset + at, start + at, size))
            start += used
        # One chunk of each file in turn, so that all drives start at once.
        turns = itertools.chain.from_iterable(itertools.zip_longest(*per_file.values()))
        cuts = [cut for cut in turns if cut is not None]
        return [_Chunk(index, *cut) for index, cut in enumerate(cuts or [(0, 0, 0, 0)])]

    def _work(self, transfer: Transfer, part: Any) -> None:
        chunk: _Chunk = part
        image: _Image = transfer.payload
        if transfer.kind == "read" and chunk.index == 0:
            self._restore_ends(transfer, image)
        if not chunk.nbytes:
            return
        address = transfer.address + len(image.lead) + chunk.start
        file = self._files[chunk.file]
        if transfer.kind == "write":
            data = memory(address, chunk.nbytes)
            if image.checksums:
                image.checksums[chunk.index] = zlib.crc32(data)
            self._call(transfer, chunk, functools.partial(file.write, data, chunk.offset))
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
                "written: "
                "their checksums differ. The drive, its controller or the memory is faulty; do not trust this run's "
                "result."
            )

    def _call(self, transfer: Transfer, chunk: _Chunk, call: Any) -> None:
        done = 0
        with self.gate.passing():
            self.stats.begin(transfer.kind)
            try:
                call()
                done = chunk.nbytes
            except OSError as error:
                advice = {
                    errno.ENOSPC: "The disk is full: free space there, or set a smaller disk_budget.",
                    errno.EIO: "The drive reports an error: look at the kernel's log, and use another drive.",
                }.get(error.errno or 0, "Check the drive, or name another directory.")
                verb = "Writing to" if transfer.kind == "write" else "Reading from"
                raise StorageError(
                    f"{verb} {self._files[chunk.file]} at offset {chunk.offset} ({chunk.nbytes} bytes) failed: "
                    f"{error.strerror or error} (errno {error.errno}). {advice}"
                ) from error
            finally:
                self.stats.end(transfer.kind, done)

    def _restore_ends(self, transfer: Transfer, image: _Image) -> None:
        ctypes.memmove(transfer.address, image.lead, len(image.lead))
        tail_at = transfer.address + transfer.slot.nbytes - len(image.tail)
        ctypes.memmove(tail_at, image.tail, len(image.tail))
        if image.checksums and zlib.crc32(image.tail, zlib.crc32(image.lead)) != image.checksums[-1]:
            raise StorageError(
                f"The ends of {transfer.slot.location}, which stay in memory, have changed since they were written: "
                "the memory "
                "is faulty; do not trust this run's result."
            )

    def _written(self, transfer: Transfer, outcome: str) -> None:
        slot = transfer.slot
        assert isinstance(slot, DiskSlot)
        if outcome == "done" and not slot.freed:
            slot.image = transfer.payload
        if outcome == "cancelled":
            slot.prepaid = True

    # -- end -----------------------------------------------------------------------------------------------------------

    def _shut(self) -> None:
        _close_files(self._files, self._owner_pid)

    def abandon_in_child(self) -> None:
        """After a fork, in the child: close its copies of the files, so that they do not keep the disk space."""
        for file in self._files:
            file.close()


def _close_files(files: list[DataFile], owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child has closed its own copies already
        for file in files:
            file.close()
