"""Files in memory that have no name."""

import os
from typing import Any, Protocol

import xxhash

_CHUNK_BYTES = 8 << 20


class Writable(Protocol):
    """What contents are written to, from the first byte to the last."""

    def write(self, data: Any) -> int: ...

    def flush(self) -> None: ...


class MemoryFile:
    """A file without a name that only this process, and those it is passed on to, can open."""

    def __init__(self) -> None:
        self.number = os.memfd_create("hf_offload-snapshot", os.MFD_CLOEXEC)
        os.fchmod(self.number, 0o600)
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
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            done = 0
            while done < len(chunk):
                done += os.pwrite(self.number, chunk[done:], self.nbytes + done)
            self._digest.update(chunk)
            self.nbytes += len(chunk)
        return len(view)

    def flush(self) -> None:
        """There is no buffer."""

    def end(self) -> None:
        """What was longer before ends here."""
        os.ftruncate(self.number, self.nbytes)

    def close(self) -> None:
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
