"""A step played through on paper: one channel that computes, and one each way between memory and every tier.

The rules are the engine's (:mod:`~hf_offload.plan.rules`): stores in the order of saving, forward held back while too much is
on its way out, loads in the order in which backward asks, as far ahead as the window allows.
"""

import collections
from collections.abc import Mapping

from hf_offload.plan import rules
from hf_offload.plan.footprint import BlockSpan, Footprint, Saved, Segment, events_of
from hf_offload.plan.plan import Placement
from hf_offload.plan.stores import Stores
from hf_offload.plan.timeline import Channel, Interval, MemoryUse, Timeline, Windows
from hf_offload.plan.transfers import Transfers


def simulate(
    footprint: Footprint,
    placements: Mapping[str, Placement],
    channels: Mapping[str, Channel],
    windows: Windows,
    *,
    details: bool = False,
) -> Timeline:
    """Play one step. ``placements`` names every unit of the footprint; ``channels`` every tier that it uses.

    With ``details`` the timeline has its memory curve, its intervals, and what is held at every moment.
    """
    return _Player(footprint, placements, channels, windows, details).play()


class _Item:
    """Saved bytes during the play."""

    __slots__ = (
        "ahead", "arrives_s", "asked", "begins_s", "gone", "held", "kept", "leaves_s", "leaving", "nbytes", "needed",
        "number", "packed", "released", "resident", "stays", "stored_s", "tier", "unit",
    )  # fmt: skip

    def __init__(
        self,
        unit: str,
        nbytes: int,
        packed: int,
        gone: int,
        needed: int,
        released: int,
        tier: str | None,
        number: int = -1,
    ):
        self.unit = unit
        self.nbytes = nbytes
        self.packed = packed
        self.gone = gone
        self.needed = needed
        self.released = released
        self.tier = tier
        self.number = number  # in the footprint
        self.resident = False  # held, and by nothing else
        self.held = self.leaving = self.ahead = self.kept = self.asked = False
        self.stays = False  # it could leave, but backward needs it first
        self.begins_s = self.leaves_s = self.stored_s = 0.0  # of its store
        self.arrives_s = 0.0  # when its load ends

    @property
    def is_asked_for(self) -> bool:
        return self.needed < self.released


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
        self._ledger = rules.Ledger()
        self._stores: Stores[_Item] = Stores(channels)
        self._load_free = dict.fromkeys(channels, 0.0)
        self._resident = 0
        self._most_held = 0
        self._tier_now: collections.Counter[str] = collections.Counter()
        self._tier_most: collections.Counter[str] = collections.Counter()
        self._moved = 0
        self._store_stall = self._load_stall = self._recompute = 0.0
        self._peak, self._peak_unit = 0, ""
        self._must_fit = 0
        self._left_bytes = 0  # would be in memory still, had the tier stopped writing
        self._loads = self._in_backward = False
        self._memory: list[MemoryUse] = []
        self._intervals: list[Interval] = []
        self._seen: list[frozenset[int]] = []
        recomputed = {
            span.name: span for span in footprint.blocks if placements.get(span.name, Placement.KEEP).recomputes
        }
        self._recompute_at = {span.backward: span for span in recomputed.values()}
        tiers = {unit: placement.tier for unit, placement in placements.items()}
        spans = {unit: recomputed.get(block or "") for unit, block in footprint.units.items()}
        items = []
        for number, one in enumerate(footprint.saved):
            span = spans[one.unit]
            if span is None:
                items.append(_item(one, tiers[one.unit], number))
            elif one.released > span.backward:
                # There again from the recompute on, in memory that nothing else holds.
                items.append(_Item(one.unit, one.nbytes, span.backward, span.backward, one.needed, one.released, None))
        for span in recomputed.values():
            begin, left = span.forward
            end = max(footprint.released_last.get(span.name, 0), span.backward + 1)
            items.append(_Item(span.name, span.boundary_bytes, begin, left, span.backward, end, tiers[span.name]))
        self._items = items
        self._largest = max((item.nbytes for item in items if item.number >= 0 or item.tier), default=0)
        self._consumed: list[_Item] = []
        # What backward never asks for comes last, from the end.
        order = sorted(
            (item for item in items if item.tier is not None),
            key=lambda item: (item.needed, 0) if item.is_asked_for else (len(footprint.segments), -item.number),
        )
        # What backward asks for first does not leave: the engine knows it from the step before.
        staying = rules.staying((item.nbytes for item in order), windows.read_ahead_bytes)
        for item in order[:staying]:
            item.stays = True
        self._order = order[staying:]
        self._next = 0
        self._transfers = Transfers(
            footprint, channels, self._stores, self._load_free, self._intervals if details else None
        )

    def play(self) -> Timeline:
        footprint = self._footprint
        items = self._items
        events = events_of(items) if self._recompute_at else footprint.events
        packed, gone, needed, released = events.packed, events.gone, events.needed, events.released
        base_bytes, behind_bytes = footprint.base_bytes, self._windows.write_behind_bytes
        details, due, leaving = self._details, self._transfers.due, self._stores.leaving
        eventful = {*packed, *gone, *needed, *released, *self._recompute_at, *due}
        self._transfers.read_ahead(self._now)
        for index, segment in enumerate(footprint.segments):
            if index in eventful:
                for number in released.get(index, ()):
                    self._release(items[number])
                if index in due:
                    for unit, until_s, loads in self._transfers.at(index, lambda: self._now):
                        waited_s = self._wait_until(unit, until_s)
                        self._load_stall += waited_s if loads else 0.0
                        self._store_stall += 0.0 if loads else waited_s
                if index in self._recompute_at:
                    self._recompute_block(self._recompute_at[index], segment)
                for number in packed.get(index, ()):
                    self._pack(items[number])
                for number in gone.get(index, ()):
                    item = items[number]
                    if leaving and leaving[0].leaves_s <= self._now:
                        self._settle()
                    if item.held:
                        self._hold_alone(item)
                    else:
                        self._left_bytes += item.nbytes
                for number in needed.get(index, ()):
                    self._need(items[number], index)
            if leaving and leaving[0].leaves_s <= self._now:
                self._settle()
            memory = base_bytes + segment.live_bytes + self._resident
            # Most segments are no peak, even with all that may wait to be written on top.
            more = behind_bytes + segment.measured_bytes
            if details or memory > self._peak or memory + more > self._must_fit:
                self._note(segment.unit, segment.live_bytes, segment.gradient_bytes, segment.measured_bytes)
            if details:
                self._seen.append(frozenset(item.number for item in self._items if item.held and item.number >= 0))
                self._advance("compute", segment.unit, segment.seconds)
            else:
                self._now += segment.seconds
        gradients = footprint.gradient_bytes
        self._note("the optimizer", gradients + footprint.optimizer_step_bytes, gradients)
        self._advance("compute", "the optimizer", footprint.optimizer_step_s)
        if footprint.skipped_blocks:
            # Such a block needs as much as the others, in addition to all that may be in memory then.
            in_blocks = (segment for segment in footprint.segments if footprint.units[segment.unit] is not None)
            live = max((segment.live_bytes + segment.measured_bytes for segment in in_blocks), default=0)
            self._must_fit = max(self._must_fit, base_bytes + live + self._most_held)
        return Timeline(
            step_s=self._now,
            peak_bytes=self._peak,
            must_fit_bytes=self._must_fit,
            peak_unit=self._peak_unit,
            store_stall_s=self._store_stall,
            load_stall_s=self._load_stall,
            recompute_s=self._recompute,
            tier_bytes=dict(self._tier_most),
            moved_bytes=self._moved,
            resident_bytes=self._most_held,
            memory=tuple(self._memory),
            intervals=tuple(self._intervals),
            held=tuple(self._seen),
        )

    # -- memory -------------------------------------------------------------------------------------------------------

    def _pack(self, item: _Item) -> None:
        self._settle()
        self._hold(item)
        if item.stays:
            self._ledger.want(item)
        elif item.tier is not None:
            self._store(item, item.tier)
        else:
            self._ledger.keep(item)

    def _hold(self, item: _Item) -> None:
        self._ledger.hold(item)
        self._most_held = max(self._most_held, self._ledger.resident_bytes)

    def _hold_alone(self, item: _Item) -> None:
        if not item.resident:
            item.resident = True
            self._resident += item.nbytes

    def _drop(self, item: _Item) -> None:
        self._ledger.drop(item)
        if item.resident:
            item.resident = False
            self._resident -= item.nbytes

    def _release(self, item: _Item) -> None:
        """Autograd holds ``item`` no more."""
        self._drop(item)
        self._ledger.end(item)
        if item.tier is not None and not item.stays:
            self._tier_now[item.tier] -= item.nbytes

    def _note(self, unit: str, live_bytes: int, gradient_bytes: int, measured_bytes: int = 0) -> None:
        memory = self._footprint.base_bytes + live_bytes + self._resident
        if memory > self._peak:
            self._peak, self._peak_unit = memory, unit
        stalled = 0
        if self._left_bytes and not self._loads:
            stalled = min(self._left_bytes, max(0, self._windows.write_behind_bytes - self._ledger.leaving_bytes))
        self._must_fit = max(self._must_fit, memory + stalled + measured_bytes)
        if self._details:
            moving = sum(
                item.nbytes for item in self._items if item.resident and item.tier is not None and not item.stays
            )
            self._memory.append(MemoryUse(self._now, memory, gradient_bytes, self._resident - moving, moving))

    # -- channels -----------------------------------------------------------------------------------------------------

    def _advance(self, channel: str, unit: str, seconds: float) -> None:
        begin = self._now
        self._now += seconds
        if self._details and seconds > 0:
            self._intervals.append(Interval(channel, unit, begin, self._now))

    def _wait_until(self, unit: str, end_s: float) -> float:
        """Compute waits; returns how long."""
        if end_s <= self._now:
            return 0.0
        seconds = end_s - self._now
        self._advance("wait", unit, seconds)
        self._now = max(self._now, end_s)
        return seconds

    def _settle(self) -> None:
        """Let what has left by now leave memory."""
        leaving = self._stores.leaving
        while leaving and leaving[0].leaves_s <= self._now:
            item = leaving.popleft()
            if item.leaving:
                self._left_bytes += item.nbytes if item.resident else 0
                self._drop(item)

    def _store(self, item: _Item, tier: str) -> None:
        self._ledger.leave(item)
        self._moved += item.nbytes
        self._tier_now[tier] += item.nbytes
        self._tier_most[tier] = max(self._tier_most[tier], self._tier_now[tier])
        self._store_stall += self._wait_until(
            item.unit, self._stores.begin(item, tier, self._now, self._load_free[tier])
        )
        if self._details:
            self._intervals.append(Interval("store", item.unit, item.begins_s, item.stored_s))
        self._settle()
        while rules.holds_forward(self._ledger.leaving_bytes, self._windows.write_behind_bytes):
            oldest_s = self._stores.oldest_leaves_s
            if oldest_s is None:
                break
            self._store_stall += self._wait_until(item.unit, oldest_s)
            self._settle()

    def _load(self, item: _Item) -> None:
        assert item.tier is not None
        self._loads = True
        channel = self._channels[item.tier]
        begin = max(self._now, self._load_free[item.tier])
        share = channel.shared if self._stores.free_s(item.tier) > begin else 1.0
        item.arrives_s = begin + item.nbytes / (channel.load_bytes_per_s * share)
        self._load_free[item.tier] = item.arrives_s
        self._hold(item)
        self._ledger.want(item)
        self._hold_alone(item)
        if self._details:
            self._intervals.append(Interval("load", item.unit, begin, item.arrives_s))

    def _keep(self, item: _Item) -> None:
        """What leaves does not leave any more: backward comes to it now, or soon."""
        self._ledger.want(item)
        self._stores.cancel(item, self._now)

    def _need(self, item: _Item, index: int) -> None:
        self._settle()
        if item.leaving:
            self._keep(item)
        elif not item.held and item.gone <= index:  # else it never left, or something else holds it
            self._load_stall += self._wait_until(item.unit, item.stored_s)
            self._load(item)
        if item.arrives_s > self._now:
            self._load_stall += self._wait_until(item.unit, item.arrives_s)
        item.asked = True
        self._ledger.asked(item)
        self._settle()
        self._read_ahead(index)
        if not self._in_backward:
            self._in_backward = True
            self._store_stall += self._wait_until(item.unit, self._stores.copied_s)  # memory of what is copied goes
            self._settle()
        if item.held and not item.stays and not item.kept:
            self._consumed.append(item)
        self._drop_consumed()

    def _drop_consumed(self) -> None:
        ledger, limit = self._ledger, rules.consumed_bytes(self._windows.read_ahead_bytes, self._largest)
        if not self._consumed or ledger.resident_bytes - ledger.ahead_bytes - ledger.kept_bytes <= limit:
            return
        self._consumed = [item for item in self._consumed if item.held]
        excess = sum(item.nbytes for item in self._consumed) - limit
        while excess > 0:
            excess -= self._consumed[0].nbytes
            self._drop(self._consumed.pop(0))

    def _read_ahead(self, index: int) -> None:
        while self._next < len(self._order):
            item = self._order[self._next]
            if not item.asked and item.released > index:
                todo = rules.read_ahead(self._ledger, item, self._where(item, index), self._windows.read_ahead_bytes)
                if todo is rules.Ahead.STOP:
                    return
                if todo is rules.Ahead.KEEP:
                    self._keep(item)
                elif todo is rules.Ahead.LOAD:
                    self._load(item)
            self._next += 1

    def _where(self, item: _Item, index: int) -> rules.Where:
        if item.leaving:
            return rules.Where.MEMORY
        if item.held:
            return rules.Where.ELSEWHERE
        if item.stored_s > self._now:
            return rules.Where.BETWEEN
        return rules.Where.ELSEWHERE if item.gone > index else rules.Where.TIER

    def _recompute_block(self, span: BlockSpan, segment: Segment) -> None:
        """The block's forward runs again: its own memory comes on top of what is alive when its backward begins."""
        seconds, nbytes = self._footprint.recompute_costs[span.name]
        self._note(span.name, segment.live_bytes + nbytes, segment.gradient_bytes)
        self._advance("recompute", span.name, seconds)
        self._recompute += seconds


def _item(saved: Saved, tier: str | None, number: int) -> _Item:
    return _Item(saved.unit, saved.nbytes, saved.packed, saved.gone, saved.needed, saved.released, tier, number)
