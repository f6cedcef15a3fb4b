"""A step played through on paper: one channel that computes, and one each way between memory and every tier.

The rules are the engine's (``engine/prefetch.py``, ``engine/transfer.py``): stores in the order of saving, forward held back
while too much is on its way out, loads in the order in which backward asks, as far ahead as the window allows.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Mapping

from hf_offload.plan.footprint import BlockSpan, Footprint, Saved
from hf_offload.plan.plan import Placement


@dataclasses.dataclass(frozen=True)
class Channel:
    """Bandwidths of a tier, in bytes a second. ``both_bytes_per_s`` is the sum of both directions when both are busy."""

    store_bytes_per_s: float
    load_bytes_per_s: float
    both_bytes_per_s: float = math.inf

    @property
    def shared(self) -> float:
        """What is left of each direction's bandwidth while the other is busy, as a share."""
        return min(1.0, self.both_bytes_per_s / (self.store_bytes_per_s + self.load_bytes_per_s))


@dataclasses.dataclass(frozen=True)
class Windows:
    """How much may be in memory on its way: read ahead of backward, and waiting to be written."""

    read_ahead_bytes: int
    write_behind_bytes: int


@dataclasses.dataclass(frozen=True)
class Stretch:
    """One bar of the timeline: ``channel`` is ``"compute"``, ``"recompute"``, ``"store"``, ``"load"`` or ``"wait"``."""

    channel: str
    unit: str
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What a plan is predicted to do.

    ``memory`` holds (seconds, bytes) at every moment, base included; ``tier_bytes`` the most that lies in each tier at once;
    ``resident_bytes`` the most that the engine holds of saved tensors at once, whatever else holds them, too.
    ``stalled_peak_bytes`` is the peak if the tier stopped writing at the worst moment of forward, until forward has to wait,
    if the step is measured, or if a block runs that did not run when it was measured.
    """

    step_s: float
    peak_bytes: int
    stalled_peak_bytes: int
    peak_unit: str
    store_stall_s: float
    load_stall_s: float
    recompute_s: float
    tier_bytes: Mapping[str, int]
    moved_bytes: int
    resident_bytes: int
    memory: tuple[tuple[float, int], ...]
    stretches: tuple[Stretch, ...]

    @property
    def stall_s(self) -> float:
        """Time in which nothing was computed because bytes were on their way."""
        return self.store_stall_s + self.load_stall_s


def simulate(
    footprint: Footprint,
    placements: Mapping[str, Placement],
    channels: Mapping[str, Channel],
    windows: Windows,
    *,
    details: bool = False,
) -> Timeline:
    """Play one step. ``placements`` names every unit of the footprint; ``channels`` every tier that it uses.

    With ``details`` the timeline has its memory curve and its bars.
    """
    return _Player(footprint, placements, channels, windows, details).play()


class _Item:
    """Saved bytes during the play."""

    __slots__ = (
        "ahead",
        "arrives_s",
        "gone",
        "held",
        "leaves_s",
        "leaving",
        "nbytes",
        "needed",
        "packed",
        "released",
        "resident",
        "stays",
        "tier",
        "unit",
        "wanted",
    )

    def __init__(self, unit: str, nbytes: int, packed: int, gone: int, needed: int, released: int, tier: str | None):
        self.unit = unit
        self.nbytes = nbytes
        self.packed = packed
        self.gone = gone
        self.needed = needed
        self.released = released
        self.tier = tier
        self.resident = False  # counted as memory that nothing but this holds
        self.held = False  # the engine holds it, whatever else does
        self.stays = False  # it could leave, but backward needs it first
        self.leaving = False  # on its way out, and not wanted
        self.leaves_s: float | None = None  # when its store ends
        self.arrives_s: float | None = None  # when its load ends
        self.ahead = False
        self.wanted = False  # backward has asked for it, or will soon: a store that ends does not take it away


def _by_moment(items: Iterable[_Item], when: Callable[[_Item], int]) -> dict[int, list[_Item]]:
    found: dict[int, list[_Item]] = {}
    for item in items:
        found.setdefault(when(item), []).append(item)
    return found


class _Player:
    def __init__(
        self,
        footprint: Footprint,
        placements: Mapping[str, Placement],
        channels: Mapping[str, Channel],
        windows: Windows,
        details: bool,
    ):
        self._footprint = footprint
        self._channels = channels
        self._windows = windows
        self._details = details
        self._now = 0.0
        self._store_free = dict.fromkeys(channels, 0.0)
        self._load_free = dict.fromkeys(channels, 0.0)
        self._leaving: list[tuple[float, int, _Item]] = []
        self._leaving_bytes = 0
        self._ahead_bytes = 0
        self._resident = 0
        self._held = self._most_held = 0
        self._tier_now: collections.Counter[str] = collections.Counter()
        self._tier_most: collections.Counter[str] = collections.Counter()
        self._moved = 0
        self._store_stall = self._load_stall = self._recompute = 0.0
        self._peak, self._peak_unit = 0, ""
        self._stalled_peak = 0
        self._left_bytes = 0  # would be in memory still, had the tier stopped writing
        self._loads = False
        self._memory: list[tuple[float, int]] = []
        self._stretches: list[Stretch] = []
        recomputed = {
            span.name: span for span in footprint.blocks if placements.get(span.name, Placement.KEEP).recomputes
        }
        self._recompute_at = {span.backward: span for span in recomputed.values()}
        tiers = {unit: placement.tier for unit, placement in placements.items()}
        spans = {unit: recomputed.get(block or "") for unit, block in footprint.units.items()}
        items = []
        for one in footprint.saved:
            span = spans[one.unit]
            if span is None:
                items.append(_item(one, tiers[one.unit]))
            elif one.released > span.backward:
                # There again from the recompute on, in memory that nothing else holds.
                items.append(_Item(one.unit, one.nbytes, span.backward, span.backward, one.needed, one.released, None))
        for span in recomputed.values():
            begin, left = span.forward
            end = max(footprint.released_last.get(span.name, 0), span.backward + 1)
            items.append(_Item(span.name, span.boundary_bytes, begin, left, span.backward, end, tiers[span.name]))
        self._items = items
        self._order = sorted((item for item in items if item.tier is not None), key=lambda item: item.needed)
        self._next = 0
        self._stay()

    def _stay(self) -> None:
        """What backward asks for first does not leave: the engine knows it from the step before."""
        room = self._windows.read_ahead_bytes
        for item in self._order:
            room -= item.nbytes
            if room < 0:
                break
            item.stays = True
        self._order = [item for item in self._order if not item.stays]

    def play(self) -> Timeline:
        footprint = self._footprint
        alone = [item for item in self._items if item.released > item.gone]
        packed = _by_moment(self._items, lambda item: item.packed)
        gone = _by_moment(alone, lambda item: item.gone)
        needed = _by_moment((item for item in alone if item.tier is not None), lambda item: item.needed)
        released = _by_moment(self._items, lambda item: item.released)
        base_bytes, behind_bytes = footprint.base_bytes, self._windows.write_behind_bytes
        details = self._details
        for index, moment in enumerate(footprint.moments):
            for item in released.get(index, ()):
                self._drop(item)
                self._stop_leaving(item)
                if item.tier is not None and not item.stays:
                    self._tier_now[item.tier] -= item.nbytes
            if index in self._recompute_at:
                self._recompute_block(self._recompute_at[index], moment.live_bytes)
            for item in packed.get(index, ()):
                self._pack(item)
            for item in gone.get(index, ()):
                if self._leaving:
                    self._settle()
                if item.held:
                    self._hold(item)
                else:
                    self._left_bytes += item.nbytes
            for item in needed.get(index, ()):
                self._need(item, index)
            if self._leaving:
                self._settle()
            if moment.backward and self._next < len(self._order):
                self._read_ahead(index)
            memory = base_bytes + moment.live_bytes + self._resident
            # Most moments are no peak, even with all that may wait to be written on top.
            more = behind_bytes + moment.measured_bytes
            if details or memory > self._peak or memory + more > self._stalled_peak:
                self._note(moment.unit, moment.live_bytes, moment.measured_bytes)
            if details:
                self._advance("compute", moment.unit, moment.seconds)
            else:
                self._now += moment.seconds
        self._note("the optimizer", footprint.gradient_bytes + footprint.optimizer_step_bytes)
        self._advance("compute", "the optimizer", footprint.optimizer_step_s)
        if footprint.skipped_blocks:
            # Such a block needs what others do, beside all that may be in memory then.
            in_blocks = (moment for moment in footprint.moments if footprint.units[moment.unit] is not None)
            live = max((moment.live_bytes + moment.measured_bytes for moment in in_blocks), default=0)
            self._stalled_peak = max(self._stalled_peak, base_bytes + live + self._most_held)
        return Timeline(
            step_s=self._now,
            peak_bytes=self._peak,
            stalled_peak_bytes=self._stalled_peak,
            peak_unit=self._peak_unit,
            store_stall_s=self._store_stall,
            load_stall_s=self._load_stall,
            recompute_s=self._recompute,
            tier_bytes=dict(self._tier_most),
            moved_bytes=self._moved,
            resident_bytes=self._most_held,
            memory=tuple(self._memory),
            stretches=tuple(self._stretches),
        )

    # -- memory -------------------------------------------------------------------------------------------------------

    def _pack(self, item: _Item) -> None:
        item.held = True
        self._held += item.nbytes
        if item.stays:
            self._be_ahead(item)
        elif item.tier is not None:
            self._store(item, item.tier)
        self._most_held = max(self._most_held, self._held)

    def _hold(self, item: _Item) -> None:
        if not item.resident:
            item.resident = True
            self._resident += item.nbytes

    def _drop(self, item: _Item) -> None:
        if item.held:
            item.held = False
            self._held -= item.nbytes
        if item.resident:
            item.resident = False
            self._resident -= item.nbytes
        self._be_asked_for(item)

    def _be_ahead(self, item: _Item) -> None:
        if not item.ahead:
            item.ahead = True
            self._ahead_bytes += item.nbytes

    def _be_asked_for(self, item: _Item) -> None:
        if item.ahead:
            item.ahead = False
            self._ahead_bytes -= item.nbytes

    def _stop_leaving(self, item: _Item) -> None:
        if item.leaving:
            item.leaving = False
            self._leaving_bytes -= item.nbytes

    def _want(self, item: _Item) -> None:
        """Backward comes to ``item`` soon, or now: it does not leave any more."""
        item.wanted = True
        if item.leaving:
            self._stop_leaving(item)
            self._be_ahead(item)

    def _note(self, unit: str, live_bytes: int, measured_bytes: int = 0) -> None:
        memory = self._footprint.base_bytes + live_bytes + self._resident
        if memory > self._peak:
            self._peak, self._peak_unit = memory, unit
        stalled = 0
        if self._left_bytes and not self._loads:
            stalled = min(self._left_bytes, max(0, self._windows.write_behind_bytes - self._leaving_bytes))
        self._stalled_peak = max(self._stalled_peak, memory + stalled + measured_bytes)
        if self._details:
            self._memory.append((self._now, memory))

    # -- channels -----------------------------------------------------------------------------------------------------

    def _advance(self, channel: str, unit: str, seconds: float) -> None:
        begin = self._now
        self._now += seconds
        if self._details and seconds > 0:
            self._stretches.append(Stretch(channel, unit, begin, self._now))

    def _settle(self) -> None:
        """Let what has been written by now leave memory."""
        while self._leaving and self._leaving[0][0] <= self._now:
            item = heapq.heappop(self._leaving)[2]
            if item.leaving:
                self._stop_leaving(item)
                self._left_bytes += item.nbytes if item.resident else 0
                self._drop(item)

    def _store(self, item: _Item, tier: str) -> None:
        channel = self._channels[tier]
        begin = max(self._now, self._store_free[tier])
        share = channel.shared if self._load_free[tier] > begin else 1.0
        item.leaves_s = begin + item.nbytes / (channel.store_bytes_per_s * share)
        self._store_free[tier] = item.leaves_s
        heapq.heappush(self._leaving, (item.leaves_s, id(item), item))
        item.leaving = True
        self._leaving_bytes += item.nbytes
        self._moved += item.nbytes
        self._tier_now[tier] += item.nbytes
        self._tier_most[tier] = max(self._tier_most[tier], self._tier_now[tier])
        if self._details:
            self._stretches.append(Stretch("store", item.unit, begin, item.leaves_s))
        self._settle()
        before = self._now
        while self._leaving and self._leaving_bytes > self._windows.write_behind_bytes:
            self._advance("wait", item.unit, max(0.0, self._leaving[0][0] - self._now))
            self._settle()
        self._store_stall += self._now - before

    def _load(self, item: _Item) -> None:
        assert item.tier is not None
        self._loads = True
        channel = self._channels[item.tier]
        begin = max(self._now, self._load_free[item.tier])
        share = channel.shared if self._store_free[item.tier] > begin else 1.0
        item.arrives_s = begin + item.nbytes / (channel.load_bytes_per_s * share)
        self._load_free[item.tier] = item.arrives_s
        item.held = True
        self._held += item.nbytes
        self._most_held = max(self._most_held, self._held)
        self._be_ahead(item)
        self._hold(item)
        if self._details:
            self._stretches.append(Stretch("load", item.unit, begin, item.arrives_s))

    def _need(self, item: _Item, index: int) -> None:
        self._settle()
        self._want(item)
        if (
            not item.stays and not item.resident and item.gone <= index
        ):  # else it never left, or something else holds it
            self._load(item)
        if item.arrives_s is not None and item.arrives_s > self._now:
            before = self._now
            self._advance("wait", item.unit, item.arrives_s - self._now)
            self._load_stall += self._now - before
        self._be_asked_for(item)

    def _read_ahead(self, index: int) -> None:
        window = self._windows.read_ahead_bytes
        while self._next < len(self._order):
            item = self._order[self._next]
            elsewhere = item.gone > index and not item.leaving  # in the tier, and in memory for somebody else
            if item.needed > index and not item.ahead and not elsewhere:
                own = self._leaving_bytes + self._ahead_bytes
                # What still leaves is in memory, too, until it has left; keeping it then adds nothing.
                if own + (0 if item.leaving else item.nbytes) > window and own > 0:
                    return
                self._want(item)
                if not item.resident and item.gone <= index:
                    self._load(item)
            self._next += 1

    def _recompute_block(self, span: BlockSpan, live_bytes: int) -> None:
        """The block's forward runs again: its own memory comes on top of what is alive when its backward begins."""
        seconds, nbytes = self._footprint.recompute_costs[span.name]
        self._note(span.name, live_bytes + nbytes)
        self._advance("recompute", span.name, seconds)
        self._recompute += seconds


def _item(saved: Saved, tier: str | None) -> _Item:
    return _Item(saved.unit, saved.nbytes, saved.packed, saved.gone, saved.needed, saved.released, tier)
