"""The RAM tier: slots in large arenas of (pinned) host memory."""

import bisect
import ctypes
import dataclasses
import functools
import itertools
import logging
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from hf_offload.errors import OffloadConfigError, StorageError, TierFullError
from hf_offload.interrupts import signals_deferred
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.budgets import Budget
from hf_offload.storage.buffers import PAGE, empty_at_phase, pinned_empty
from hf_offload.storage.extents import Extents
from hf_offload.storage.queued import QueuedSlot, QueuedTier, QueuedTransfer, memory
from hf_offload.storage.service import ACTIVATIONS, RunStorage
from hf_offload.storage.tier import Slot

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 16 << 20
_THREADS = 2


@dataclasses.dataclass(slots=True, eq=False)
class _Arena:
    number: int
    data: torch.Tensor
    extents: Extents

    @property
    def is_idle(self) -> bool:
        return self.extents.used_bytes == 0

    @property
    def room(self) -> tuple[int, int]:
        """By which arenas are sorted: the largest slot that fits, then the age."""
        return self.extents.largest_free_bytes, self.number


@dataclasses.dataclass(slots=True, eq=False)
class RamSlot(QueuedSlot):
    """A page-aligned range of an arena."""

    arena: _Arena | None = None
    offset: int = 0
    checksums: list[int] = dataclasses.field(default_factory=list)

    @property
    def location(self) -> str:
        return "RAM"


class RamTier(QueuedTier):
    """A tier in host memory.

    Slots are rounded up to whole pages and cut from arenas.

    Args:
        budget_bytes: Without ``storage``, most bytes of host memory, free room in the arenas included. Default: no limit.
        pinned: Page-locked memory, which an accelerator can copy to and from by itself (:meth:`host_view`).
        arena_bytes: Size of an arena; a larger slot gets its own.
        retained_bytes: Arenas without a slot are kept warm for reuse up to this many bytes. Default: all of them if
            pinned, because pinning is slow, otherwise 1 GiB.
        checksum: Compare a CRC-32 of every buffer before :meth:`write` with one after :meth:`read`.
        storage: The run's, whose RAM budget holds for all its tiers together. Default: one for this tier alone.
        account: What the bytes are, for the run's counters.
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        *,
        pinned: bool = False,
        arena_bytes: int = 64 << 20,
        retained_bytes: int | None = None,
        checksum: bool = False,
        storage: RunStorage | None = None,
        account: str = ACTIVATIONS,
    ):
        storage = RunStorage(ram_bytes=budget_bytes) if storage is None else storage
        super().__init__("ram", storage, account, write_threads=_THREADS, read_threads=_THREADS)
        storage.ram_tiers.add(self)
        self._budget = storage.ram
        self.pinned = pinned
        self.checksum = checksum
        self._arena_bytes = arena_bytes
        self._retained_bytes = retained_bytes if retained_bytes is not None or pinned else 1 << 30
        self._numbers = itertools.count()
        self._arenas: dict[int, _Arena] = {}
        self._rooms: list[tuple[int, int]] = []  # of all arenas, sorted: none is asked in vain
        self._idle_bytes = 0  # of arenas without a slot
        weakref.finalize(self, _give_all, self._arenas, self._budget).atexit = False

    @property
    def occupied_bytes(self) -> int:
        """Host memory held, free room included."""
        return sum(arena.data.numel() for arena in self._arenas.values())

    @signals_deferred
    def reserve(self, nbytes: int, place: str | None = None) -> RamSlot:
        self._check_usable("reserve")
        room = -(-nbytes // PAGE) * PAGE
        with self._lock:
            self._check_usable("reserve")
            slot = RamSlot(nbytes, room_bytes=room)
            if room:
                slot.arena, slot.offset = self._take(room)
            self.stats.reserve(room)
        return slot

    def host_view(self, slot: Slot) -> torch.Tensor | None:
        """The slot's memory, valid until :meth:`free`. The slot counts as filled from now on.

        None with ``checksum``, which only :meth:`write` and :meth:`read` can compare.
        """
        assert isinstance(slot, RamSlot)
        if self.checksum:
            return None
        if slot.arena is None:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        slot.filled = True
        return slot.arena.data[slot.offset : slot.offset + slot.nbytes]

    def map(self, slot: Slot, private: bool = False) -> torch.Tensor | None:
        assert isinstance(slot, RamSlot)
        if slot.arena is None:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        slot.checksums = []  # others may write from now on
        # A storage of its own, whose pointer can be swapped.
        content = slot.arena.data[slot.offset : slot.offset + slot.nbytes]
        return content.clone() if private else torch.from_numpy(content.numpy())

    def _take(self, room: int) -> tuple[_Arena, int]:
        # The fullest arena that has room: idle ones stay idle, and can be dropped.
        index = bisect.bisect_left(self._rooms, (room, 0))
        arena = self._arenas[self._rooms[index][1]] if index < len(self._rooms) else self._new_arena(room)
        self._forget_room(arena)
        offset = arena.extents.take(room)
        assert offset is not None  # its largest range holds it
        self._note_room(arena)
        return arena, offset

    def _new_arena(self, room: int) -> _Arena:
        most = max(room, self._arena_bytes)
        size = self._budget.take_up_to(most, room, PAGE)
        if size is None:  # arenas without a slot may be too small for this one, yet use up the budget
            self._drop_idle(0)
            size = self._budget.take_up_to(most, room, PAGE)
        if size is None:
            raise TierFullError(
                f"No room for {format_bytes(room)} in RAM: {format_bytes(self.stats.used_bytes)} are in use and "
                f"{format_bytes(self._budget.taken_bytes)} held, and the budget is "
                f"{format_bytes(self._budget.limit_bytes or 0)}. "
                "Raise ram_budget, let a disk tier take what does not fit, or let the tensor stay where it is."
            )
        try:
            data = self._allocate(size)
        except BaseException:
            self._budget.give(size)
            raise
        arena = _Arena(next(self._numbers), data, Extents(size))
        self._arenas[arena.number] = arena
        self._note_room(arena)
        return arena

    def _note_room(self, arena: _Arena) -> None:
        bisect.insort(self._rooms, arena.room)
        self._idle_bytes += arena.data.numel() * arena.is_idle

    def _forget_room(self, arena: _Arena) -> None:
        """Before what an arena has room for changes, or it goes."""
        del self._rooms[bisect.bisect_left(self._rooms, arena.room)]
        self._idle_bytes -= arena.data.numel() * arena.is_idle

    def _allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return pinned_empty(nbytes) if self.pinned else empty_at_phase(nbytes, 0)
        except RuntimeError as error:
            if self.pinned and not torch.accelerator.is_available():
                raise OffloadConfigError("Pinned memory needs an accelerator: use pinned=False on a CPU.") from error
            raise TierFullError(
                f"The system gave no {format_bytes(nbytes)} of {'pinned ' if self.pinned else ''}memory: {error}. Set "
                "a smaller ram_budget."
            ) from error

    def drop_idle(self) -> None:
        """Give back the arenas without a slot: something else of the run needs the memory."""
        with self._lock:
            self._drop_idle(0)

    def _drop_idle(self, keep_bytes: int | None) -> None:
        if keep_bytes is None or self._idle_bytes <= keep_bytes:
            return
        for arena in reversed(list(self._arenas.values())):
            if arena.is_idle:
                self._forget_room(arena)
                del self._arenas[arena.number]
                self._budget.give(arena.data.numel())
                if self._idle_bytes <= keep_bytes:
                    return

    def _give_back(self, slot: QueuedSlot) -> None:
        assert isinstance(slot, RamSlot)
        arena, slot.arena = slot.arena, None
        self.stats.release(slot.room_bytes)
        if arena is not None and arena.number in self._arenas:  # else the tier is closed
            self._forget_room(arena)
            arena.extents.give(slot.offset, slot.room_bytes)
            self._note_room(arena)
            self._drop_idle(self._retained_bytes)

    def _prepare(self, transfer: QueuedTransfer) -> Sequence[tuple[int, int, int]]:
        nbytes = len(transfer.part)
        starts = range(0, nbytes, _CHUNK_BYTES) or range(1)
        if nbytes < transfer.slot.nbytes:
            transfer.payload = []
        elif transfer.kind == "write":
            transfer.payload = [0] * len(starts) if self.checksum else []
        else:
            assert isinstance(transfer.slot, RamSlot)
            transfer.payload = transfer.slot.checksums
        return [(index, start, min(_CHUNK_BYTES, nbytes - start)) for index, start in enumerate(starts)]

    def _work(self, transfer: QueuedTransfer, part: Any) -> None:
        index, start, nbytes = part
        slot = transfer.slot
        assert isinstance(slot, RamSlot)
        if slot.arena is None or not nbytes:
            return
        outside, inside = (
            transfer.address + start,
            slot.arena.data.data_ptr() + slot.offset + transfer.part.start + start,
        )
        copy = functools.partial(ctypes.memmove, inside, outside, nbytes)
        if transfer.kind == "read":
            copy = functools.partial(ctypes.memmove, outside, inside, nbytes)
        elif transfer.payload:
            transfer.payload[index] = zlib.crc32(memory(outside, nbytes))
        self.stats.begin(transfer.kind)
        try:
            copy()
        finally:
            self.stats.end(transfer.kind, nbytes)
        if (
            transfer.kind == "read"
            and transfer.payload
            and zlib.crc32(memory(outside, nbytes)) != transfer.payload[index]
        ):
            raise StorageError(
                f"{nbytes} bytes kept in RAM have changed since they were stored: their checksums differ. The memory "
                "is faulty; do not trust this run's result."
            )

    def _written(self, transfer: QueuedTransfer, outcome: str) -> None:
        if outcome == "done":
            assert isinstance(transfer.slot, RamSlot)
            transfer.slot.checksums = transfer.payload

    def _shut(self) -> None:
        with self._lock:
            _give_all(self._arenas, self._budget)
            self._rooms.clear()
            self._idle_bytes = 0


def _give_all(arenas: dict[int, _Arena], budget: Budget) -> None:
    for arena in arenas.values():
        budget.give(arena.data.numel())
    arenas.clear()
