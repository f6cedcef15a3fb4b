"""Copies that backward has used and the graph still holds.

Under retain_graph and double backward every access unpacks again, so they would pile up.
"""

import collections
import weakref

from hf_offload.engine.record import Record, State


class ConsumedCopies:
    """Records whose bytes are in memory although backward has used them, oldest first."""

    def __init__(self) -> None:
        self._references: collections.OrderedDict[int, weakref.ref[Record]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._references)

    def add(self, record: Record) -> None:
        """Backward has used ``record``."""
        known = self._references.get(id(record))
        if known is None or known() is not record:  # an id is used again
            self._references[id(record)] = weakref.ref(record)

    def forget(self, key: int) -> None:
        """The record with that id is gone."""
        known = self._references.get(key)
        if known is not None and known() is None:  # else the id is used again already
            del self._references[key]

    def beyond(self, limit_bytes: int) -> list[Record]:
        """Take out the oldest, until the others have at most ``limit_bytes``."""
        held = []
        for key, reference in list(self._references.items()):
            record = reference()
            if record is None or record.buffer is None or id(record) != key:
                del self._references[key]
            elif record.state in (State.LOADED, State.STORED):
                held.append(record)
        excess = sum(record.nbytes for record in held) - limit_bytes
        taken: list[Record] = []
        for record in held:
            if excess <= 0:
                break
            excess -= record.nbytes
            del self._references[id(record)]
            taken.append(record)
        return taken
