"""Files in memory that have no name.

Note: what is kept on a drive
    A file may lack ranges whose bytes are kept on a drive: it has holes there, which take no memory. Its checksum is that of
    the bytes before a range, the digest of the range, the bytes behind it, and so on. So it can be computed without these
    bytes when they are written, and from a file that has them all.
"""

import dataclasses
import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash

from hf_offload.snapshots import disk
from hf_offload.storage.kept import KeptRange, Span, digest_of, read_chunks

_PIECE_BYTES = 1 << 20
"""Copying this much or more through a map takes a core half as long as a system call does."""


class Writable(Protocol):
    """What contents are written to, from the first byte to the last."""

    def write(self, data: Any) -> int: ...

    def flush(self) -> None: ...

    def leave_out(self, parts: "Sequence[KeptRange | bytes]") -> None:
        """What comes next is on a drive, but for parts whose bytes are given."""

    def seek(self, count: int, whence: int) -> None:
        """Go on behind what was left out."""


Write = Callable[[Writable], object]
"""What writes the content of a file."""


@dataclasses.dataclass(frozen=True)
class Small:
    """Writes a file that is not a weight or a state of an optimizer, and is in memory with others of that kind."""

    content: Callable[[], bytes]

    def __call__(self, file: Writable) -> None:
        file.write(self.content())


def together(files: Mapping[str, Write]) -> dict[str, Write]:
    """The same, with one file of all small ones, which is last."""
    small = {name: write for name, write in files.items() if isinstance(write, Small)}

    def write_small(file: Writable) -> None:
        listed = []
        for name, write in small.items():
            content = write.content()
            file.write(content)
            listed.append([name, len(content), xxhash.xxh3_64_intdigest(content)])
        text = json.dumps(listed).encode()
        file.write(text + disk.LENGTH.pack(len(text)))

    large = {name: write for name, write in files.items() if name not in small}
    return large | ({disk.SMALL_FILES: write_small} if small else {})


class MemoryFile:
    """A file without a name that only this process, and those it is passed on to, can open. Of ``most_bytes``, it takes what
    is written.

    Attributes:
        ranges: What was left out: first byte, length, and where the bytes are.
    """

    ranges: list[tuple[int, int, list[Span]]]

    def __init__(self, most_bytes: int = 0) -> None:
        self._most_bytes = most_bytes
        self.number = os.memfd_create("hf_offload-snapshot", os.MFD_CLOEXEC)
        os.fchmod(self.number, 0o600)
        self._mapped: np.ndarray[Any, Any] | None = None
        self._holes: list[tuple[int, int]] = []
        self._left_out: Sequence[KeptRange | bytes] = ()
        self.begin()

    @property
    def checksum(self) -> int:
        """That of all that was written."""
        return self._digest.intdigest()

    def begin(self) -> None:
        """Write from the first byte on."""
        self.nbytes = 0
        self._former_holes = self._holes
        self._holes = []
        self.ranges = []
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

    def leave_out(self, parts: Sequence[KeptRange | bytes]) -> None:
        self._left_out = parts

    def seek(self, count: int, whence: int) -> None:
        parts, self._left_out = self._left_out, ()
        expected = sum(len(each) if isinstance(each, bytes) else each.end - each.begin for each in parts)
        if whence != os.SEEK_CUR or count != expected:
            raise OSError(f"{expected} bytes were to be left out, and not {count}.")
        for part in parts:
            if isinstance(part, bytes):
                self.write(part)
            else:
                self._leave_out(part)

    def _leave_out(self, part: KeptRange) -> None:
        spans = list(part.slot.spans(part.begin, part.end))
        if all(span.file is None for span in spans):  # too little for a block of the drive
            for span in spans:
                self.write(span.content)
            return
        digest = part.slot.digest(part.begin, part.end) if part.digest is None else part.digest
        self.ranges.append((self.nbytes, part.end - part.begin, spans))
        for span in spans:
            if span.file is None:
                self._write_piece(memoryview(span.content))
            else:
                self._make_hole(span.nbytes)
            self.nbytes += span.nbytes
        self._digest.update(digest)

    def _make_hole(self, count: int) -> None:
        hole = self.nbytes, count
        if self._former_holes[len(self._holes) : len(self._holes) + 1] != [hole]:
            os.ftruncate(self.number, self.nbytes)  # what comes next is written anew in any case
            os.ftruncate(self.number, max(self.nbytes + count, 0 if self._mapped is None else len(self._mapped)))
            self._former_holes = []
        self._holes.append(hole)

    def flush(self) -> None:
        """There is no buffer."""

    def end(self) -> None:
        """What was longer before ends here."""
        os.ftruncate(self.number, self.nbytes)

    def close(self) -> None:
        self._mapped = None
        os.close(self.number)


Ranges = Sequence[tuple[int, int]]
"""First byte and length of what is kept on a drive, or was, in the order of the file."""


def damage_of(number: int, nbytes: int, checksum: int, ranges: Ranges = ()) -> str | None:
    """What is wrong with a whole file that had this size and checksum; None if nothing is. Of ``ranges``, the checksum has
    the digest.
    """
    size = os.fstat(number).st_size
    if size != nbytes:
        return f"has {size} bytes instead of {nbytes}"
    found, done = xxhash.xxh3_64(), 0
    try:
        for begin, count in (*ranges, (nbytes, 0)):
            for chunk in read_chunks(number, done, begin - done):
                found.update(chunk)
            if count:
                found.update(digest_of(read_chunks(number, begin, count)))
            done = begin + count
    except EOFError as error:
        return str(error)
    return None if found.intdigest() == checksum else "does not match its checksum"
