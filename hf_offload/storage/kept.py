"""Bytes on a drive that stay there as they are, whatever becomes of their slots.

Note: redirect on write
    What is written back to a tier gets a slot of its own each time, and the former one is given back. So a state as of a step
    needs no copy: its slots are held (:class:`KeptSlot`), and their room is free once they are not needed any more.
"""

import contextlib
import contextvars
import dataclasses
import mmap
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_offload.storage.disk_io import DataFile
from hf_offload.storage.disk_room import DiskRoom, Piece

_MAP_NORESERVE = 0x4000
_now: "contextvars.ContextVar[tuple[Kept, object] | None]" = contextvars.ContextVar("hf_offload_kept", default=None)


@dataclasses.dataclass(frozen=True)
class Span:
    """Bytes that follow each other in one place: ``content``, or ``nbytes`` of ``file`` from ``offset`` on."""

    nbytes: int
    content: bytes = b""
    file: DataFile | None = None
    offset: int = 0


class KeptSlot:
    """The bytes of one slot of the disk tier as they are now, until :meth:`release`.

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

    def release(self) -> None:
        """The bytes are not needed any more. Idempotent."""
        self._held()

    def abandon(self) -> None:
        """They are needed for as long as their file is open."""
        self._held.detach()


@dataclasses.dataclass(frozen=True)
class KeptRange:
    """Bytes of a slot, and what their digest of 128 bits was when they were written, if it was taken."""

    slot: KeptSlot
    begin: int
    end: int
    digest: bytes | None


class Kept:
    """What a snapshot has on drives: weights, and what a state dict has there that was asked for inside of :func:`keeping`.
    Its tensors have no bytes.

    Attributes:
        refusal: Why it could not be kept there, if it could not.
    """

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self._slots: list[KeptSlot] = []
        self._changing: list[KeptSlot] = []
        self._tensors: dict[int, Tensor] = {}
        self._parts: dict[int, list[KeptRange | bytes]] = {}

    def placeholder(
        self,
        like: Tensor,
        shape: torch.Size,
        slots: Sequence[KeptSlot],
        parts: list[KeptRange | bytes],
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

    def parts_of(self, storage: object) -> "list[KeptRange | bytes] | None":
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


@contextlib.contextmanager
def keeping(kept: Kept, owner: object) -> Iterator[None]:
    """The state dict of ``owner``, asked for inside the block, may have placeholders of ``kept`` for what is on a drive. Not
    that of an object that ``owner`` asks in turn: what it does with the tensors is not known.
    """
    token = _now.set((kept, owner))
    try:
        yield
    finally:
        _now.reset(token)


def kept_for(owner: object) -> Kept | None:
    """What :func:`keeping` was called with for ``owner``."""
    found = _now.get()
    return found[0] if found is not None and found[1] is owner else None
