"""Files in memory that have no name, with a checksum of what is written to them."""

import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash

_PIECE_BYTES = 1 << 20
"""Copying this much or more through a map takes a core half as long as a system call does."""
_CHUNK_BYTES = 8 << 20


class MemoryFile:
    """A file that only this process, and those it is passed on to, can open. It takes the memory of what is written, of at
    most ``most_bytes`` as a rule.
    """

    def __init__(self, most_bytes: int = 0) -> None:
        self._most_bytes = most_bytes
        self.number = os.memfd_create("hf_offload-snapshot", os.MFD_CLOEXEC)
        os.fchmod(self.number, 0o600)
        self._mapped: np.ndarray[Any, Any] | None = None
        self.begin()

    @property
    def checksum(self) -> int:
        """The checksum of all that was written."""
        return self._digest.intdigest()

    def begin(self) -> None:
        """Write from the first byte on."""
        self.nbytes = 0
        self._digest = xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        """Write ``data`` behind what was written before. Raises ``OSError``."""
        view = memoryview(data).cast("B")
        mapped = self._map(len(view)) if len(view) >= _PIECE_BYTES else None
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            if mapped is None:
                done = 0
                while done < len(piece):
                    done += os.pwrite(self.number, piece[done:], self.nbytes + start + done)
            else:
                np.copyto(mapped[start : start + len(piece)], np.frombuffer(piece, np.uint8))
            self._digest.update(piece)  # while it is in a cache
        self.nbytes += len(view)
        return len(view)

    def _map(self, count: int) -> "np.ndarray[Any, Any]":
        """Memory of the next ``count`` bytes. It is allocated: writing where the machine has no room ends the process."""
        end = self.nbytes + count
        os.posix_fallocate(self.number, self.nbytes, count)
        if self._mapped is None or len(self._mapped) < end:
            before = 0 if self._mapped is None else len(self._mapped)
            self._mapped = None
            size = max(end, 2 * before, self._most_bytes)  # all pages of another map have to be found again
            os.ftruncate(self.number, size)  # takes no memory
            self._mapped = np.frombuffer(mmap.mmap(self.number, size), np.uint8)
        return self._mapped[self.nbytes : end]

    def end(self) -> None:
        """All is written: what was longer before ends here."""
        os.ftruncate(self.number, self.nbytes)

    def close(self) -> None:
        """Give it up. It goes with the last process that has it open."""
        self._mapped = None
        os.close(self.number)


Write = Callable[[MemoryFile], object]
"""Writes the content of a file."""


def damage_of(number: int, nbytes: int, checksum: int) -> str | None:
    """What is wrong with a file that had this size and checksum, in words; None if nothing is."""
    size = os.fstat(number).st_size
    if size != nbytes:
        return f"has {size} bytes instead of {nbytes}"
    found = xxhash.xxh3_64()
    try:
        for chunk in _chunks_of(number, nbytes):
            found.update(chunk)
    except OSError as error:
        return f"cannot be read: {error}"
    return None if found.intdigest() == checksum else "does not match its checksum"


def _chunks_of(number: int, nbytes: int) -> Iterator[bytes]:
    """Not mapped: where a drive fails to read a map, it ends the process."""
    done = 0
    while done < nbytes:
        chunk = os.pread(number, min(_CHUNK_BYTES, nbytes - done), done)
        if not chunk:
            raise OSError(f"it ends after {done} bytes")
        yield chunk
        done += len(chunk)
