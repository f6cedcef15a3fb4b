"""Weights, gradients and state on their way in a simulated step: read ahead and written behind, in a window for each kind."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping

from hf_offload.plan.footprint import Footprint, Transfer
from hf_offload.plan.stores import Stores
from hf_offload.plan.timeline import Channel, Interval


@dataclasses.dataclass
class _Lane:
    """One kind: what is to be loaded, and (when it is there, bytes) of what arrives and of what is written."""

    window_bytes: int
    coming: collections.deque[Transfer] = dataclasses.field(default_factory=collections.deque)
    arriving: collections.deque[tuple[float, int]] = dataclasses.field(default_factory=collections.deque)
    writing: collections.deque[tuple[float, int]] = dataclasses.field(default_factory=collections.deque)
    arriving_bytes: int = 0
    writing_bytes: int = 0

    @property
    def has_room(self) -> bool:
        return bool(self.coming) and (
            not self.arriving or self.arriving_bytes + self.coming[0].nbytes <= self.window_bytes // 2
        )


class Transfers:
    """Those of a footprint. They share the links with ``stores``, and with loads, whose ends are in ``load_free``.

    Attributes:
        due: Segments at which any of them is due.
    """

    def __init__(
        self,
        footprint: Footprint,
        channels: Mapping[str, Channel],
        stores: Stores,  # type: ignore[type-arg]
        load_free: dict[str, float],
        intervals: list[Interval] | None,
    ):
        self._channels = channels
        self._stores = stores
        self._load_free = load_free
        self._intervals = intervals
        self._lanes: dict[str, _Lane] = {}
        self.due: dict[int, list[Transfer]] = {}
        for one in footprint.transfers:
            self.due.setdefault(one.at, []).append(one)
            lane = self._lanes.setdefault(one.kind, _Lane(footprint.transfer_windows.get(one.kind, 0)))
            if one.loads:
                lane.coming.append(one)

    def at(self, index: int, now_s: Callable[[], float]) -> Iterator[tuple[str, float, bool]]:
        """A segment begins: what it needs arrives, and what has changed leaves. Yields for whom compute has to wait, until
        when, and whether for a load.
        """
        for one in self.due.get(index, ()):
            lane = self._lanes[one.kind]
            if one.loads:
                # Loads of one segment are in the order in which they were begun.
                if not lane.arriving:
                    self._begin(lane, now_s())
                arrives_s, nbytes = lane.arriving.popleft()
                yield one.unit, arrives_s, True
                lane.arriving_bytes -= nbytes
                self.read_ahead(now_s())
                continue
            share = self._channels[one.tier].shared if self._load_free[one.tier] > now_s() else 1.0
            begin_s, end_s = self._stores.pass_by(one.nbytes, one.tier, now_s(), share)
            self._note("store", one, begin_s, end_s)
            lane.writing.append((end_s, one.nbytes))
            lane.writing_bytes += one.nbytes
            while lane.writing_bytes > lane.window_bytes // 2 and len(lane.writing) > 1:
                end_s, nbytes = lane.writing.popleft()
                lane.writing_bytes -= nbytes
                yield one.unit, end_s, False

    def read_ahead(self, now_s: float) -> None:
        """Begin to load what segments to come need, what comes first of each kind before the others."""
        while True:
            open_lanes = [lane for lane in self._lanes.values() if lane.has_room]
            if not open_lanes:
                return
            self._begin(min(open_lanes, key=lambda lane: lane.coming[0].at), now_s)

    def _begin(self, lane: _Lane, now_s: float) -> None:
        one = lane.coming.popleft()
        channel = self._channels[one.tier]
        begin_s = max(now_s, self._load_free[one.tier])
        share = channel.shared if self._stores.free_s(one.tier) > begin_s else 1.0
        end_s = self._load_free[one.tier] = begin_s + one.nbytes / (channel.load_bytes_per_s * share)
        lane.arriving.append((end_s, one.nbytes))
        lane.arriving_bytes += one.nbytes
        self._note("load", one, begin_s, end_s)

    def _note(self, channel: str, one: Transfer, begin_s: float, end_s: float) -> None:
        if self._intervals is not None:
            self._intervals.append(Interval(channel, f"{one.unit}: {one.kind}", begin_s, end_s))
