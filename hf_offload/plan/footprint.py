"""What one training step does to memory: segments of compute, and tensors saved in one and needed in another."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hf_offload.plan.columns import Column, SavedColumns, SegmentColumns


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A part of a step in which no saved tensor comes, is asked for, or goes.

    Attributes:
        unit: The unit that computes.
        backward: Whether it is part of backward.
        live_bytes: Most bytes alive at once in it, without weights, optimizer state and saved tensors whose memory
            nothing else holds.
        gradient_bytes: How much of that are gradients of weights.
        seconds: How long it takes.
        measured_bytes: How many more are alive while a step is measured: autograd makes new tensors then where else it adds
            up in place.
    """

    unit: str
    backward: bool
    live_bytes: int
    gradient_bytes: int
    seconds: float
    measured_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """Bytes that autograd saves once, however many tensors look at them. Times are indices of segments.

    Attributes:
        unit: The unit in whose forward it was saved.
        nbytes: Its size.
        packed: The first segment after it was saved.
        gone: The first segment in which nothing but autograd holds it. From here on keeping it costs memory.
        needed: The first segment of backward that uses it.
        released: The first segment in which autograd holds it no more.
    """

    unit: str
    nbytes: int
    packed: int
    gone: int
    needed: int
    released: int


@dataclasses.dataclass(frozen=True)
class BlockSpan:
    """A repeated block: where it lies in the step and what recomputing it would need.

    ``boundary_bytes`` is the size of what it takes as input; ``forward`` the half-open range of its segments in forward;
    ``backward`` the segment in which its backward begins; ``not_twice`` why its forward cannot run a second time, empty where
    it can; ``small_bytes`` what it saves that is too small to move, and that nothing else holds: recompute drops it, too.
    """

    name: str
    boundary_bytes: int
    forward: tuple[int, int]
    backward: int
    not_twice: str = ""
    small_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class UnitWeights:
    """Of a unit's weights that are large enough to leave memory: their bytes, those of the trained ones, and of their state.

    ``sizes`` are the bytes of each, in the order of their use in forward; empty for a single one. ``borrowed`` are weights of
    other units that it uses, too: the unit, and the place among its ``sizes``. Of a table that is looked up, backward needs
    nothing.
    """

    weight_bytes: int
    trained_bytes: int
    state_bytes: int
    sizes: tuple[int, ...] = ()
    borrowed: tuple[tuple[str, int], ...] = ()
    is_looked_up: bool = False

    @property
    def each(self) -> tuple[int, ...]:
        """The bytes of every single weight."""
        return self.sizes or ((self.weight_bytes,) if self.weight_bytes else ())


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that are no saved tensors: loads are there when segment ``at`` begins, stores begin then."""

    kind: str
    unit: str
    tier: str
    nbytes: int
    at: int
    loads: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Uses:
    """Segments in which a unit's weights are used: the first of forward, the first and the last of backward."""

    forward: int
    backward: int
    last: int


@dataclasses.dataclass(frozen=True)
class Footprint:
    """One step of one model on one batch.

    Attributes:
        segments: The step from beginning to end, without the optimizer's step.
        saved: What could be moved, in the order in which it was saved.
        blocks: The repeated blocks in order.
        units: Unit -> the block it lies in, or None.
        classes: Unit -> the class of its module.
        parameters: How many weights the model has.
        base_bytes: Weights, buffers and optimizer state, there all the time, and ``buffer_bytes``.
        gradient_bytes: Gradients at the end of backward (a part of ``live_bytes`` there).
        optimizer_step_bytes: What the optimizer's step needs in addition to them.
        optimizer_step_s: How long it takes.
        step_share: Of a run whose state is on a tier: what updates of weights whose state stays need of memory, as a share of
            these weights.
        source: ``"counted"`` (on tensors without data) or ``"measured"``.
        largest_operation_bytes: What the operation with the largest operands and results has in memory, weights left out: no
            order of operations needs less.
        head: The output head over a vocabulary; empty where there is none, or its loss cannot be tiled.
        tiled: Modules that are computed a few tokens at a time.
        state_bytes: How much of ``base_bytes`` is optimizer state.
        buffer_bytes: How much of ``base_bytes`` the optimizer has for the time of a step, forward included.
        is_one_stack: Whether two forwards may use each block right after each other.
        sampled: Linear layers whose weight gradient is estimated from a part of their input.
        min_bytes: Smaller tensors stay in memory; 0 where that is not known.
        small_bytes: How much of ``live_bytes`` is saved and smaller than that, at most at once.
        skipped_blocks: Blocks that did not run, and may run in another step (layer drop).
        weights: Unit -> what of its weights, gradients and state may leave memory.
        transfers: Of weights, gradients and state that are on tiers, in the order of their segments.
        transfer_windows: Kind of transfers -> how many bytes of it may be on their way, half of them each way.
        transfer_spares: Kind -> how much of its window may be buffers that nothing uses, kept for the next of their size.
        in_flight_bytes: How much of ``base_bytes`` is for what is on its way: at most moments less of it is used.
        idle: Segments, as half-open ranges, in which so many of these bytes cannot be used, however slow a tier is.
        elementwise: The same step with all blocks recomputing their elementwise operations; None where that cannot be chosen.
        is_reduced: Whether all blocks recompute their elementwise operations in it.
        looks_at_gradients: Whether something does before the optimizer steps, so that those that had left memory are back.
        accumulates: Whether gradients are there when it begins, in memory or on a tier: those of earlier micro-batches.
    """

    segments: tuple[Segment, ...]
    saved: tuple[Saved, ...]
    blocks: tuple[BlockSpan, ...]
    units: Mapping[str, str | None]
    classes: Mapping[str, str]
    parameters: int
    base_bytes: int
    gradient_bytes: int
    optimizer_step_bytes: int
    optimizer_step_s: float
    source: str
    largest_operation_bytes: int = 0
    head: str = ""
    tiled: tuple[str, ...] = ()
    sampled: tuple[str, ...] = ()
    state_bytes: int = 0
    buffer_bytes: int = 0
    is_one_stack: bool = False
    min_bytes: int = 0
    small_bytes: int = 0
    skipped_blocks: tuple[str, ...] = ()
    weights: Mapping[str, UnitWeights] = dataclasses.field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()
    transfer_windows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    transfer_spares: Mapping[str, int] = dataclasses.field(default_factory=dict)
    in_flight_bytes: int = 0
    idle: tuple[tuple[int, int, int], ...] = ()
    elementwise: "Footprint | None" = None
    is_reduced: bool = False
    step_share: float = 0.0
    accumulates: bool = False
    looks_at_gradients: bool = False

    @functools.cached_property
    def plain(self) -> "Footprint":
        """The same, without that choice."""
        return self if self.elementwise is None else dataclasses.replace(self, elementwise=None)

    @functools.cached_property
    def reduced(self) -> "Footprint | None":
        """The step in which all blocks recompute their elementwise operations; None where that cannot be chosen, or saves
        nothing.
        """
        if self.elementwise is None:
            return None
        # Of both, the model's bytes and whether a block can run twice are as in the usual step.
        not_twice = {span.name: span.not_twice for span in self.blocks}
        found = dataclasses.replace(
            self,
            segments=self.elementwise.segments,
            saved=self.elementwise.saved,
            blocks=tuple(
                dataclasses.replace(span, not_twice=not_twice.get(span.name, span.not_twice))
                for span in self.elementwise.blocks
            ),
            elementwise=None,
            is_reduced=True,
        )
        return found if sum(found.saved_bytes.values()) < sum(self.saved_bytes.values()) else None

    @functools.cached_property
    def recomputable(self) -> tuple[BlockSpan, ...]:
        """The blocks that can be recomputed in backward."""
        never = {span.name for span in self.blocks if span.not_twice}
        return tuple(span for span in self.blocks if span.name not in never)

    def dropped_bytes(self, spans: Iterable[BlockSpan]) -> Column:
        """Segment -> how much less of what is too small to move is there if the blocks of ``spans`` are recomputed."""
        changes = np.zeros(len(self.segments) + 1, np.int64)
        for span in spans:
            changes[span.forward[1]] += span.small_bytes
            changes[span.backward] -= span.small_bytes
        return changes.cumsum()[:-1]

    @functools.cached_property
    def idle_bytes(self) -> Column:
        """Segment -> how much of ``in_flight_bytes`` cannot be used in it."""
        changes = np.zeros(len(self.segments) + 1, np.int64)
        for begin, end, nbytes in self.idle:
            changes[begin] += nbytes
            changes[end] -= nbytes
        return changes.cumsum()[:-1]

    @functools.cached_property
    def least_live_bytes(self) -> Column:
        """Segment -> its live bytes, were all blocks recomputed that can be, less what is idle of ``base_bytes``."""
        return self.segment_columns.live_bytes - self.dropped_bytes(self.recomputable) - self.idle_bytes

    @functools.cached_property
    def most_in_blocks(self) -> int:
        """Most live bytes in any block, also while the step is measured."""
        inside = (segment for segment in self.segments if self.units[segment.unit] is not None)
        return max((segment.live_bytes + segment.measured_bytes for segment in inside), default=0)

    @functools.cached_property
    def uses(self) -> dict[str, Uses]:
        """Unit with weights -> when it uses them."""
        first: dict[str, int] = {}
        backward: dict[str, int] = {}
        last: dict[str, int] = {}
        for index, segment in enumerate(self.segments):
            if not segment.backward:
                first.setdefault(segment.unit, index)
            else:
                backward.setdefault(segment.unit, index)
                last[segment.unit] = index
        spans = {span.name: span.backward for span in self.blocks}
        end = len(self.segments) - 1
        found = {}
        for unit in self.weights:
            # A block that is recomputed needs all of its weights when its backward begins.
            begins = min(backward.get(unit, end), spans.get(self.units.get(unit) or "", end))
            found[unit] = Uses(first.get(unit, 0), begins, last.get(unit, begins))
        return found

    @functools.cached_property
    def saved_columns(self) -> SavedColumns:
        """``saved``, for arithmetic on all of it at once."""
        places = {unit: place for place, unit in enumerate(self.units)}
        rows = [(places[one.unit], one.nbytes, one.packed, one.gone, one.needed, one.released) for one in self.saved]
        return SavedColumns(*np.array(rows, np.int64).reshape(-1, 6).T)

    @functools.cached_property
    def segment_columns(self) -> SegmentColumns:
        """``segments``, for arithmetic on all of them at once."""
        return SegmentColumns(
            [0.0, *itertools.accumulate(one.seconds for one in self.segments)],
            np.array([one.live_bytes for one in self.segments], np.int64),
            np.array([one.measured_bytes for one in self.segments], np.int64),
        )

    @functools.cached_property
    def transfers_at(self) -> Column:
        """The segment of each of ``transfers``."""
        return np.array([one.at for one in self.transfers], np.int64)

    @functools.cached_property
    def loads(self) -> dict[str, list[Transfer]]:
        """Kind of transfers -> what of it is loaded, in order."""
        found: dict[str, list[Transfer]] = {}
        for one in self.transfers:
            found.setdefault(one.kind, []).extend([one] if one.loads else [])
        return found

    @functools.cached_property
    def store_counts(self) -> collections.Counter[str]:
        """Kind of transfers -> how many of it are stores."""
        return collections.Counter(one.kind for one in self.transfers if not one.loads)

    def saves_like(self, other: "Footprint") -> None:
        """``other`` has the same saved bytes, units and blocks: what is known of them there need not be found again."""
        for name in ("saved_columns", "saved_bytes", "recomputable", "released_last"):
            self.__dict__[name] = getattr(other, name)
        if self.segments is other.segments:
            self.computes_like(other)

    def computes_like(self, other: "Footprint") -> None:
        """``other`` has the same segments, too."""
        for name in ("segment_columns", "recompute_costs"):
            self.__dict__[name] = getattr(other, name)

    @functools.cached_property
    def parts_held(self) -> dict[Any, Any]:
        """What :func:`~hf_offload.plan.state_transfers.place_state` has found out about it, for places that come again."""
        return {}

    @functools.cached_property
    def saved_bytes(self) -> dict[str, int]:
        """Bytes saved per unit."""
        total = dict.fromkeys(self.units, 0)
        for one in self.saved:
            total[one.unit] += one.nbytes
        return total

    @functools.cached_property
    def recompute_costs(self) -> dict[str, tuple[float, int]]:
        """Block -> seconds that its forward takes again in backward, and bytes on top of those alive when it begins."""
        held: dict[str, collections.Counter[int]] = {span.name: collections.Counter() for span in self.blocks}
        ends = {span.name: span.forward[1] for span in self.blocks}
        for one in self.saved:
            block = self.units[one.unit]
            if block in held:
                held[block][min(one.gone, ends[block] - 1)] += one.nbytes
        costs = {}
        for span in self.blocks:
            begin, end = span.forward
            segments = self.segments[begin:end]
            own, most = 0, 0
            for index, segment in enumerate(segments, begin):
                own += held[span.name][index]
                most = max(most, segment.live_bytes - segments[0].live_bytes + own)
            costs[span.name] = (sum(segment.seconds for segment in segments), most)
        return costs

    @functools.cached_property
    def released_last(self) -> dict[str, int]:
        """Block -> the first segment in which nothing that was saved in it is held any more."""
        last: dict[str, int] = {}
        for one in self.saved:
            block = self.units[one.unit]
            if block is not None:
                last[block] = max(last.get(block, 0), one.released)
        return last

    @functools.cached_property
    def step_s(self) -> float:
        """Compute alone: nothing recomputed, nothing waited for."""
        return sum(segment.seconds for segment in self.segments) + self.optimizer_step_s

    def at_pace(self, pace: float) -> "Footprint":
        """The same step where everything takes ``pace`` times as long."""
        segments = tuple(dataclasses.replace(segment, seconds=segment.seconds * pace) for segment in self.segments)
        return dataclasses.replace(
            self,
            segments=segments,
            optimizer_step_s=self.optimizer_step_s * pace,
        )

    @property
    def optimizer_peak_bytes(self) -> int:
        """Memory during the optimizer's step, when all that was saved is gone."""
        return self.base_bytes + self.gradient_bytes + self.optimizer_step_bytes
