"""Which range of which file a slot of the disk tier gets."""

import collections
import dataclasses
import errno
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hf_offload.errors import StorageError, TierFullError
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.budgets import Budget
from hf_offload.storage.disk_io import DataFile
from hf_offload.storage.extents import Extents

Call = Callable[[Callable[[], Any]], Any]

_GROW_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A range of one file."""

    file: int
    offset: int
    nbytes: int


class DiskRoom:
    """Room in one or several files, within a budget. Thread-safe. Several tiers may share it.

    A large slot is spread evenly over the files, so that all drives work on it; smaller ones go to the files in turn.
    Freed ranges are taken before a file is made larger, and files only grow: what was once preallocated stays for the
    next step. Files are enlarged through a tier's ``call_with_watchdog``, which may give up waiting for a call that goes on.

    Every tier has a number (:meth:`join`). When the last one leaves, or the room is dropped, the files are closed.

    Attributes:
        files: The open files, one a directory.
        block_bytes: What direct I/O wants addresses, offsets and lengths to be multiples of.
        abandoned: Numbers of tiers that were dropped without :meth:`leave`.
        let_go: Pieces that are not held any more, as :meth:`hold` was called for them: from any thread, without a lock.
    """

    def __init__(
        self,
        files: list[DataFile],
        block_bytes: int,
        chunk_bytes: int,
        budget: Budget,
    ) -> None:
        self.files = files
        self.block_bytes = block_bytes
        self.abandoned: collections.deque[int] = collections.deque()
        self.let_go: collections.deque[tuple[Piece, ...]] = collections.deque()
        self._granule_bytes = _granule(block_bytes)
        self._chunk_bytes = chunk_bytes
        self._budget = budget
        self._growing = threading.Lock()  # also by a growth that was given up
        self._extents = [Extents(granule_bytes=self._granule_bytes) for _ in files]
        self._next_file = itertools.cycle(range(len(files)))
        self._placing = threading.Lock()  # enlarging a file may take a while, and give() must not wait for that
        self._lock = threading.Lock()
        self._closed = False
        self._numbers = itertools.count()
        self._taken: dict[int, set[Piece]] = {}  # by the tier's number
        self._holds: collections.Counter[Piece] = collections.Counter()
        self._waiting: set[Piece] = set()  # given back, and held
        self._close = weakref.finalize(self, _close_files, files, os.getpid(), budget)
        self._close.atexit = False

    @classmethod
    def open(
        cls,
        paths: Iterable[str | os.PathLike[str]],
        budget: Budget,
        call_with_watchdog: Callable[..., Any],
        chunk_bytes: int,
    ) -> "DiskRoom":
        """A new file in each directory. Arguments as those of ``DiskTier``.

        Raises :class:`~hf_offload.errors.OffloadConfigError` for a directory that cannot be used.
        """
        files: list[DataFile] = []
        try:
            for path in paths:
                file = call_with_watchdog(partial(DataFile, path), DataFile.close)
                files.append(file)
        except BaseException:
            for file in files:
                file.close()
            raise
        block_bytes = max(file.direct.align_bytes for file in files)
        return cls(files, block_bytes, round_down(chunk_bytes, block_bytes), budget)

    def join(self) -> int | None:
        """The number of another tier; None if the room is closed."""
        with self._lock:
            if self._closed:
                return None
            number = next(self._numbers)
            self._taken[number] = set()
            return number

    def leave(self, number: int) -> None:
        """Return all that a tier has taken. Closes the files if it was the last one."""
        with self._lock:
            self.abandoned.append(number)
            self._forget_abandoned()
            last = not self._taken
            self._closed |= last
        if last:
            self._close()  # which may take a while, and give() must not wait for that

    def _forget_abandoned(self) -> None:
        while self.abandoned:
            self._give(self._taken.pop(self.abandoned.popleft(), ()))
        while self.let_go:
            for piece in self.let_go.popleft():
                self._holds[piece] -= 1
                if not self._holds[piece]:
                    del self._holds[piece]
                    if piece in self._waiting:
                        self._waiting.remove(piece)
                        self._give([piece])

    def _give(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece in self._holds:
                self._waiting.add(piece)
            else:
                self._extents[piece.file].give(piece.offset, piece.nbytes)

    def hold(self, pieces: Iterable[Piece]) -> None:
        """Do not hand these pieces out, also when they are given back, until they were put to :attr:`let_go` as often as this
        was called.
        """
        with self._lock:
            self._holds.update(pieces)

    @property
    def occupied_bytes(self) -> int:
        """Disk space the files take."""
        return sum(extents.capacity_bytes for extents in self._extents)

    @property
    def used_bytes(self) -> int:
        """Disk space of the slots."""
        return sum(extents.used_bytes for extents in self._extents)

    def round_up(self, nbytes: int) -> int:
        """Bytes of disk that a slot of ``nbytes`` takes."""
        return -(-nbytes // self._granule_bytes) * self._granule_bytes

    def give(self, number: int, pieces: Iterable[Piece]) -> None:
        """Return pieces that :meth:`place` handed out to the tier of this number."""
        with self._lock:
            taken = self._taken.get(number, set())
            given = taken.intersection(pieces)
            taken.difference_update(given)
            self._give(given)

    def place(self, number: int, room: int, call_with_watchdog: Call) -> list[Piece]:
        """Pieces of ``room`` bytes together, for the tier of this number. Raises ``TierFullError`` that names the limit."""
        if room == 0:
            return []
        with self._placing:
            with self._lock:
                self._forget_abandoned()
            pieces = self._find(room, call_with_watchdog)
            with self._lock:
                self._taken.get(number, set()).update(pieces)  # a tier may be closed meanwhile
            return pieces

    def _find(self, room: int, call: Call) -> list[Piece]:
        """One piece in the next file, or one in every file if it is large, so that all drives work on it. What they have no
        room for fills the gaps between other slots, and what is left of the budget, so that it can be used to the last block.
        """
        shares = [(next(self._next_file), room)]
        if len(self.files) > 1 and room >= len(self.files) * self._chunk_bytes:
            shares = self._stripes(room)
        pieces: list[Piece] = []
        refusals: dict[str, None] = {}
        try:
            for file, nbytes in shares:
                pieces += self._take(file, nbytes) or self._grow_and_take(file, nbytes, refusals, call)
            for file, extents in enumerate(self._extents):
                with self._lock:
                    gaps = extents.take_pieces(room - _total(pieces))
                pieces += [Piece(file, offset, size) for offset, size in gaps]
            for file in range(len(self.files)):
                left, budget = room - _total(pieces), self._budget.left_bytes
                size = (left if budget is None else min(left, budget)) // self._granule_bytes * self._granule_bytes
                if size > 0:
                    pieces += self._grow_and_take(file, size, refusals, call)
            if _total(pieces) == room:
                return pieces
        except BaseException:
            self._return(pieces)
            raise
        self._return(pieces)
        raise TierFullError(
            f"No room for {format_bytes(room)} on disk: {format_bytes(self.used_bytes)} are in use, and the limit is "
            f"{' and '.join(refusals)}. Raise disk_budget, free disk space, add a directory, or let the tensor stay in "
            "memory."
        )

    def _stripes(self, room: int) -> list[tuple[int, int]]:
        """How much of the room is in each file, cut at multiples of the chunk."""
        count, chunks = len(self.files), -(-room // self._chunk_bytes)
        cuts = [min(room, chunks * file // count * self._chunk_bytes) for file in range(count)] + [room]
        return [(file, end - start) for file, (start, end) in enumerate(itertools.pairwise(cuts))]

    def _return(self, pieces: Iterable[Piece]) -> None:
        with self._lock:
            for piece in pieces:
                self._extents[piece.file].give(piece.offset, piece.nbytes)

    def _take(self, file: int, nbytes: int) -> list[Piece]:
        """A piece of the file's free room, if there is one as large."""
        with self._lock:
            offset = self._extents[file].take(nbytes)
        return [] if offset is None else [Piece(file, offset, nbytes)]

    def _grow_and_take(self, file: int, nbytes: int, refusals: dict[str, None], call: Call) -> list[Piece]:
        """A piece of the file, enlarged by a generous step, or else by just enough; or none, and the limit that was met is
        added to ``refusals``.
        """
        with self._lock:
            needed = max(nbytes - self._extents[file].free_at_end_bytes, 0)
            capacity = self._extents[file].capacity_bytes
        refusal = f"the budget of {format_bytes(self._budget.limit_bytes or 0)}"
        left = self._budget.left_bytes
        may_grow = left is None or left >= needed or self._growing.locked()  # else without a thread for every tensor
        steps = (max(needed, _GROW_BYTES // self._granule_bytes * self._granule_bytes), needed) if may_grow else ()
        for most in dict.fromkeys(steps):
            try:
                if most and not call(partial(self._grow, file, most, needed, capacity)):
                    break
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise StorageError(
                        f"Enlarging {self.files[file]} by up to {format_bytes(most)} failed: {error.strerror} (errno "
                        f"{error.errno}). Check the drive, or name another directory."
                    ) from error
                refusal = f"the disk under {self.files[file].directory} ({error.strerror})"
                continue
            if found := self._take(file, nbytes):
                return found
        refusals[refusal] = None
        return []

    def _grow(self, file: int, most: int, needed: int, capacity: int) -> bool:
        """Enlarge a file of ``capacity`` bytes, unless a growth that was given up has done so meanwhile; False if the budget
        does not have the ``needed`` bytes.
        """
        with self._growing:
            if self._extents[file].capacity_bytes != capacity:
                return True
            nbytes = self._budget.take_up_to(most, needed, self._granule_bytes)
            if nbytes is None:
                return False
            try:
                self.files[file].grow(nbytes)
            except BaseException:
                self._budget.give(nbytes)
                raise
            with self._lock:
                self._extents[file].grow(nbytes)
            return True


def _total(pieces: Iterable[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces)


def round_down(nbytes: int, block_bytes: int) -> int:
    """``nbytes`` in whole granules of a room with these blocks, at least one."""
    granule = _granule(block_bytes)
    return max(nbytes // granule, 1) * granule


def _granule(block_bytes: int) -> int:
    return max(block_bytes, 4096)


def _close_files(files: list[DataFile], owner_pid: int, budget: Budget) -> None:
    if os.getpid() != owner_pid:  # a forked child has closed its own copies already
        return
    for file in files:
        file.close()
        budget.give(file.size_bytes)
