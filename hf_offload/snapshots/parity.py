"""The loss of one process's snapshot is made good from those of the others.

Note: rotated parity
    The bytes of a snapshot, its record first, are cut into one chunk fewer than there are ranks: rank ``r`` has a chunk for
    every other rank ``s``. Rank ``s`` keeps the exclusive or of the chunks that the others have for it, and has none itself.
    So a rank that is lost takes its chunks with it and one row of parity, and of everything else the others have all but one
    term of each sum. With two ranks, each keeps a copy of the other's snapshot.
"""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_offload.ranks import Ranks
from hf_offload.snapshots.memory import MemoryFile

NAME = "parity"
"""Of what a record says of it."""

_BLOCK_BYTES = 4 << 20
_LENGTH = struct.Struct("<Q")


class Stream:
    """The bytes of one rank's snapshot, one after the other: record, then files. Behind their end, there are zeros."""

    def __init__(self, record: Mapping[str, Any], numbers: Sequence[int]):
        text = json.dumps({name: value for name, value in record.items() if name != NAME}, sort_keys=True).encode()
        self._parts: list[tuple[int, bytes | int, int]] = []  # first byte, content or descriptor, length
        end = 0
        contents: list[bytes | int] = [_LENGTH.pack(len(text)) + text, *numbers]
        sizes = [_LENGTH.size + len(text), *(nbytes for _, nbytes, _ in record["files"])]
        for content, nbytes in zip(contents, sizes, strict=False):  # that of the parity comes last
            self._parts.append((end, content, nbytes))
            end += nbytes
        self.nbytes = end

    def read(self, begin: int, into: Tensor) -> None:
        """The bytes from ``begin`` on, as many as ``into`` has."""
        into.zero_()
        view = into.numpy().data
        for start, content, nbytes in self._parts:
            first, last = max(begin, start), min(begin + len(view), start + nbytes)
            if first >= last:
                continue
            target = view[first - begin : last - begin]
            if isinstance(content, bytes):
                target[:] = content[first - start : last - start]
            else:
                _read(content, first - start, target)


class _Rebuilt:
    """A stream that is written, taken apart into its record and its files."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}
        self.files: list[MemoryFile] = []
        self._head = b""
        self._left: list[int] = []

    def write(self, data: bytes) -> None:
        if not self.record:
            self._head += data
            start = _LENGTH.size
            length = _LENGTH.unpack(self._head[:start])[0] if len(self._head) >= start else len(self._head)
            if len(self._head) < start + length:
                return
            self.record = json.loads(self._head[start : start + length])
            self._left = [nbytes for _, nbytes, _ in self.record["files"]]
            data, self._head = self._head[start + length :], b""
            self.files = [MemoryFile() for _ in self._left]
        view = memoryview(data)
        for number, file in enumerate(self.files):
            taken = view[: self._left[number]]
            file.write(taken)
            self._left[number] -= len(taken)
            view = view[len(taken) :]


def take(ranks: Ranks, stream: Stream, sizes: Sequence[int], file: MemoryFile) -> dict[str, Any]:
    """Write this rank's row of parity to ``file``; ``sizes`` are those of all streams. All ranks call it. Returns what the
    record says of it.
    """
    length, failure = _chunk_bytes(sizes), None
    for begin in range(0, length, _BLOCK_BYTES):
        count = min(_BLOCK_BYTES, length - begin)
        rows = torch.zeros(ranks.count, count, dtype=torch.uint8)
        for other in range(ranks.count):
            if other != ranks.number:
                stream.read(_chunk(ranks.number, other) * length + begin, rows[other])
        received = ranks.exchange(rows).numpy()
        try:
            file.write(np.bitwise_xor.reduce(received, axis=0).data)
        except OSError as error:  # the others wait for the rest
            failure = failure or error
    if failure is not None:
        raise failure
    return _described(file, length)


def rebuild(
    ranks: Ranks, lost: int, length: int, stream: Stream | None, parity: int | None
) -> tuple[dict[str, Any], list[int]] | None:
    """The record of rank ``lost`` and descriptors of its files, with its row of parity, in that rank. All ranks call it: the
    others with the stream of their snapshot, and with the descriptor of their row.
    """
    rebuilt, row = _Rebuilt(), MemoryFile() if ranks.number == lost else None
    failure: Exception | None = None
    for other in [rank for rank in range(ranks.count) if rank != lost] + [lost]:
        for begin in range(0, length, _BLOCK_BYTES):
            own = torch.zeros(min(_BLOCK_BYTES, length - begin), dtype=torch.uint8)
            if stream is not None and ranks.number == other:
                assert parity is not None
                _read(parity, begin, own.numpy().data)
            elif stream is not None:
                stream.read(_chunk(ranks.number, other) * length + begin, own)
            received = ranks.collect(own, lost)
            if row is not None:
                found = np.bitwise_xor.reduce(np.stack([each.numpy() for each in received]), axis=0)
                try:
                    row.write(found.data) if other == lost else rebuilt.write(found.tobytes())
                except (OSError, ValueError) as error:  # as in take()
                    failure = failure or error
    if failure is not None:
        raise OSError(f"it cannot be rebuilt: {failure}") from failure
    if row is None:
        return None
    return {**rebuilt.record, NAME: _described(row, length)}, [file.number for file in (*rebuilt.files, row)]


def _described(row: MemoryFile, length: int) -> dict[str, Any]:
    return {"files": [[row.nbytes, row.checksum]], "length": length}


def _chunk(owner: int, other: int) -> int:
    """Which chunk of its own the rank ``owner`` has for the rank ``other``."""
    return other if other < owner else other - 1


def _chunk_bytes(sizes: Sequence[int]) -> int:
    return -(-max(sizes) // (len(sizes) - 1))


def _read(number: int, begin: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(number, [into[done:]], begin + done)
        if not count:
            raise OSError("A file in memory is shorter than its record says.")
        done += count
