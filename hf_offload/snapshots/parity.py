"""The loss of one process's snapshot is made good from those of the others.

Note: rotated parity
    The bytes of a snapshot, file after file, are cut into one chunk fewer than there are ranks: rank ``r`` has a chunk for
    every other rank ``s``. Rank ``s`` keeps the exclusive or of the chunks that the others have for it, and has none itself.
    So a rank that is lost takes its chunks with it and one row of parity, and of everything else the others have all but one
    term of each sum. With two ranks, each keeps a copy of the other's snapshot.
"""

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hf_offload.ranks import Ranks
from hf_offload.snapshots.contents import MemoryFile

_BLOCK_BYTES = 4 << 20

Peers = Sequence[Sequence[Sequence[int]]]
"""Of each rank, size and checksum of each file."""


def take(ranks: Ranks, peers: Peers, numbers: Sequence[int], row: MemoryFile) -> None:
    """Write this rank's row of parity; ``numbers`` are the descriptors of its files. All ranks call it."""
    length, own = _chunk_bytes(peers), _sizes(peers, ranks.number)
    failure: OSError | None = None
    for begin in range(0, length, _BLOCK_BYTES):
        rows = torch.zeros(ranks.count, min(_BLOCK_BYTES, length - begin), dtype=torch.uint8)
        for other in range(ranks.count):
            if other != ranks.number:
                _read(numbers, own, _chunk(ranks.number, other) * length + begin, rows[other])
        received = ranks.exchange(rows).numpy()
        try:
            row.write(np.bitwise_xor.reduce(received, axis=0).data)
        except OSError as error:  # the others wait for the rest
            failure = failure or error
    if failure is not None:
        raise failure


def rebuild(ranks: Ranks, lost: int, peers: Peers, numbers: Sequence[int]) -> list[MemoryFile]:
    """The files of rank ``lost``, and its row of parity; nothing in the others. All ranks call it: the others with the
    descriptors of their files and rows.
    """
    length, own = _chunk_bytes(peers), _sizes(peers, ranks.number)
    sizes = [*_sizes(peers, lost), length]
    files = [MemoryFile(nbytes) for nbytes in sizes] if ranks.number == lost else []
    failure: Exception | None = None
    for other in [rank for rank in range(ranks.count) if rank != lost] + [lost]:
        for begin in range(0, length, _BLOCK_BYTES):
            block = torch.zeros(min(_BLOCK_BYTES, length - begin), dtype=torch.uint8)
            if ranks.number not in (lost, other):
                _read(numbers[:-1], own, _chunk(ranks.number, other) * length + begin, block)
            elif ranks.number != lost:
                _read(numbers[-1:], [length], begin, block)
            received = ranks.collect(block, lost)
            if ranks.number == lost:
                found = np.bitwise_xor.reduce(np.stack([each.numpy() for each in received]), axis=0).data
                first, last = (len(files) - 1, len(files)) if other == lost else (0, len(files) - 1)
                try:
                    _write(files[first:last], sizes[first:last], found)
                except OSError as error:  # as in take()
                    failure = failure or error
    if failure is not None:
        raise OSError(f"it cannot be rebuilt: {failure}") from failure
    for file in files:
        file.end()
    return files


def _read(numbers: Sequence[int], sizes: Sequence[int], begin: int, into: Tensor) -> None:
    """The bytes of files, one after the other, from ``begin`` on, as many as ``into`` has. Behind their end, it stays 0."""
    view, start = into.numpy().data, 0
    for number, nbytes in zip(numbers, sizes, strict=True):
        first, last = max(begin, start), min(begin + len(view), start + nbytes)
        while first < last:
            count = os.preadv(number, [view[first - begin : last - begin]], first - start)
            if not count:
                raise OSError("A file in memory is shorter than its record says.")
            first += count
        start += nbytes


def _write(files: Sequence[MemoryFile], sizes: Sequence[int], data: memoryview) -> None:
    """Go on writing files of these sizes, one after the other."""
    for file, nbytes in zip(files, sizes, strict=True):
        taken = data[: nbytes - file.nbytes]
        file.write(taken)
        data = data[len(taken) :]


def _sizes(peers: Peers, rank: int) -> list[int]:
    return [nbytes for nbytes, _ in peers[rank]]


def _chunk_bytes(peers: Peers) -> int:
    return -(-max(sum(_sizes(peers, rank)) for rank in range(len(peers))) // (len(peers) - 1))


def _chunk(owner: int, other: int) -> int:
    """Which chunk of its own the rank ``owner`` has for the rank ``other``."""
    return other if other < owner else other - 1
