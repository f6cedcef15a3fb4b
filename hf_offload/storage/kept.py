"""Bytes on a drive that stay there as they are, whatever becomes of their slots.

Note: redirect on write
    What is written after its slot was held (:class:`KeptSlot`) gets another slot. So a state as of a step needs no copy, and
    its room is free once it is not needed any more.
"""

import dataclasses
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
import xxhash
from torch import Tensor

from hf_offload.storage.disk_io import DataFile
from hf_offload.storage.disk_room import DiskRoom, Piece

_MAP_NORESERVE = 0x4000
_CHUNK_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Span:
    """Bytes that follow each other in one place: ``content``, or ``nbytes`` of ``file`` from ``offset`` on."""

    nbytes: int
    content: bytes = b""
    file: DataFile | None = None
    offset: int = 0


class KeptSlot:
    """The bytes of one slot of the disk tier as they are now, until :meth:`release`.

    Attributes:
        is_needed: They are not released yet.

    Args:
        room: Where it is.
        pieces: Its room, held already.
        lead, tail: What lies in memory, before the ``middle_bytes`` in the pieces and behind them.
    """

    def __init__(self, room: DiskRoom, pieces: Sequence[Piece], lead: bytes, middle_bytes: int, tail: bytes):
        self.room = room
        self._pieces = tuple(pieces)
        self._lead, self._middle_bytes, self._tail = lead, middle_bytes, tail
        self._held = weakref.finalize(self, room.let_go.append, self._pieces)
        self._held.atexit = False
        self.is_needed = True

    @property
    def room_bytes(self) -> int:
        """Bytes of the drive that it takes."""
        return sum(piece.nbytes for piece in self._pieces)

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        """Where the bytes from ``begin`` to ``end`` are."""
        start = 0
        for whole in self._all():
            first, last = max(begin, start), min(end, start + whole.nbytes)
            if first < last:
                content = whole.content[first - start : last - start]
                yield dataclasses.replace(
                    whole, nbytes=last - first, content=content, offset=whole.offset + first - start
                )
            start += whole.nbytes

    def _all(self) -> Iterator[Span]:
        if self._lead:
            yield Span(len(self._lead), self._lead)
        left = self._middle_bytes
        for piece in self._pieces:
            used = min(piece.nbytes, left)
            if used:
                yield Span(used, file=self.room.files[piece.file], offset=piece.offset)
            left -= used
        if self._tail:
            yield Span(len(self._tail), self._tail)

    def digest(self, begin: int, end: int) -> bytes:
        """That of these bytes, which are read. Raises ``OSError``."""
        return digest_of(chunk for span in self.spans(begin, end) for chunk in _chunks_of(span))

    def release(self) -> None:
        """The bytes are not needed any more. Idempotent."""
        self.is_needed = False
        self._held()

    def abandon(self) -> None:
        """They are needed for as long as their file is open."""
        self._held.detach()


@dataclasses.dataclass(frozen=True)
class KeptRange:
    """Bytes of a slot, and their :func:`digest <digest_of>`, if it is known."""

    slot: KeptSlot
    begin: int
    end: int
    digest: bytes | None


class Kept:
    """What a snapshot has on drives. Its tensors have no bytes.

    Attributes:
        refusal: Why it could not be kept there, if it could not.
    """

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self._slots: list[KeptSlot] = []
        self._changing: list[KeptSlot] = []
        self._tensors: dict[int, Tensor] = {}
        self._parts: dict[int, Sequence[KeptRange | bytes]] = {}

    def placeholder(
        self,
        like: Tensor,
        shape: torch.Size,
        slots: Sequence[KeptSlot],
        parts: Sequence[KeptRange | bytes],
        *,
        changes: bool = True,
    ) -> Tensor:
        """A tensor of the dtype of ``like`` whose bytes are these ``parts`` of ``slots``, and which takes no memory. Its
        strides are those of ``like`` where that has the same ``shape``. If it ``changes``, the next step writes as many bytes
        to another place.
        """
        nbytes = shape.numel() * like.dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        flat = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=like.dtype)
        found = flat.as_strided(shape, like.stride()) if like.shape == shape else flat.view(shape)
        self._slots += slots
        self._changing += slots if changes else ()
        self._tensors[id(found)] = found  # whose address must not become another one's
        self._parts[found.untyped_storage()._cdata] = parts
        return found

    def parts_of(self, storage: object) -> "Sequence[KeptRange | bytes] | None":
        """Where the bytes of a storage are; None if it is not one of a placeholder."""
        return self._parts.get(storage._cdata) if isinstance(storage, torch.UntypedStorage) else None

    def has(self, tensor: Tensor) -> bool:
        """Whether it is a placeholder."""
        return id(tensor) in self._tensors

    @property
    def rooms(self) -> dict[DiskRoom, int]:
        """Bytes of drives that are held in each room, and written to other places of it by the next step."""
        found: dict[DiskRoom, int] = {}
        for slot in {id(slot): slot for slot in self._changing}.values():
            found[slot.room] = found.get(slot.room, 0) + slot.room_bytes
        return found

    def release(self) -> None:
        """None of it is needed any more. Idempotent."""
        for slot in self._slots:
            slot.release()

    def abandon(self) -> None:
        """It is needed for as long as its files are open."""
        for slot in self._slots:
            slot.abandon()


def digest_of(chunks: Iterable[bytes]) -> bytes:
    """The digest of bytes, of 128 bits."""
    found = xxhash.xxh3_128()
    for chunk in chunks:
        found.update(chunk)
    return found.digest()


def _chunks_of(span: Span) -> Iterator[bytes]:
    if span.file is None:
        yield span.content
    else:
        yield from read_chunks(span.file.descriptor, span.offset, span.nbytes)
        os.posix_fadvise(span.file.descriptor, span.offset, span.nbytes, os.POSIX_FADV_DONTNEED)


def read_chunks(number: int, begin: int, count: int) -> Iterator[bytes]:
    """The bytes of a file: not mapped into memory, where a drive that fails ends the process."""
    end = begin + count
    while begin < end:
        chunk = os.pread(number, min(_CHUNK_BYTES, end - begin), begin)
        if not chunk:
            raise EOFError(f"ends after {begin} bytes")
        yield chunk
        begin += len(chunk)
