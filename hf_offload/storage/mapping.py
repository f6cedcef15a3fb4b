"""Ranges of files as one piece of memory, which reads and writes the files."""

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def map_ranges(ranges: Sequence[tuple[int, int, int]], private: bool = False) -> torch.Tensor:
    """``(descriptor, offset, nbytes)``, one behind the other, as a ``uint8`` tensor that starts on a page. All but the last
    are whole pages.

    The tensor shares the files' bytes with everybody else, unless it is ``private``: then what is written to it is seen there
    alone. Raises ``OSError``.
    """
    total = sum(nbytes for _, _, nbytes in ranges)
    length = -(-total // mmap.PAGESIZE) * mmap.PAGESIZE
    if not length:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    address = _map(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    memory: Any = (ctypes.c_uint8 * total).from_address(address)
    weakref.finalize(memory, _libc().munmap, address, length).atexit = False
    sharing = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    for descriptor, offset, nbytes in ranges:
        _map(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, sharing | _FIXED, descriptor, offset)
        address += nbytes
    return torch.frombuffer(memory, dtype=torch.uint8)


def _map(address: int | None, nbytes: int, access: int, flags: int, descriptor: int, offset: int) -> int:
    found = _libc().mmap(address, nbytes, access, flags, descriptor, offset)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
