"""Counting a model of many equal blocks from a few of them: each repetition adds the same to a step.

A stack of blocks is counted with one repetition and with two. What the second one added is what every further one adds, so
the whole step follows, if the first count, extended by one repetition, is the second one to the last byte and second.
Otherwise nothing is concluded, and every block is counted.
"""

import bisect
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_offload.errors import OffloadPlanError
from hf_offload.forecast.counting import bytes_of_weights, count_footprint
from hf_offload.methods.protocol import OptimizerBytes
from hf_offload.plan.footprint import BlockSpan, Footprint, Saved, Segment
from hf_offload.structure.units import find_blocks, find_units

# Of how many blocks a repetition may consist: gemma3 has one layer of full attention in six.
_LONGEST_PERIOD = 8
_PLAIN = (bool, int, float, bytes, type(None), range, torch.dtype, torch.device)
_When = Callable[[int], int]
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


@dataclasses.dataclass(frozen=True)
class Stack:
    """Blocks one behind the other, of which some are repeated.

    Attributes:
        name: Of the list that holds them.
        blocks: All of them.
        first: The first block of the first repetition. The blocks before it end with such a repetition, too.
        period: How many blocks are repeated.
        times: How often. At least one block follows.
    """

    name: str
    blocks: nn.ModuleList
    first: int
    period: int
    times: int

    @property
    def counted(self) -> int:
        """How many blocks are counted, with one repetition and with two."""
        left = len(self.blocks) - self.period * self.times
        return 2 * left + 3 * self.period

    @contextlib.contextmanager
    def shortened(self, times: int) -> Iterator[None]:
        """Inside, there are only ``times`` repetitions."""
        every = list(self.blocks)
        begin, end = self.first + times * self.period, self.first + self.times * self.period
        self.blocks._modules = {str(index): block for index, block in enumerate(every[:begin] + every[end:])}
        try:
            yield
        finally:
            self.blocks._modules = {str(index): block for index, block in enumerate(every)}

    def renamed(self, name: str, by: int) -> str:
        """The name of a module in one of the blocks from ``first`` on, ``by`` blocks further; other names as they are."""
        index = self.index_of(name)
        if index is None or index < self.first:
            return name
        _, dot, rest = name[len(self.name) + 1 :].partition(".")
        return f"{self.name}.{index + by}{dot}{rest}"

    def index_of(self, name: str) -> int | None:
        """Which block the module of that name lies in, if it lies in one."""
        begin = f"{self.name}."
        return int(name[len(begin) :].partition(".")[0]) if name.startswith(begin) else None


def count_repeats(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    *,
    optimizer: OptimizerBytes,
    update_in_backward: bool = False,
    **options: Any,
) -> Footprint | None:
    """What :func:`~hf_offload.forecast.counting.count_footprint` finds, from counts of ``model`` with fewer blocks. None
    where that cannot be concluded.

    The model is good for nothing afterwards: a first forward may install hooks, and blocks that were missing have none.
    """
    stacks = list(find_stacks(model))
    if not stacks:
        return None
    counted = []
    try:
        for times in (2, 1):  # the blocks of the second count were all part of the first
            with contextlib.ExitStack() as short:
                for stack in stacks:
                    short.enter_context(stack.shortened(times))
                counted.append(
                    count_footprint(model, batch, optimizer=optimizer, update_in_backward=update_in_backward, **options)
                )
    except OffloadPlanError:
        return None  # a forward may count its blocks; if it is another reason, the whole model has it too
    # Names and weights are those of all blocks.
    units = find_units(model)
    whole: dict[str, Any] = {
        "units": {name: unit.block for name, unit in units.items()},
        "classes": {name: unit.kind for name, unit in units.items()},
        **bytes_of_weights(model, optimizer, update_in_backward=update_in_backward),
    }
    twice, once = (dataclasses.replace(one, **whole) for one in counted)
    if _extended(once, stacks, [1] * len(stacks), twice) != twice:
        return None
    return _extended(once, stacks, [stack.times - 1 for stack in stacks], twice)


# -- which blocks are equal --------------------------------------------------------------------------------------------


def find_stacks(model: nn.Module) -> Iterator[Stack]:
    """Lists of blocks that are worth counting with fewer repetitions."""
    blocks = find_blocks(model)
    lists = dict.fromkeys(name.rpartition(".")[0] for name in blocks)
    for name in lists:
        modules = model.get_submodule(name)
        if not isinstance(modules, nn.ModuleList) or any(f"{name}.{index}" not in blocks for index in modules._modules):
            continue
        kinds = _kinds(model, name, modules)
        found = [
            stack for period in range(1, _LONGEST_PERIOD + 1) if (stack := _repeated(name, modules, kinds, period))
        ]
        if found and (best := min(found, key=lambda one: one.counted)).counted < len(modules):
            yield best


def _repeated(name: str, modules: nn.ModuleList, kinds: Sequence[Any], period: int) -> Stack | None:
    others = (index for index in range(len(kinds) - period) if kinds[index] != kinds[index + period])
    # Behind the last one that is not repeated, and one repetition: the first block of a kind saves what all of them share.
    first = max(others, default=-1) + 1 + period
    times = (len(kinds) - first - 1) // period
    return Stack(name, modules, first, period, times) if times > 1 else None


def _kinds(model: nn.Module, name: str, blocks: nn.ModuleList) -> list[Any]:
    """Something for each block that two blocks have in common if their forwards do the same."""
    short = name.rpartition(".")[2]
    described = [dict(_described(block, f"{short}.{index}.")) for index, block in enumerate(blocks)]
    numbers = {key for key, value in described[0].items() if type(value) is int}
    # The number of a block, counted from wherever: it differs without making a difference.
    same = {
        key for key in numbers if all(one.get(key) == described[0][key] + index for index, one in enumerate(described))
    }
    seen: set[int] = set()
    for index, block in enumerate(blocks):
        own = {id(tensor) for tensor in (*block.parameters(), *block.buffers())}
        if own & seen:  # its gradients add up with those of another block
            return list(range(len(blocks)))
        seen |= own
        described[index] = {key: value for key, value in described[index].items() if key not in same}
    configs = {id(config): config for config in (vars(module).get("config") for module in model.modules())}
    lists = [
        value
        for config in configs.values()
        for value in getattr(config, "__dict__", {}).values()
        if isinstance(value, (list, tuple)) and len(value) == len(blocks)
    ]
    return [(one, [repr(value[index]) for value in lists]) for index, one in enumerate(described)]


def _described(block: nn.Module, own: str) -> Iterator[tuple[str, Any]]:
    """What there is in a block, by name; ``own`` is how the names of its modules begin, or go on."""
    for name, module in block.named_modules():
        yield name, type(module)
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                for one, tensor in value.items():
                    what = None if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad)
                    yield f"{name}.{one}", what
            elif key not in _OF_MODULES:
                yield f"{name}.{key}", _plain(value, own)


def _plain(value: Any, own: str) -> Any:
    if isinstance(value, str):
        return value.replace(own, "*.")
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(one, own) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one, own) for key, one in value.items()}
    return type(value)


# -- what repetitions add ----------------------------------------------------------------------------------------------


def _extended(found: Footprint, stacks: Sequence[Stack], more: Sequence[int], twice: Footprint) -> Footprint | None:
    """``found``, counted with one repetition of each stack, with so many ``more``. ``twice`` is counted with two."""
    for stack, times in zip(stacks, more, strict=True):
        repetition = _Repetition.find(found, stack, times)
        if repetition is None:
            return None
        if len(stacks) == 1:
            repetition = repetition.as_left_in(found, twice)
            if repetition is None:
                return None
        found = repetition.inserted(found)
    return found


@dataclasses.dataclass(frozen=True)
class _Repetition:
    """The repetition in a footprint, and how many more there are to be.

    Attributes:
        forward, backward: Half-open ranges of its segments.
        forward_end, backward_end: Where the block ends that follows it in forward, and in backward. What it saved and is gone
            later is gone with the whole stack.
        saved: The half-open range of what it saved.
        in_forward: Bytes that it leaves alive.
        left, left_from: How many of them are alive from that segment on: copies of weights that autocast makes, and nothing
            saves, are gone when forward ends.
        in_backward: The same for backward, without what forward had left, and with its gradients.
        gradients: Bytes of its gradients.
    """

    stack: Stack
    more: int
    forward: tuple[int, int]
    backward: tuple[int, int]
    forward_end: int
    backward_end: int
    saved: tuple[int, int]
    in_forward: int
    left: int
    left_from: int
    in_backward: int
    gradients: int

    @classmethod
    def find(cls, found: Footprint, stack: Stack, more: int) -> "_Repetition | None":
        """Where the repetition lies; None if forward and backward do not run through it once."""
        begin, end = stack.first, stack.first + stack.period
        spans = {span.name: span for span in found.blocks}
        name = "{}.{}".format
        if any(name(stack.name, index) not in spans for index in range(begin - 1, end + 1)):
            return None
        first, after = (spans[name(stack.name, index)] for index in (begin, end))
        ends: dict[int | None, int] = {stack.index_of(one.unit): index + 1 for index, one in enumerate(found.segments)}
        forward = first.forward[0], after.forward[0]
        backward = ends[end], ends[begin]
        saving = [stack.index_of(one.unit) for one in found.saved]
        if not forward[0] < forward[1] <= backward[0] < backward[1] or not {begin, end} <= set(saving):
            return None
        segments = found.segments
        return cls(
            stack=stack,
            more=more,
            forward=forward,
            backward=backward,
            forward_end=after.forward[1],
            backward_end=ends[begin - 1],
            saved=(saving.index(begin), saving.index(end)),
            in_forward=(left := segments[forward[1]].live_bytes - segments[forward[0]].live_bytes),
            left=left,
            left_from=backward[0],
            in_backward=segments[backward[1]].live_bytes - segments[backward[0]].live_bytes,
            gradients=segments[backward[1]].gradient_bytes - segments[backward[0]].gradient_bytes,
        )

    def as_left_in(self, once: Footprint, twice: Footprint) -> "_Repetition | None":
        """With what the second repetition of ``twice`` leaves alive when backward begins; None where that does not say what
        more of them leave in the segment in which a part of it goes.
        """
        (begin, end), more = (self.forward[1], self.backward[0]), self.forward[1] - self.forward[0]
        between = zip(once.segments[begin : end + 1], twice.segments[begin + more : end + more + 1], strict=False)
        added = [later.live_bytes - one.live_bytes for one, later in between]
        place = next((place for place, nbytes in enumerate(added) if nbytes != self.in_forward), None)
        if place is None:
            return self
        before, there = once.segments[begin + place - 1], once.segments[begin + place]
        if before.live_bytes + self.more * self.in_forward > there.live_bytes + self.more * added[-1]:
            return None
        return dataclasses.replace(self, left=added[-1], left_from=begin + place)

    def inserted(self, found: Footprint) -> Footprint:
        """The footprint with ``more`` copies of the repetition."""
        return dataclasses.replace(
            found,
            segments=tuple(self._segments(found.segments)),
            saved=tuple(self._saved(found.saved)),
            blocks=tuple(self._blocks(found.blocks)),
        )

    def _segments(self, segments: Sequence[Segment]) -> Iterator[Segment]:
        more, kept, left = self.more, self.more * self.in_forward, self.more * self.left
        yield from segments[: self.forward[0]]
        for copy in range(more + 1):
            yield from self._changed(segments[slice(*self.forward)], copy, copy * self.in_forward)
        yield from self._changed(segments[self.forward[1] : self.left_from], more, kept)
        yield from self._changed(segments[self.left_from : self.backward[0]], more, left)
        for turn in range(more + 1):  # the last copy comes first
            live, gradients = left + turn * self.in_backward, turn * self.gradients
            yield from self._changed(segments[slice(*self.backward)], more - turn, live, gradients)
        rest = left + more * self.in_backward
        yield from self._changed(segments[self.backward[1] :], 0, rest, more * self.gradients)

    def _changed(self, segments: Sequence[Segment], copy: int, live: int, gradients: int = 0) -> Iterator[Segment]:
        for one in segments:
            yield dataclasses.replace(
                one,
                unit=self._name(one.unit, copy),
                live_bytes=one.live_bytes + live,
                gradient_bytes=one.gradient_bytes + gradients,
            )

    def _saved(self, saved: Sequence[Saved]) -> Iterator[Saved]:
        begin, end = self.saved
        for one in saved[:begin]:
            yield self._moved(one, self._when_before)
        for copy in range(self.more + 1):
            for one in saved[begin:end]:
                yield self._moved(one, functools.partial(self._when_inside, copy=copy), copy)
        for one in saved[end:]:
            yield self._moved(one, self._when_behind, self.more)

    def _moved(self, one: Saved, when: _When, copy: int = 0) -> Saved:
        times = map(when, (one.packed, one.gone, one.needed, one.released))
        return Saved(self._name(one.unit, copy), one.nbytes, *times)

    def _blocks(self, spans: Sequence[BlockSpan]) -> Iterator[BlockSpan]:
        begin, end = (bisect.bisect_left(spans, time, key=lambda span: span.forward[0]) for time in self.forward)
        for span in spans[:begin]:
            yield self._shifted(span, self._when_before)
        for copy in range(self.more + 1):
            for span in spans[begin:end]:
                yield self._shifted(span, functools.partial(self._when_inside, copy=copy), copy)
        for span in spans[end:]:
            yield self._shifted(span, self._when_behind, self.more)

    def _shifted(self, span: BlockSpan, when: _When, copy: int = 0) -> BlockSpan:
        entered, left = map(when, span.forward)
        name = self._name(span.name, copy)
        return dataclasses.replace(span, name=name, forward=(entered, left), backward=when(span.backward))

    def _name(self, name: str, copy: int) -> str:
        return self.stack.renamed(name, copy * self.stack.period)

    # -- when something happens that was counted in segment ``time`` -----------------------------------------------------

    def _when_before(self, time: int) -> int:
        """To what was there before."""
        return time if time <= self.forward[1] else self._when_behind(time)

    def _when_inside(self, time: int, copy: int) -> int:
        """To what is repeated."""
        if time <= self.forward_end:
            return time + copy * (self.forward[1] - self.forward[0])
        if self.backward[0] <= time <= self.backward_end:
            return time + self._added[0] + (self.more - copy) * (self.backward[1] - self.backward[0])
        return self._when_behind(time)

    def _when_behind(self, time: int) -> int:
        """To what came later."""
        forward, backward = self._added
        return time + forward + (backward if time >= self.backward[1] else 0)

    @property
    def _added(self) -> tuple[int, int]:
        """How many segments there are more, in forward and in backward."""
        return self.more * (self.forward[1] - self.forward[0]), self.more * (self.backward[1] - self.backward[0])
