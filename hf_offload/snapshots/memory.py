"""Files in memory that have no name."""

import mmap
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import xxhash

_CHUNK_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20
"""Copying this much or more through a map takes a core half as long as a system call does."""


class Writable(Protocol):
    """What contents are written to, from the first byte to the last."""

    def write(self, data: Any) -> int: ...

    def flush(self) -> None: ...


Write = Callable[[Writable], object]
"""What writes the content of a file."""


class MemoryFile:
    """A file without a name that only this process, and those it is passed on to, can open. Of ``most_bytes``, it takes what
    is written.
    """

    def __init__(self, most_bytes: int = 0) -> None:
        self._most_bytes = most_bytes
        self.number = os.memfd_create("hf_offload-snapshot", os.MFD_CLOEXEC)
        os.fchmod(self.number, 0o600)
        self._mapped: np.ndarray[Any, Any] | None = None
        self.begin()

    @property
    def checksum(self) -> int:
        """That of all that was written."""
        return self._digest.intdigest()

    def begin(self) -> None:
        """Write from the first byte on."""
        self.nbytes = 0
        self._digest = xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        mapped = self._map(len(view)) if len(view) >= _PIECE_BYTES else None
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            if mapped is None:
                self._write_piece(piece)
            else:
                np.copyto(mapped[start : start + len(piece)], np.frombuffer(piece, np.uint8))
            self._digest.update(piece)  # while it is in a cache
        self.nbytes += len(view)
        return len(view)

    def _write_piece(self, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            done += os.pwrite(self.number, piece[done:], self.nbytes + done)

    def _map(self, count: int) -> "np.ndarray[Any, Any]":
        """Memory of the next ``count`` bytes. It is there: a write to what the machine has no room for ends the process."""
        end = self.nbytes + count
        os.posix_fallocate(self.number, self.nbytes, count)
        if self._mapped is None or len(self._mapped) < end:
            before = 0 if self._mapped is None else len(self._mapped)
            self._mapped = None
            size = max(end, 2 * before, self._most_bytes)  # another map is one whose pages are all to be found again
            os.ftruncate(self.number, size)  # takes no memory
            self._mapped = np.frombuffer(mmap.mmap(self.number, size), np.uint8)
        return self._mapped[self.nbytes : end]

    def flush(self) -> None:
        """There is no buffer."""

    def end(self) -> None:
        """What was longer before ends here."""
        os.ftruncate(self.number, self.nbytes)

    def close(self) -> None:
        self._mapped = None
        os.close(self.number)


def damage_of(number: int, nbytes: int, checksum: int) -> str | None:
    """What is wrong with a file that had this size and checksum; None if nothing is."""
    size = os.fstat(number).st_size
    if size != nbytes:
        return f"has {size} bytes instead of {nbytes}"
    found, done = xxhash.xxh3_64(), 0
    while done < size:  # not mapped into memory, where a drive that fails ends the process
        chunk = os.pread(number, _CHUNK_BYTES, done)
        if not chunk:
            return f"ends after {done} bytes"
        found.update(chunk)
        done += len(chunk)
    return None if found.intdigest() == checksum else "does not match its checksum"
