"""Bookkeeping of free ranges in a linear space: a file, or an arena of memory."""

import bisect


class Extents:
    """Hands out ranges of ``[0, capacity_bytes)``; all sizes and offsets are multiples of ``granule_bytes``.

    Best fit, lowest offset first. Neighbouring free ranges are joined as soon as they are given back: training frees
    all slots of a step, after which the next step finds one large range again and cuts it up in the same way, so
    repeating sizes neither fragment nor grow the space. Not thread-safe; the owner locks.
    """

    def __init__(self, capacity_bytes: int = 0, granule_bytes: int = 4096):
        self.granule_bytes = granule_bytes
        self.capacity_bytes = 0
        self.free_bytes = 0
        self._by_size: list[tuple[int, int]] = []  # sorted (size, offset) of every free range
        self._size_at: dict[int, int] = {}  # offset -> size
        self._start_of: dict[int, int] = {}  # end -> offset
        if capacity_bytes:
            self.grow(capacity_bytes)

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - self.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest free range: the largest request that finds room."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def free_at_end_bytes(self) -> int:
        """Size of the free range that touches the end: growing by less than a request makes room for it."""
        start = self._start_of.get(self.capacity_bytes)
        return 0 if start is None else self.capacity_bytes - start

    def grow(self, nbytes: int) -> None:
        """Add ``nbytes`` of free space at the end."""
        self._check(nbytes)
        offset = self.capacity_bytes
        self.capacity_bytes += nbytes
        self._join(offset, nbytes)

    def take(self, nbytes: int) -> int | None:
        """Offset of one range of ``nbytes``, or None when no free range is large enough."""
        self._check(nbytes)
        index = bisect.bisect_left(self._by_size, (nbytes, 0))
        if index == len(self._by_size):
            return None
        size, offset = self._by_size[index]
        self._remove(offset, size)
        if size > nbytes:
            self._insert(offset + nbytes, size - nbytes)
        return offset

    def take_pieces(self, nbytes: int) -> list[tuple[int, int]]:
        """``[(offset, size), ...]`` of at most ``nbytes`` together, largest ranges first; fewer when less is free."""
        pieces = []
        while nbytes and self._by_size:
            size = min(self._by_size[-1][0], nbytes)
            offset = self.take(size)
            assert offset is not None  # the largest free range holds it
            pieces.append((offset, size))
            nbytes -= size
        return pieces

    def give(self, offset: int, nbytes: int) -> None:
        """Return a range that was taken."""
        self._check(nbytes)
        if not 0 <= offset <= self.capacity_bytes - nbytes:
            raise ValueError(
                f"Range [{offset}, {offset + nbytes}) lies outside the {self.capacity_bytes} bytes managed here."
            )
        self._join(offset, nbytes)

    def _check(self, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % self.granule_bytes:
            raise ValueError(f"{nbytes} is not a positive multiple of {self.granule_bytes} bytes.")

    def _join(self, offset: int, nbytes: int) -> None:
        after = self._size_at.get(offset + nbytes)
        if after is not None:
            self._remove(offset + nbytes, after)
            nbytes += after
        before = self._start_of.get(offset)
        if before is not None:
            size = self._size_at[before]
            self._remove(before, size)
            offset, nbytes = before, nbytes + size
        self._insert(offset, nbytes)

    def _insert(self, offset: int, size: int) -> None:
        bisect.insort(self._by_size, (size, offset))
        self._size_at[offset] = size
        self._start_of[offset + size] = offset
        self.free_bytes += size

    def _remove(self, offset: int, size: int) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (size, offset))]
        del self._size_at[offset]
        del self._start_of[offset + size]
        self.free_bytes -= size
