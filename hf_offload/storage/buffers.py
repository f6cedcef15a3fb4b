"""Host buffers that tiers read and write: with a chosen address, so that direct I/O needs no staging copy; page-locked, so
that a device copies by itself; and mapped, which are ranges of files as one piece of memory.
"""

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

PAGE = 4096
# Smaller blocks are cut from the heap, wherever there is room: to hit the address by chance is not worth the attempt.
_LARGE_BYTES = 128 << 10

_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def empty_at_phase(nbytes: int, phase: int) -> torch.Tensor:
    """A fresh ``uint8`` buffer of ``nbytes`` bytes whose address is ``phase`` modulo :data:`PAGE`.

    Allocators that put large blocks on page boundaries give the address at once, and the block then has the size of the
    one it replaces, which keeps the heap from fragmenting. Otherwise one page more is allocated and the start shifted. In
    both cases the buffer is a storage of its own: operations exist that mishandle a tensor that begins inside of one.
    """
    if nbytes >= _LARGE_BYTES:
        exact = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if (phase - exact.data_ptr()) % PAGE == 0:
            return exact
        del exact
    raw = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu")
    shift = (phase - raw.data_ptr()) % PAGE
    return torch.from_numpy(raw.numpy()[shift : shift + nbytes])


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage, as a ``uint8`` buffer that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def pinned_empty(nbytes: int) -> torch.Tensor:
    """A page-locked ``uint8`` buffer of exactly ``nbytes`` bytes. Raises RuntimeError if none is available.

    PyTorch's allocator of pinned memory rounds each request up to a power of two, and locks the excess, too. On CUDA the
    buffer is a mapping that is registered with the driver; other accelerators have no call for that.
    """
    if nbytes == 0 or not torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=nbytes > 0)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    address, portable = buffer.data_ptr(), 1  # for every device of the process
    failure = runtime.cudaHostRegister(address, nbytes, portable)
    if failure != runtime.cudaError.success:
        raise RuntimeError(f"cudaHostRegister: {failure}")
    # The mapping outlives the storage's Python object, which lives as long as the storage does.
    weakref.finalize(buffer.untyped_storage(), _unregister, os.getpid(), torch.cuda.current_device(), address, mapping)
    return buffer


def _unregister(process: int, device: int, address: int, mapping: mmap.mmap) -> None:
    if os.getpid() == process:  # a child of fork has no driver to tell
        with torch.cuda.device(device):  # a thread without one would wake device 0
            torch.cuda.cudart().cudaHostUnregister(address)


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
    # Its end unmaps them, in C: what a handler of signals raises in a finalizer's Python would be lost.
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = torch.frombuffer(memory, dtype=torch.uint8, count=total)
    address = found.data_ptr()
    sharing = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    for descriptor, offset, nbytes in ranges:
        _map(address, nbytes, sharing, descriptor, offset)
        address += nbytes
    return found


def _map(address: int, nbytes: int, sharing: int, descriptor: int, offset: int) -> None:
    """Put a range of a file where memory was mapped."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc().mmap(address, nbytes, access, sharing | _FIXED, descriptor, offset) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    return libc
