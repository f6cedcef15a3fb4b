"""The system calls under the disk tier: private files, direct I/O, whole reads and writes.

The module imports everywhere; what needs Linux is looked up when it is called.
"""

import collections
import contextlib
import ctypes
import dataclasses
import errno
import functools
import logging
import mmap
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hf_offload.errors import OffloadConfigError
from hf_offload.storage.file_systems import MEMORY_FILE_SYSTEMS, check_directory

logger = logging.getLogger(__name__)

T = TypeVar("T")

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_SYNC_FILE_RANGE_WRITE_AND_WAIT = 1 | 2 | 4
_UNSETTLED_RANGES = 8


# The calls that a drive answers. Callers look them up in this module, so a test can put a failing disk here.
def write_once(fd: int, data: memoryview, offset: int) -> int:
    """One write; returns how many bytes it took, which may be fewer."""
    return os.pwritev(fd, [data], offset)


def read_once(fd: int, into: memoryview, offset: int) -> int:
    """One read; returns how many bytes came, which may be fewer."""
    return os.preadv(fd, [into], offset)


def allocate_once(fd: int, offset: int, nbytes: int) -> None:
    """Reserve disk blocks and extend the file. ``fallocate(2)`` itself: the C library's ``posix_fallocate`` would write
    a byte into every block where the file system cannot reserve.
    """
    if _libc().fallocate(fd, 0, offset, nbytes) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def settle_once(fd: int, offset: int, nbytes: int) -> None:
    """Wait until what was written there through the page cache is on the drive. Raises OSError if write-back has failed
    anywhere in the file since the last call; the kernel reports it once.
    """
    if _libc().sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE_AND_WAIT) != 0:
        number = ctypes.get_errno()
        if number != errno.ENOSYS:
            raise OSError(number, os.strerror(number))
        os.fdatasync(fd)


def open_once(path: str, flags: int) -> int:
    """Open a file, private to this user and closed on exec."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def close_once(fd: int) -> None:
    """Close a file; its blocks go back to the file system if it has no name."""
    os.close(fd)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if hasattr(libc, "sync_file_range"):
        libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if hasattr(libc, "statx"):
        libc.statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    return libc


@dataclasses.dataclass(frozen=True)
class DirectIo:
    """Whether files under a directory take O_DIRECT, and the block that addresses, offsets and lengths must be
    multiples of.
    """

    usable: bool
    align_bytes: int
    reason: str


def probe_direct_io(directory: Path, file_system: str) -> DirectIo:
    """Find out by writing and reading a few blocks; what the kernel claims is only the first guess."""
    if file_system in MEMORY_FILE_SYSTEMS:
        return DirectIo(False, 1, f"{file_system} is memory: there is no drive behind it")
    if not hasattr(os, "O_DIRECT"):
        return DirectIo(False, 1, "this platform has no O_DIRECT")
    try:
        buffered_fd = open_nameless(directory)
        try:
            fd = _open_again(buffered_fd, os.O_DIRECT)
        finally:
            close_once(buffered_fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise
        return DirectIo(False, 1, f"{file_system} refuses O_DIRECT ({error.strerror})")
    try:
        claimed = _claimed_alignment(fd)
        for align in dict.fromkeys([claimed or 512, 512, 4096, 65536]):
            failure = _try_alignment(fd, align)
            if failure is None:
                source = "as the kernel reports" if align == claimed else "found by trying"
                return DirectIo(True, align, f"O_DIRECT with blocks of {align} bytes, {source}")
    finally:
        close_once(fd)
    return DirectIo(False, 1, f"no block size works with O_DIRECT on {file_system} ({failure})")


def _claimed_alignment(fd: int) -> int | None:
    """statx(2) with STATX_DIOALIGN (Linux 6.1): the larger of memory and offset alignment, or None."""
    if not hasattr(_libc(), "statx"):
        return None
    answer = ctypes.create_string_buffer(256)  # struct statx
    if _libc().statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return None
    mask, memory_align, offset_align = (int.from_bytes(answer.raw[at : at + 4], "little") for at in (0, 0x98, 0x9C))
    align = max(memory_align, offset_align)
    return align if mask & _STATX_DIOALIGN and align and align & (align - 1) == 0 else None


def _try_alignment(fd: int, align: int) -> str | None:
    """Move one block between odd multiples of ``align``, so that a coarser rule shows; None or what went wrong."""
    # An odd multiple of the block in memory and in the file: a drive that needs 4096 refuses 512 here.
    with mmap.mmap(-1, 4 * max(align, mmap.PAGESIZE)) as raw, memoryview(raw) as whole:
        pattern = secrets.token_bytes(align)
        source, target = whole[align : 2 * align], whole[3 * align : 4 * align]
        try:
            source[:] = pattern
            written = write_once(fd, source, align)
            got = read_once(fd, target, align)
            return None if written == got == align and target == pattern else f"blocks of {align} came back different"
        except OSError as error:
            return error.strerror or str(error)
        finally:
            source.release()
            target.release()


def check_can_hold_files(directory: str | os.PathLike[str]) -> None:
    """Raise the :class:`OffloadConfigError` that :class:`DataFile` would, and leave nothing behind."""
    check_directory(directory, quiet=True)
    try:
        os.close(open_nameless(Path(directory)))
    except OSError as error:
        raise _no_file_in(directory, error) from error


def _no_file_in(directory: str | os.PathLike[str], error: OSError) -> OffloadConfigError:
    return OffloadConfigError(
        f"directory {str(directory)!r} cannot hold an offload file: {error.strerror} (errno {error.errno}). Name a local "
        "directory that you can write to."
    )


def open_nameless(directory: Path) -> int:
    """A new, empty file that no other process can open, without a name from the start: a process that is killed at any
    moment leaves nothing. Where the file system cannot do that, the name is there for an instant.
    """
    if hasattr(os, "O_TMPFILE"):
        try:
            return open_once(str(directory), os.O_RDWR | os.O_TMPFILE | os.O_EXCL)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    path = directory / f".hf_offload-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        return open_once(str(path), os.O_RDWR | os.O_CREAT | os.O_EXCL)
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _open_again(fd: int, extra_flags: int) -> int:
    """The same file once more, with other flags. By its descriptor: a name could mean another file by now."""
    return open_once(f"/proc/self/fd/{fd}", os.O_RDWR | extra_flags)


class DataFile:
    """One private file without a name. Offsets and lengths follow ``direct.align_bytes``; safe from several
    threads.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)
        self.file_system = check_directory(self.directory)
        self.size_bytes = 0
        self.written: collections.Counter[str] = collections.Counter()
        self._counting = threading.Lock()
        self._in_memory = self.file_system in MEMORY_FILE_SYSTEMS
        self._unsettled: collections.deque[tuple[int, int]] = collections.deque()
        self._settling = threading.Lock()
        self._lost: str | None = None
        self._fd = self._buffered_fd = -1
        try:
            self.direct = probe_direct_io(self.directory, self.file_system)
            self._open()
        except OSError as error:
            raise _no_file_in(self.directory, error) from error
        logger.info("Offload file in %s (%s): %s.", self.directory, self.file_system, self.direct.reason)

    def _open(self) -> None:
        """Open the file twice where direct I/O is used: a write that the kernel cut off inside a block is finished
        through the second, buffered descriptor.
        """
        try:
            self._fd = self._buffered_fd = open_nameless(self.directory)
            if self.direct.usable:
                self._fd = _open_again(self._buffered_fd, os.O_DIRECT)
        except OSError:
            self.close()
            raise

    def __str__(self) -> str:
        return f"{self.directory} (a file without a name)"

    def grow(self, nbytes: int) -> None:
        """Reserve ``nbytes`` more at the end of the file. Raises OSError, and leaves the file as it was, if there is no
        room.
        """
        try:
            _uninterrupted(allocate_once, self._buffered_fd, self.size_bytes, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                with contextlib.suppress(OSError):
                    os.ftruncate(self._buffered_fd, self.size_bytes)
                raise
            os.ftruncate(self._buffered_fd, self.size_bytes + nbytes)
        self.size_bytes += nbytes

    @property
    def descriptor(self) -> int:
        """For those who read it by themselves, through the page cache."""
        return self._buffered_fd

    @property
    def written_bytes(self) -> int:
        """Bytes written so far; ``written`` says by which account of the run."""
        return self.written.total()

    def write(self, data: memoryview, offset: int, account: str = "") -> None:
        """Write all of ``data`` at ``offset``. Raises OSError."""
        self._check_nothing_lost()
        fd, done = self._fd, 0
        while done < len(data):
            count = _uninterrupted(write_once, fd, data[done:], offset + done)
            if count <= 0:
                raise OSError(errno.EIO, f"the drive took {done} of {len(data)} bytes and no more")
            done += count
            with self._counting:
                self.written[account] += count
            fd = self._next_fd(fd, offset + done)
        self._settle(offset, len(data))

    def read(self, into: memoryview, offset: int) -> None:
        """Fill ``into`` from ``offset``. Raises OSError."""
        fd, done = self._fd, 0
        cached = not self.direct.usable and not self._in_memory
        if cached:
            # A page whose write-back has failed may be dropped, and what lay on the drive before is read in its place.
            self._wait_until_settled(offset, len(into))
        while done < len(into):
            count = _uninterrupted(read_once, fd, into[done:], offset + done)
            if count <= 0:
                raise OSError(errno.EIO, f"the file ended after {done} of {len(into)} bytes")
            done += count
            fd = self._next_fd(fd, offset + done)
        if cached:
            # Read once, as a rule: the cached copy would only push other pages out of memory.
            os.posix_fadvise(self._fd, offset, len(into), os.POSIX_FADV_DONTNEED)

    def _next_fd(self, fd: int, position: int) -> int:
        # Direct I/O cannot go on from the middle of a block. The kernel keeps both descriptors coherent: direct calls
        # write back or drop the cached pages of their range first.
        return fd if position % self.direct.align_bytes == 0 else self._buffered_fd

    def _settle(self, offset: int, nbytes: int) -> None:
        """Keep buffered writes from filling the memory that offloading is meant to free.

        Dirty pages cannot be dropped, so write-back is started at once, and waited for only when several later ranges
        have been written, by when it is usually over; then the clean pages are dropped.
        """
        if self.direct.usable or self._in_memory:
            return
        os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)  # on dirty pages: starts the write-back
        self._unsettled.append((offset, nbytes))
        while len(self._unsettled) > _UNSETTLED_RANGES:
            try:
                offset, nbytes = self._unsettled.popleft()
            except IndexError:  # another worker was faster
                return
            self._wait_until_settled(offset, nbytes)
            os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _wait_until_settled(self, offset: int, nbytes: int) -> None:
        with self._settling:  # the kernel reports a failure to one caller only
            if self._lost is None:
                try:
                    _uninterrupted(settle_once, self._fd, offset, nbytes)
                except OSError as error:
                    self._lost = error.strerror or str(error)
        self._check_nothing_lost()

    def _check_nothing_lost(self) -> None:
        """Raises OSError if anything written to the file has not reached the drive: which bytes is unknown."""
        if self._lost is not None:
            raise OSError(errno.EIO, f"the drive lost something that had been written to this file ({self._lost})")

    def close(self) -> None:
        """Close the descriptors, which frees the disk space. Idempotent; a drive's error is logged: nothing is lost by it."""
        fds = {self._fd, self._buffered_fd} - {-1}
        self._fd = self._buffered_fd = -1
        for fd in fds:
            try:
                close_once(fd)
            except OSError as error:
                logger.warning("Closing the offload file in %s: %s.", self.directory, error.strerror)


def _uninterrupted(call: Callable[..., T], *arguments: Any) -> T:
    """The call's result; the call is repeated when a signal cuts it short."""
    while True:
        with contextlib.suppress(InterruptedError):
            return call(*arguments)
