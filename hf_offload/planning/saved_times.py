"""When the saved tensors of a measured micro-batch came, were asked for by backward, and went."""

import dataclasses
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_offload.engine.record import Record
from hf_offload.plan.footprint import BlockSpan, Saved, Segment

# Share of the saved bytes up to which it may be that another backward needs them again, and is not looked at.
_AGAIN = 0.02


@dataclasses.dataclass(frozen=True)
class MeasuredMicroBatch:
    """What was found of one micro-batch."""

    segments: tuple[Segment, ...]
    saved: tuple[Saved, ...]
    blocks: tuple[BlockSpan, ...]
    peak_live_bytes: int
    skipped_blocks: tuple[str, ...]
    accumulates: bool
    has_backward: bool
    walks_again: bool
    small_bytes: int


@dataclasses.dataclass(slots=True)
class _Times:
    unit: str
    nbytes: int
    packed: int
    needed: int | None = None
    released: int | None = None  # when autograd had let go of it
    dropped: int | None = None  # when the engine let go of the memory it was saved from
    died: int | None = None  # when everybody had
    walk: int = -1  # autograd's number of the backward that asked for it first
    is_asked_again: bool = False  # by another backward

    def gone(self, end: int) -> int:
        """The first segment in which nothing but autograd would have held it, had it stayed in memory."""
        dropped = end if self.dropped is None else self.dropped
        died = end if self.died is None else self.died
        return died if died > dropped else self.packed


class SavedTimes:
    """Of one micro-batch. Times are indices of its segments."""

    def __init__(self) -> None:
        self._times: dict[int, _Times] = {}
        self._records: dict[int, weakref.ref[Any]] = {}  # by id, which may be used again
        self._held: list[tuple[weakref.ref[Any], _Times]] = []
        self._asked: list[tuple[weakref.ref[Any], _Times]] = []  # and autograd has not let go of them
        self._by_storage: dict[int, list[_Times]] = {}

    def packed(self, record: Record, unit: str, now: int) -> None:
        """A tensor was saved."""
        times = self._times[id(record)] = _Times(unit, record.nbytes, now)
        self._records[id(record)] = reference = weakref.ref(record)
        self._held.append((reference, times))
        storage = record.storage_ref()
        if storage is not None:
            self._by_storage.setdefault(id(storage), []).append(times)

    def asked(self, record: Record, now: int, walk: int) -> str | None:
        """Backward is about to use it, in autograd's ``walk``; returns its unit, None if it was not saved here."""
        times, known = self._times.get(id(record)), self._records.get(id(record))
        if times is None:
            return None
        if known is not None and known() is record and times.needed is None:
            times.needed = now
            times.walk = walk
            self._asked.append((known, times))
        elif times.walk != walk:
            times.is_asked_again = True
        return times.unit

    def settle(self, now: int) -> None:
        """A segment has ended: what has left memory meanwhile, and what autograd has let go of."""
        held = []
        for reference, times in self._held:
            record = reference()
            if record is None or record.buffer is None or times.needed is not None:
                times.dropped = now
            else:
                held.append((reference, times))
        self._held = held
        # An operation asks for all that it saved before it runs: it is the record's end that tells when it has run.
        asked = []
        for reference, times in self._asked:
            if reference() is None:
                times.released = now
            else:
                asked.append((reference, times))
        self._asked = asked

    def died(self, key: int, now: int) -> None:
        """The storage whose Python object had the id ``key`` is gone."""
        for times in self._by_storage.pop(key, ()):
            times.died = now

    @property
    def walks_again(self) -> bool:
        """Whether a good part of what was saved was needed by more than one backward."""
        again = sum(times.nbytes for times in self._times.values() if times.is_asked_again)
        return again > _AGAIN * sum(times.nbytes for times in self._times.values())

    def saved(self, end: int) -> Iterator[Saved]:
        """What was saved, in a step of ``end`` segments."""
        for times in self._times.values():
            needed = end if times.needed is None else times.needed
            released = end if times.released is None else times.released
            yield Saved(
                times.unit, times.nbytes, times.packed, times.gone(end), needed, min(max(released, needed + 1), end)
            )

    def counted_in(self, segments: Sequence[Segment], in_backward: int) -> Iterator[Segment]:
        """``segments``, with bytes that were also held elsewhere, and had been counted as the engine's alone, and those that
        another step may have ``in_backward``.
        """
        end = len(segments)
        more = [0] * (end + 1)
        for times in self._times.values():
            if times.dropped is not None and times.gone(end) > times.dropped:
                more[times.packed] += times.nbytes
                more[times.dropped] -= times.nbytes
        for segment, nbytes in zip(segments, itertools.accumulate(more), strict=False):
            more_live = nbytes + (in_backward if segment.backward else 0)
            yield dataclasses.replace(segment, live_bytes=segment.live_bytes + more_live)


class SmallSaved:
    """Tensors of one micro-batch that are saved and stay in memory, being small. Keys are ids of storages.

    Attributes:
        most_bytes: Most of them at once.
        alone_bytes: Block -> what its forward left to autograd alone.
    """

    def __init__(self) -> None:
        self._nbytes: dict[int, int] = {}
        self._saved: dict[int, tuple[str | None, int]] = {}  # the only block that saved it, how often
        self._now = self.most_bytes = 0
        self.alone_bytes: dict[str, int] = {}

    def saved(self, key: int, nbytes: int, block: str | None) -> None:
        """A tensor was saved in ``block``."""
        before = self._nbytes.get(key, 0)
        self._nbytes[key] = max(nbytes, before)
        self._now += self._nbytes[key] - before
        self.most_bytes = max(self.most_bytes, self._now)
        first, count = self._saved.get(key, (block, 0))
        self._saved[key] = block if first == block else None, count + 1

    def end_block(self, block: str, seen: Mapping[int, Any]) -> None:
        """Its forward has ended: what it alone saved, and nothing but autograd holds, however often that has saved it."""
        nbytes = 0
        for key, (only, count) in self._saved.items():
            storage = seen[key]() if only == block else None
            if storage is not None and torch._C._storage_Use_Count(storage._cdata) == count + 1:  # with this one
                nbytes += seen[key].nbytes
        self.alone_bytes[block] = nbytes

    def died(self, key: int) -> None:
        """A storage is gone."""
        self._now -= self._nbytes.pop(key, 0)
        self._saved.pop(key, None)
