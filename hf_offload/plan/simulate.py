"""A step played through on paper: one channel that computes, and one each way between memory and every tier.

The rules are the engine's (:mod:`~hf_offload.plan.rules`): stores in the order of saving, forward held back while too much is
on its way out, loads in the order in which backward asks, as far ahead as the window allows.
"""

import bisect
import collections
import dataclasses
from collections.abc import Mapping

from hf_offload.plan import rules
from hf_offload.plan.footprint import BlockSpan, Footprint, Transfer
from hf_offload.plan.links import Stores, Transfers
from hf_offload.plan.plan import Placement
from hf_offload.plan.schedule import GONE, NEEDED, PACKED, RELEASED, TRANSFERRED, Item, schedule_of
from hf_offload.plan.state_placement import ACTIVATIONS
from hf_offload.plan.timeline import Channel, Interval, MemoryUse, Timeline, Windows


def simulate(
    footprint: Footprint,
    placements: Mapping[str, Placement],
    channels: Mapping[str, Channel],
    windows: Windows,
    *,
    details: bool = False,
) -> Timeline:
    """Play one step. ``placements`` names every unit of the footprint; ``channels`` every tier that it uses.

    With ``details`` the timeline has its memory curve and its intervals.
    """
    return _Player(footprint, placements, channels, windows, details).play()


def likely_peak(
    footprint: Footprint, placements: Mapping[str, Placement], channels: Mapping[str, Channel], windows: Windows
) -> int:
    """Most bytes in memory at once, with what is on its way of weights, gradients and state at each moment. A timeline's
    peak counts on as much of it at any moment as there ever is.
    """
    busy = dataclasses.replace(footprint, idle=())
    busy.saves_like(footprint)
    player = _LikelyPlayer(busy, placements, channels, windows, details=False)
    player.play()
    return player.likely_bytes


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
        self._late_s = 0.0  # all that compute has waited, and recomputed
        self._begins_s = footprint.segment_columns.begins_s
        self._ledger = rules.Ledger()  # of what moves
        self._stores: Stores = Stores(channels)
        self._load_free = dict.fromkeys(channels, 0.0)
        self._busy_s = {tier: channel.busy_s.get(ACTIVATIONS, 0.0) for tier, channel in channels.items()}
        self._resident = 0  # of what moves
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
        self._schedule = schedule = schedule_of(footprint, placements)
        self._consumed_limit = rules.consumed_bytes(windows.read_ahead_bytes, schedule.largest_bytes)
        self._consumed: list[Item] = []
        order = schedule.in_order()
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
        footprint, schedule = self._footprint, self._schedule
        items, transfers = schedule.items, footprint.transfers
        index = 0
        self._transfers.read_ahead(self._now)
        for segment, kind, number in schedule.events:
            if number < 0 and kind == NEEDED and self._in_backward and self._next == len(self._order):
                continue  # what stays is needed, and nothing is left to be read ahead
            if segment != index:
                self._compute(index, segment)
                index = segment
            if kind == NEEDED:
                self._need(items[number] if number >= 0 else None, index)
            elif kind == PACKED:
                self._pack(items[number])
            elif kind == GONE:
                self._go(items[number])
            elif kind == RELEASED:
                self._release(items[number])
            elif kind == TRANSFERRED:
                self._transfer(transfers[number])
            else:
                self._recompute_block(schedule.recomputed[index], index)
        self._compute(index, len(footprint.segments))
        gradients = footprint.gradient_bytes
        alone = schedule.alone_bytes[-1] + int(footprint.idle_bytes[-1])
        self._note("the optimizer", gradients + footprint.optimizer_step_bytes, alone, gradients)
        self._spend("compute", "the optimizer", footprint.optimizer_step_s)
        if footprint.skipped_blocks:
            # Such a block needs as much as the others, in addition to all that may be in memory then.
            self._must_fit = max(self._must_fit, footprint.base_bytes + footprint.most_in_blocks + self._most_held)
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
        )

    def _compute(self, begin: int, end: int) -> None:
        """Segments from ``begin`` up to ``end`` run. Nothing happens in between but that stores end."""
        schedule, begins_s, leaving = self._schedule, self._begins_s, self._stores.leaving
        while begin < end:
            if leaving and leaving[0].leaves_s <= self._now:
                self._settle()
            until = end
            if self._details:
                until = begin + 1
            elif leaving:
                until = bisect.bisect_left(begins_s, leaving[0].leaves_s - self._late_s, begin + 1, end)
            if until == begin + 1:
                memory, measured = schedule.memory_bytes[begin], schedule.measured_bytes[begin]
                held = schedule.held_bytes[begin]
            else:
                memory, measured = max(schedule.memory_bytes[begin:until]), max(schedule.measured_bytes[begin:until])
                held = max(schedule.held_bytes[begin:until])
            held += self._ledger.resident_bytes
            if held > self._most_held:
                self._most_held = held
            # Most segments are no peak, even with all that may wait to be written on top.
            more = self._resident + self._windows.write_behind_bytes
            if self._details or memory + self._resident > self._peak or measured + more > self._must_fit:
                most = begin if until == begin + 1 else schedule.memory_bytes.index(memory, begin, until)
                segment, alone = self._footprint.segments[most], schedule.alone_bytes[most]
                self._note(segment.unit, segment.live_bytes, alone, segment.gradient_bytes, measured)
            if self._details:
                until_s = begins_s[until] + self._late_s
                self._intervals.append(Interval("compute", self._footprint.segments[begin].unit, self._now, until_s))
            begin = until
            self._now = begins_s[begin] + self._late_s

    # -- memory -------------------------------------------------------------------------------------------------------

    def _pack(self, item: Item) -> None:
        self._settle()
        self._handle(item)
        self._hold(item, item.others_bytes)
        if item.stays:
            self._ledger.want(item)
        else:
            self._store(item)

    def _hold(self, item: Item, others_bytes: int) -> None:
        """The engine holds ``item``, and ``others_bytes`` of what stays in memory."""
        self._ledger.hold(item)
        held = others_bytes + self._ledger.resident_bytes
        if held > self._most_held:
            self._most_held = held

    def _handle(self, item: Item) -> None:
        """A host that computes itself is busy with what moves."""
        self._spend("wait", item.unit, self._busy_s[item.tier] * item.nbytes)

    def _go(self, item: Item) -> None:
        """Nothing but autograd holds ``item`` any more."""
        self._settle()
        if item.held:
            self._hold_alone(item)
        else:
            self._left_bytes += item.nbytes

    def _hold_alone(self, item: Item) -> None:
        if not item.resident:
            item.resident = True
            self._resident += item.nbytes

    def _drop(self, item: Item) -> None:
        self._ledger.drop(item)
        if item.resident:
            item.resident = False
            self._resident -= item.nbytes

    def _release(self, item: Item) -> None:
        """Autograd holds ``item`` no more."""
        self._drop(item)
        self._ledger.end(item)
        if not item.stays:
            self._tier_now[item.tier] -= item.nbytes

    def _note(self, unit: str, live_bytes: int, alone_bytes: int, gradient_bytes: int, measured_bytes: int = 0) -> None:
        """``live_bytes``, and ``alone_bytes`` of what stays that nothing else holds, are there in addition to what moves.
        While the step is measured, all that does not move is ``measured_bytes`` at most.
        """
        others = self._footprint.base_bytes + live_bytes + alone_bytes
        memory = others + self._resident
        if memory > self._peak:
            self._peak, self._peak_unit = memory, unit
        stalled = 0
        if self._left_bytes and not self._loads:
            stalled = min(self._left_bytes, max(0, self._windows.write_behind_bytes - self._ledger.leaving_bytes))
        self._must_fit = max(self._must_fit, max(others, measured_bytes) + self._resident + stalled)
        if self._details:
            moving = sum(item.nbytes for item in self._schedule.items if item.resident and not item.stays)
            kept = max(0, alone_bytes + self._resident - moving)
            self._memory.append(MemoryUse(self._now, memory, gradient_bytes, kept, moving))

    # -- channels -----------------------------------------------------------------------------------------------------

    def _spend(self, channel: str, unit: str, seconds: float) -> None:
        """Compute does something else for a while."""
        if self._details and seconds > 0:
            self._intervals.append(Interval(channel, unit, self._now, self._now + seconds))
        self._late_s += seconds
        self._now += seconds

    def _wait_until(self, unit: str, end_s: float) -> float:
        """Compute waits; returns how long."""
        if end_s <= self._now:
            return 0.0
        seconds = end_s - self._now
        self._spend("wait", unit, seconds)
        self._now = max(self._now, end_s)
        return seconds

    def _transfer(self, one: Transfer) -> None:
        """What a segment needs of weights and state arrives, or what has changed leaves."""
        self._spend("wait", one.unit, self._channels[one.tier].busy_s.get(one.kind, 0.0) * one.nbytes)
        if one.loads:
            self._load_stall += self._wait_until(one.unit, self._transfers.arrives_s(one, self._now))
            self._transfers.read_on(one, self._now)
        else:
            self._store_stall += self._wait_until(one.unit, self._transfers.write(one, self._now))

    def _settle(self) -> None:
        """Let what has left by now leave memory."""
        leaving = self._stores.leaving
        while leaving and leaving[0].leaves_s <= self._now:
            item = leaving.popleft()
            if item.leaving:
                self._left_bytes += item.nbytes if item.resident else 0
                self._drop(item)

    def _store(self, item: Item) -> None:
        tier = item.tier
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

    def _load(self, item: Item, index: int) -> None:
        self._loads = True
        channel = self._channels[item.tier]
        begin = max(self._now, self._load_free[item.tier])
        share = channel.shared if self._stores.free_s(item.tier) > begin else 1.0
        item.arrives_s = begin + item.nbytes / (channel.load_bytes_per_s * share)
        self._load_free[item.tier] = item.arrives_s
        self._hold(item, self._schedule.held_bytes[index])
        self._ledger.want(item)
        self._hold_alone(item)
        if self._details:
            self._intervals.append(Interval("load", item.unit, begin, item.arrives_s))

    def _keep(self, item: Item) -> None:
        """What leaves does not leave any more: backward comes to it now, or soon."""
        self._ledger.want(item)
        self._stores.cancel(item, self._now)

    def _need(self, item: Item | None, index: int) -> None:
        """Backward asks for ``item``, or for something that stays in memory."""
        leaving = self._stores.leaving
        if leaving and leaving[0].leaves_s <= self._now:
            self._settle()
        # Whatever is packed in this segment is packed by now.
        held = self._schedule.held_bytes[index] + self._ledger.resident_bytes
        if held > self._most_held:
            self._most_held = held
        if item is not None:
            if not item.asked:
                self._handle(item)
            self._bring(item, index)
        if self._next < len(self._order):
            self._read_ahead(index)
        if not self._in_backward:
            self._in_backward = True
            self._store_stall += self._wait_until("", self._stores.copied_s)  # memory of what is copied goes
            self._settle()
        if item is not None and item.held and not item.stays:
            self._consumed.append(item)
        if self._consumed:
            self._drop_consumed()

    def _bring(self, item: Item, index: int) -> None:
        if item.leaving:
            self._keep(item)
        elif not item.held and item.gone <= index:  # else it never left, or something else holds it
            self._load_stall += self._wait_until(item.unit, item.stored_s)
            self._load(item, index)
        if item.arrives_s > self._now:
            self._load_stall += self._wait_until(item.unit, item.arrives_s)
        item.asked = True
        self._ledger.asked(item)
        self._settle()

    def _drop_consumed(self) -> None:
        ledger, limit = self._ledger, self._consumed_limit
        if ledger.resident_bytes - ledger.ahead_bytes <= limit:
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
                    self._load(item, index)
            self._next += 1

    def _where(self, item: Item, index: int) -> rules.Where:
        if item.leaving:
            return rules.Where.MEMORY
        if item.held:
            return rules.Where.ELSEWHERE
        if item.stored_s > self._now:
            return rules.Where.BETWEEN
        return rules.Where.ELSEWHERE if item.gone > index else rules.Where.TIER

    def _recompute_block(self, span: BlockSpan, index: int) -> None:
        """The block's forward runs again: its own memory comes on top of what is alive when its backward begins."""
        seconds, nbytes = self._footprint.recompute_costs[span.name]
        segment = self._footprint.segments[index]
        alone = self._schedule.alone_before[index]
        # What is small comes back as a part of the block's own memory.
        live_bytes = segment.live_bytes - self._schedule.dropped_bytes[index] - span.small_bytes + nbytes
        self._note(span.name, live_bytes, alone, segment.gradient_bytes)
        self._spend("recompute", span.name, seconds)
        self._recompute += seconds


class _LikelyPlayer(_Player):
    likely_bytes = 0

    def _note(self, unit: str, live_bytes: int, alone_bytes: int, gradient_bytes: int, measured_bytes: int = 0) -> None:
        # Neither a peak nor what must fit is noted: what is below both may be more than was likely before.
        others = self._footprint.base_bytes - self._footprint.in_flight_bytes + live_bytes + alone_bytes
        in_flight = self._transfers.in_flight_bytes(self._now) if self._footprint.in_flight_bytes else 0
        self.likely_bytes = max(self.likely_bytes, others + self._resident + in_flight)
