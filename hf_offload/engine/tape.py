"""What one forward (or several, before their backward) packed, and the order in which backward asked for it."""

import weakref
from collections.abc import Sequence

from hf_offload.engine.record import Record
from hf_offload.plan.plan import Keeping


class Tape:
    """Records in the order in which they were packed; *places* are positions in the order that backward follows.

    ``next`` is the first place that reading ahead has not come to.
    """

    def __init__(self) -> None:
        self.records: list[weakref.ref[Record]] = []
        self.sizes: list[int] = []
        self.kept: set[int] = set()  # ordinals of what stays in memory because the plan says so
        self._kept_bytes: dict[str, int] = {}  # by unit
        self._excess_bytes = 0  # beyond what the plan counts with
        self.staying_bytes = 0  # of what backward will ask for first
        self.nbytes = 0
        self.largest = 0
        self.narrowed_bytes: int | None = None  # reading ahead found no memory: its window since then
        self.asked: list[int] = []
        self._seen: set[int] = set()
        self.order: Sequence[int] = ()
        self.place: list[int] = []
        self.next = 0

    def add(self, record: Record) -> None:
        record.tape = self
        record.ordinal = len(self.records)
        self.records.append(weakref.ref(record))
        self.sizes.append(record.nbytes)
        self.nbytes += record.nbytes
        self.largest = max(self.largest, record.nbytes)

    def may_keep(self, unit: str, nbytes: int, keeping: Keeping) -> bool:
        """Whether ``unit`` may keep so many more bytes in memory. Counts them if it may."""
        planned = keeping.unit_bytes.get(unit, 0)
        before = self._kept_bytes.get(unit, 0)
        excess = max(0, before + nbytes - max(planned, before))
        if self._excess_bytes + excess > keeping.spare_bytes:
            return False
        self._excess_bytes += excess
        self._kept_bytes[unit] = before + nbytes
        return True

    @property
    def in_backward(self) -> bool:
        return bool(self.asked)

    def ask(self, ordinal: int) -> None:
        """Note when backward asks for a record for the first time."""
        if ordinal not in self._seen:
            self._seen.add(ordinal)
            self.asked.append(ordinal)

    def whole_order(self) -> list[int]:
        """As backward asked, then what it never asked for, from the end."""
        return self.asked + [index for index in range(len(self.records) - 1, -1, -1) if index not in self._seen]

    def expect(self, order: Sequence[int]) -> None:
        """Backward begins: expect it to go in ``order``."""
        self.order = order
        self.place = [0] * len(order)
        for index, ordinal in enumerate(order):
            self.place[ordinal] = index
        self.next = 0
