"""Which range of which file a slot of the disk tier gets."""

import dataclasses
import errno
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from hf_offload.errors import StorageError, TierFullError
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.disk_io import DataFile
from hf_offload.storage.extents import Extents

_GROW_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A range of one file."""

    file: int
    offset: int
    nbytes: int


class DiskRoom:
    """Room in one or several files, within one budget over all of them. Thread-safe.

    A large slot is spread evenly over the files, so that all drives work on it; smaller ones go to the files in turn.
    Freed ranges are taken before a file is made larger, and files only grow: what was once preallocated stays for the
    next step. Files are enlarged through ``call_with_watchdog``, which may give up waiting for a call that goes on.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        granule_bytes: int,
        chunk_bytes: int,
        budget_bytes: int | None,
        call_with_watchdog: Callable[[Callable[[], None]], None] = lambda growth: growth(),
    ) -> None:
        self._files = files
        self._granule_bytes = granule_bytes
        self._chunk_bytes = chunk_bytes
        self._budget_bytes = budget_bytes
        self._call_with_watchdog = call_with_watchdog
        self._growing = threading.Lock()  # also by a growth that was given up
        self._extents = [Extents(granule_bytes=granule_bytes) for _ in files]
        self._next_file = itertools.cycle(range(len(files)))
        self._placing = threading.Lock()  # enlarging a file may take a while, and give() must not wait for that
        self._lock = threading.Lock()

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

    def give(self, pieces: Iterable[Piece]) -> None:
        """Return pieces that :meth:`place` handed out."""
        with self._lock:
            for piece in pieces:
                self._extents[piece.file].give(piece.offset, piece.nbytes)

    def place(self, room: int) -> list[Piece]:
        """Pieces of ``room`` bytes together. Raises ``TierFullError`` that names the limit."""
        if room == 0:
            return []
        with self._placing:
            if len(self._files) > 1 and room >= len(self._files) * self._chunk_bytes:
                pieces = self._stripe(room)
                if pieces is not None:
                    return pieces
            first = next(self._next_file)
            order = [(first + step) % len(self._files) for step in range(len(self._files))]
            refusals = []
            for file in order:
                piece = self._take(file, room)
                if piece is None:
                    piece, refusal = self._grow_and_take(file, room)
                    refusals.append(refusal)
                if piece is not None:
                    return [piece]
            return self._scatter(order, room, refusals)

    def _stripe(self, room: int) -> list[Piece] | None:
        """One piece in every file, cut at multiples of the chunk; None if a file has no place for its share."""
        count = len(self._files)
        chunks = -(-room // self._chunk_bytes)
        cuts = [min(room, chunks * file // count * self._chunk_bytes) for file in range(count)] + [room]
        pieces: list[Piece] = []
        for file, (start, end) in enumerate(itertools.pairwise(cuts)):
            try:
                piece = self._take(file, end - start) or self._grow_and_take(file, end - start)[0]
            except BaseException:
                self.give(pieces)
                raise
            if piece is None:
                self.give(pieces)
                return None
            pieces.append(piece)
        return pieces

    def _take(self, file: int, nbytes: int) -> Piece | None:
        with self._lock:
            offset = self._extents[file].take(nbytes)
        return None if offset is None else Piece(file, offset, nbytes)

    def _grow_and_take(self, file: int, nbytes: int) -> tuple[Piece | None, str]:
        """Enlarge the file by a generous step, or else by just enough; else None and the limit that was met."""
        with self._lock:
            needed = max(nbytes - self._extents[file].free_at_end_bytes, 0)
            capacity = self._extents[file].capacity_bytes
        step = max(needed, _GROW_BYTES // self._granule_bytes * self._granule_bytes)
        if self._budget_bytes is not None:
            allowed = (self._budget_bytes - self.occupied_bytes) // self._granule_bytes * self._granule_bytes
            if needed > allowed:
                return None, f"the budget of {format_bytes(self._budget_bytes)}"
            step = min(step, allowed)
        refusal = ""
        for size in dict.fromkeys((step, needed)):
            try:
                if size:
                    self._call_with_watchdog(partial(self._grow, file, size, capacity))
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise StorageError(
                        f"Enlarging {self._files[file]} by {format_bytes(size)} failed: {error.strerror} (errno "
                        f"{error.errno}). Check the drive, or name another directory."
                    ) from error
                refusal = f"the disk under {self._files[file].directory} ({error.strerror})"
                continue
            return self._take(file, nbytes), ""
        return None, refusal

    def _grow(self, file: int, nbytes: int, capacity: int) -> None:
        """Enlarge a file of ``capacity`` bytes, unless a growth that was given up has done so meanwhile."""
        with self._growing:
            if self._extents[file].capacity_bytes != capacity:
                return
            self._files[file].grow(nbytes)
            with self._lock:
                self._extents[file].grow(nbytes)

    def _scatter(self, order: list[int], room: int, refusals: list[str]) -> list[Piece]:
        """Fill the gaps between other slots, and what is left of the budget, so that it can be used to the last
        block.
        """
        pieces: list[Piece] = []
        left = room
        for file in order:
            with self._lock:
                found = self._extents[file].take_pieces(left)
            pieces += [Piece(file, offset, size) for offset, size in found]
            left -= sum(size for _, size in found)
        for file in order:
            size = left if self._budget_bytes is None else min(left, self._budget_bytes - self.occupied_bytes)
            size = size // self._granule_bytes * self._granule_bytes
            try:
                piece = self._grow_and_take(file, size)[0] if size > 0 else None
            except BaseException:
                self.give(pieces)
                raise
            if piece is not None:
                pieces.append(piece)
                left -= piece.nbytes
        if not left:
            return pieces
        self.give(pieces)
        raise TierFullError(
            f"No room for {format_bytes(room)} on disk: {format_bytes(self.used_bytes)} are in use, and what stands "
            "in the "
            f"way is {' and '.join(dict.fromkeys(refusals))}. Raise disk_budget, free disk space, add a directory, or "
            "let the tensor stay in memory."
        )
