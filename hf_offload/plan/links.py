"""Bytes on their way over links in a simulated step: saved tensors, and weights, gradients and state, which are read ahead
and written behind in a window for each kind.
"""

import collections
from collections.abc import Mapping, Sequence

from hf_offload.plan import rules
from hf_offload.plan.footprint import Footprint, Transfer
from hf_offload.plan.schedule import Item
from hf_offload.plan.state_placement import WEIGHTS
from hf_offload.plan.timeline import Channel, Interval


class Stores:
    """Saved tensors on their way to all tiers: when each leaves memory, and when the tier has it.

    Attributes:
        leaving: What leaves memory, in the order in which it was stored. The player takes out what has left.
    """

    def __init__(self, channels: Mapping[str, Channel]):
        self._channels = channels
        self._free_s = dict.fromkeys(channels, 0.0)
        self._link_free_s = 0.0
        self._queues: dict[str, collections.deque[Item]] = {tier: collections.deque() for tier in channels}
        self.leaving: collections.deque[Item] = collections.deque()
        self._ring: collections.deque[tuple[float, int]] = collections.deque()  # when each chunk goes, and its size
        self._ring_used = 0
        self._chunks: dict[int, tuple[int, ...]] = {}  # of the tier behind the ring: size -> the pieces that pass it

    @property
    def oldest_leaves_s(self) -> float | None:
        """When the oldest entry leaves memory that still is there."""
        return self.leaving[0].leaves_s if self.leaving else None

    @property
    def copied_s(self) -> float:
        """When all copies to pinned memory have ended."""
        return self._link_free_s

    def free_s(self, tier: str) -> float:
        """Until when the tier writes."""
        return self._free_s[tier]

    def begin(self, entry: Item, tier: str, now_s: float, loads_until_s: float) -> float:
        """Store ``entry``. Returns until when forward has to wait for room in the ring; ``now_s`` if there is.

        Until ``loads_until_s``, loads take their part of the bandwidth from what begins then.
        """
        channel = self._channels[tier]
        if channel.ring_bytes:
            now_s = self._through_the_ring(entry, tier, now_s, loads_until_s)
        else:
            free_s = self._free_s[tier] if channel.link_bytes_per_s is None else self._link_free_s
            entry.begins_s = max(now_s, free_s)
            share = channel.shared if loads_until_s > entry.begins_s else 1.0
            entry.leaves_s = entry.begins_s + entry.nbytes / (channel.store_bytes_per_s * share)
            entry.stored_s = self._free_s[tier] = entry.leaves_s
            if channel.link_bytes_per_s is None:
                self._queues[tier].append(entry)
            else:
                self._link_free_s = entry.leaves_s
                entry.stored_s = now_s  # in stream order it is there: a load waits for the copy by itself
        self.leaving.append(entry)
        return now_s

    def pass_by(self, nbytes: int, tier: str, now_s: float, share: float) -> tuple[float, float]:
        """Bytes that are no entry take their turn on the links. Returns when the tier begins, and when it has them."""
        channel = self._channels[tier]
        if channel.link_bytes_per_s is None:
            begin_s = max(now_s, self._free_s[tier])
        else:
            begin_s = max(now_s, self._link_free_s)
            self._link_free_s = begin_s + nbytes / channel.link_bytes_per_s
            if channel.ring_bytes:  # chunks follow each other through it
                begin_s = max(begin_s, self._free_s[tier])
        end_s = begin_s + nbytes / (channel.store_bytes_per_s * share)
        self._free_s[tier] = max(end_s, self._link_free_s)
        return begin_s, self._free_s[tier]

    def _through_the_ring(self, entry: Item, tier: str, now_s: float, loads_until_s: float) -> float:
        # A good part of a search's time is spent here.
        channel, ring, used = self._channels[tier], self._ring, self._ring_used
        assert channel.link_bytes_per_s is not None, "a ring has a link before it"
        limit = rules.ring_bytes_shared(channel.ring_bytes)
        link_bytes_per_s, alone = channel.link_bytes_per_s, channel.store_bytes_per_s
        beside_loads = alone * channel.shared
        link_free_s, free_s = self._link_free_s, self._free_s[tier]
        entry.begins_s = -1.0
        chunks = self._chunks.get(entry.nbytes)
        if chunks is None:
            chunks = tuple(rules.chunk_sizes(entry.nbytes, rules.chunk_bytes(channel.ring_bytes)))
            self._chunks[entry.nbytes] = chunks
        for chunk in chunks:
            while ring and ring[0][0] <= now_s:
                used -= ring.popleft()[1]
            if used + chunk > limit:
                while not rules.has_ring_room(used, chunk, limit):
                    now_s = ring[0][0]
                    while ring and ring[0][0] <= now_s:
                        used -= ring.popleft()[1]
            link_free_s = (now_s if now_s > link_free_s else link_free_s) + chunk / link_bytes_per_s
            begin_s = link_free_s if link_free_s > free_s else free_s
            free_s = begin_s + chunk / (beside_loads if loads_until_s > begin_s else alone)
            if entry.begins_s < 0:
                entry.begins_s = begin_s
            ring.append((free_s, chunk))
            used += chunk
        self._ring_used, self._link_free_s, self._free_s[tier] = used, link_free_s, free_s
        entry.leaves_s, entry.stored_s = link_free_s, free_s
        self._queues[tier].append(entry)
        return now_s

    def cancel(self, entry: Item, now_s: float) -> None:
        """Backward wants ``entry``: a store that has not begun is not made, and those behind it are sooner."""
        for tier, queue in self._queues.items():
            while queue and queue[0].begins_s <= now_s:
                queue.popleft()
            if entry in queue:
                place = queue.index(entry)
                seconds = entry.stored_s - entry.begins_s
                for later in list(queue)[place + 1 :]:
                    later.begins_s -= seconds
                    later.stored_s -= seconds
                    if self._channels[tier].link_bytes_per_s is None:
                        later.leaves_s -= seconds
                self._free_s[tier] -= seconds
                queue.remove(entry)
                if self._channels[tier].link_bytes_per_s is None:
                    self.leaving.remove(entry)


class _Lane:
    """One kind: what is to be loaded, and (when it is there, bytes) of what arrives and of what is written."""

    __slots__ = (
        "_coming", "_next", "_spare_bytes", "_to_write", "_writes", "arriving", "arriving_bytes", "half_bytes", "writing",
        "writing_bytes",
    )  # fmt: skip

    def __init__(self, coming: Sequence[Transfer], to_write: int, window_bytes: int, spare_bytes: int):
        self._coming = coming
        self._next = 0
        self._to_write = to_write
        self._writes = False  # what is written of it in this step has begun
        self._spare_bytes = spare_bytes
        self.half_bytes = window_bytes // 2
        self.arriving: collections.deque[tuple[float, int]] = collections.deque()
        self.writing: collections.deque[tuple[float, int]] = collections.deque()
        self.arriving_bytes = self.writing_bytes = 0

    def peek(self) -> Transfer | None:
        """What may begin to arrive now."""
        if self._next == len(self._coming):
            return None
        one = self._coming[self._next]
        return one if not self.arriving or self.arriving_bytes + one.nbytes <= self.half_bytes else None

    def pop(self) -> Transfer:
        self._next += 1
        return self._coming[self._next - 1]

    def write(self, end_s: float, nbytes: int) -> None:
        self._writes = True
        self._to_write -= 1
        self.writing.append((end_s, nbytes))
        self.writing_bytes += nbytes

    def in_flight_bytes(self, now_s: float) -> int:
        """What is on its way, and the buffers that are kept for what comes next. A large one goes in parts."""
        half, spare = self.half_bytes, self._spare_bytes
        unfinished = sum(nbytes for end_s, nbytes in self.writing if end_s > now_s)
        reads = bool(self.arriving) or self._next < len(self._coming)
        writes = self._writes and (self._to_write > 0 or unfinished > 0)
        most = min(2 * half, half * reads + half * writes + spare)
        there = min(most, min(self.arriving_bytes, half) + min(unfinished, half) + spare)
        # More is on its way while a drive is slow: of the rest of what may be, a quarter.
        return (3 * there + most) // 4


class Transfers:
    """Weights, gradients and state of a footprint on their way. They share the links with ``stores``, and with loads, whose
    ends are in ``load_free``.
    """

    def __init__(
        self,
        footprint: Footprint,
        channels: Mapping[str, Channel],
        stores: Stores,
        load_free: dict[str, float],
        intervals: list[Interval] | None,
    ):
        self._channels = channels
        self._stores = stores
        self._load_free = load_free
        self._intervals = intervals
        self._load_rates = {
            tier: (one.load_bytes_per_s, one.load_bytes_per_s * one.shared) for tier, one in channels.items()
        }
        windows, spares, counts = footprint.transfer_windows, footprint.transfer_spares, footprint.store_counts
        self._lanes = {
            kind: _Lane(loads, counts[kind], windows.get(kind, 0), spares.get(kind, 0))
            for kind, loads in footprint.loads.items()
        }

    def arrives_s(self, one: Transfer, now_s: float) -> float:
        """The segment of a load begins: when it is there."""
        lane = self._lanes[one.kind]
        # Loads of one segment are in the order in which they were begun.
        if not lane.arriving:
            self._begin(lane, now_s)
        arrives_s, nbytes = lane.arriving.popleft()
        lane.arriving_bytes -= nbytes
        if nbytes < one.nbytes:  # the rest of what has no room in the window
            arrives_s = self._load(one, one.nbytes - nbytes, max(now_s, arrives_s))
        return arrives_s

    def write(self, one: Transfer, now_s: float) -> float:
        """The segment of a store begins. Returns until when compute has to wait for room in the window."""
        lane = self._lanes[one.kind]
        share = self._channels[one.tier].shared if self._load_free[one.tier] > now_s else 1.0
        begin_s, end_s = self._stores.pass_by(one.nbytes, one.tier, now_s, share)
        if self._intervals is not None:
            self._note("store", one, begin_s, end_s)
        lane.write(end_s, one.nbytes)
        while lane.writing_bytes > lane.half_bytes and len(lane.writing) > 1:
            now_s, nbytes = lane.writing.popleft()
            lane.writing_bytes -= nbytes
        room = self._room_of(lane, one)
        return max(now_s, end_s - (end_s - begin_s) * room / one.nbytes) if room < one.nbytes else now_s

    def read_ahead(self, now_s: float) -> None:
        """Begin to load what segments to come need, what comes first of each kind before the others."""
        while True:
            first: _Lane | None = None
            at = 0
            for lane in self._lanes.values():
                one = lane.peek()
                if one is not None and (first is None or one.at < at):
                    first, at = lane, one.at
            if first is None:
                return
            self._begin(first, now_s)

    def read_on(self, arrived: Transfer, now_s: float) -> None:
        """The same after one has arrived, whose kind alone has room for more."""
        lane = self._lanes[arrived.kind]
        while lane.peek() is not None:
            self._begin(lane, now_s)

    def in_flight_bytes(self, now_s: float) -> int:
        """Memory of what is on its way now, and of buffers for what comes next, where they are in that memory."""
        return sum(lane.in_flight_bytes(now_s) for lane in self._lanes.values())

    def _room_of(self, lane: _Lane, one: Transfer) -> int:
        """How much of it may be on its way while compute goes on. An accelerator's host waits for the rest meanwhile, but one
        that computes itself does not compute then. A weight is waited for by itself, and its window has room for each.
        """
        computes_itself = self._channels[one.tier].link_bytes_per_s is None
        return min(one.nbytes, lane.half_bytes) if computes_itself and one.kind != WEIGHTS else one.nbytes

    def _begin(self, lane: _Lane, now_s: float) -> None:
        one = lane.pop()
        nbytes = self._room_of(lane, one)
        lane.arriving.append((self._load(one, nbytes, now_s), nbytes))
        lane.arriving_bytes += nbytes

    def _load(self, one: Transfer, nbytes: int, now_s: float) -> float:
        tier, begin_s = one.tier, self._load_free[one.tier]
        if now_s > begin_s:
            begin_s = now_s
        end_s = self._load_free[tier] = begin_s + nbytes / self._load_rates[tier][self._stores.free_s(tier) > begin_s]
        if self._intervals is not None:
            self._note("load", one, begin_s, end_s)
        return end_s

    def _note(self, channel: str, one: Transfer, begin_s: float, end_s: float) -> None:
        assert self._intervals is not None, "intervals are wanted"
        self._intervals.append(Interval(channel, f"{one.unit}: {one.kind}", begin_s, end_s))
