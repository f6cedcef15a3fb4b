"""In which order parameters are updated, so that what the next ones need is read ahead."""

from collections.abc import Iterable

from hf_offload.optimizers.streamed.record import Record

_AHEAD = 8


class UpdateOrder:
    """That of the last step, and at first of the parameters as they were added."""

    def __init__(self) -> None:
        self._order: list[Record] = []
        self._places: dict[int, int] = {}
        self._seen: dict[int, Record] = {}

    def add(self, record: Record) -> None:
        """Another parameter."""
        self._places[id(record)] = len(self._order)
        self._order.append(record)

    def updated(self, record: Record) -> None:
        """A parameter was updated."""
        self._seen.setdefault(id(record), record)

    def begin_step(self) -> None:
        """What was seen since the last call is the order from now on; parameters that were not updated come last."""
        if self._seen:
            rest = [record for record in self._order if id(record) not in self._seen]
            self._order = [*self._seen.values(), *rest]
            self._places = {id(record): place for place, record in enumerate(self._order)}
            self._seen = {}

    def sorted(self, records: Iterable[Record]) -> list[Record]:
        """``records`` in this order."""
        return sorted(records, key=lambda record: self._places[id(record)])

    def read_ahead(self, record: Record | None, all_states: bool = False) -> None:
        """Begin to read what the rest of ``record`` and those after it need, or the first ones: for updates that are noted,
        and with ``all_states`` also for those that are not yet.
        """
        place = 0 if record is None else self._places[id(record)]
        for other in self._order[place : place + _AHEAD]:
            other.read_ahead(all_states)
