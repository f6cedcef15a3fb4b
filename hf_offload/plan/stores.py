"""Stores on their way, as the simulation plays them: when each leaves memory, and when the tier has it."""

import collections
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from hf_offload.plan import rules
from hf_offload.plan.timeline import Channel


class Leaving(rules.Entry, Protocol):
    """An entry with the times of its store: the tier begins, memory has lost it, the tier has it."""

    begins_s: float
    leaves_s: float
    stored_s: float


T = TypeVar("T", bound=Leaving)


class Stores(Generic[T]):
    """Queues of all tiers.

    Attributes:
        leaving: What leaves memory, in the order in which it was stored. The player takes out what has left.
    """

    def __init__(self, channels: Mapping[str, Channel]):
        self._channels = channels
        self._free_s = dict.fromkeys(channels, 0.0)
        self._link_free_s = 0.0
        self._queues: dict[str, collections.deque[T]] = {tier: collections.deque() for tier in channels}
        self.leaving: collections.deque[T] = collections.deque()
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

    def begin(self, entry: T, tier: str, now_s: float, loads_until_s: float) -> float:
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

    def _through_the_ring(self, entry: T, tier: str, now_s: float, loads_until_s: float) -> float:
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

    def cancel(self, entry: T, now_s: float) -> None:
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
