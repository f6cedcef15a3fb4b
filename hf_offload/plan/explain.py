"""A plan in words: one line per unit, equal blocks together, each with its reason."""

import dataclasses
import re
from collections.abc import Iterator

from hf_offload.plan.footprint import Footprint
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import Problem, Solution
from hf_offload.settings.sizes import format_bytes, format_seconds

_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


@dataclasses.dataclass(frozen=True)
class UnitLine:
    """Units that are alike and placed alike. Bytes and seconds are those of one of them.

    Attributes:
        name: A unit, or several: ``model.layers.0-11.mlp``.
        kind: The class of the module.
        count: How many units.
        saved_bytes: What autograd saves of one.
        working_bytes: Most bytes alive in addition to saved tensors while it computes.
        forward_s, backward_s: Its compute.
        placement: What happens to what it saves.
        reason: Why.
        units: All of their names.
    """

    name: str
    kind: str
    count: int
    saved_bytes: int
    working_bytes: int
    forward_s: float
    backward_s: float
    placement: Placement
    reason: str
    units: tuple[str, ...]


def unit_lines(problem: Problem, solution: Solution) -> list[UnitLine]:
    """All units in the order of the model."""
    footprint = problem.footprint
    groups: dict[tuple[object, ...], list[str]] = {}
    for unit in footprint.units:
        placement = solution.placements[unit]
        # Equal blocks differ by a few bytes (the first one may save its input) and by the clock.
        alike = (_NUMBER.sub(".*", unit), footprint.kinds[unit], placement, _few_digits(footprint.saved_bytes[unit]))
        groups.setdefault(alike, []).append(unit)
    lines = []
    for units in groups.values():
        first = units[0]
        lines.append(
            UnitLine(
                name=_joined(units),
                kind=footprint.kinds[first],
                count=len(units),
                saved_bytes=footprint.saved_bytes[first],
                working_bytes=max(footprint.working_bytes[unit] for unit in units),
                forward_s=sum(footprint.forward_s[unit] for unit in units) / len(units),
                backward_s=sum(footprint.backward_s[unit] for unit in units) / len(units),
                placement=solution.placements[first],
                reason=_reason(problem, solution, first),
                units=tuple(units),
            )
        )
    return lines


def _few_digits(nbytes: int) -> str:
    return f"{nbytes:.2g}"


def _joined(units: list[str]) -> str:
    """``h.0.attn, h.1.attn, h.2.attn`` -> ``h.0-2.attn``; gaps are shown."""
    if len(units) == 1:
        return units[0]
    numbers = [int(match[1]) if (match := _NUMBER.search(unit)) else -1 for unit in units]
    if -1 in numbers:
        return ", ".join(units)
    return _NUMBER.sub("." + ",".join(_ranges(numbers)), units[0], count=1)


def _ranges(numbers: list[int]) -> Iterator[str]:
    begin = last = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == last + 1:
            last = number
            continue
        yield f"{begin}" if begin == last else f"{begin}-{last}"
        if number is not None:
            begin = last = number


def _reason(problem: Problem, solution: Solution, unit: str) -> str:
    footprint = problem.footprint
    placement = solution.placements[unit]
    nbytes = footprint.saved_bytes[unit]
    if nbytes == 0 and not placement.elementwise:
        return "saves nothing"
    if placement is Placement.KEEP:
        everything = all(one is Placement.KEEP for one in solution.placements.values())
        return "the whole step fits" if everything else "fits"
    if placement.recomputes:
        block = footprint.units[unit] or unit
        members = [one for one, where in footprint.units.items() if where == block]
        again = sum(footprint.forward_s[one] for one in members)
        text = f"{format_seconds(again)} again"
        if problem.channels:
            fastest = max(channel.store_bytes_per_s for channel in problem.channels.values())
            text += f"; moving takes {format_seconds(sum(footprint.saved_bytes[one] for one in members) / fastest)}"
        return text
    if placement is Placement.ELEMENTWISE:
        return _less(footprint, unit)
    assert placement.tier is not None
    channel = problem.channels[placement.tier]
    out, back = nbytes / channel.store_bytes_per_s, nbytes / channel.load_bytes_per_s
    between = format_seconds(_time_between(footprint, unit))
    moved = f"{format_seconds(out)} out, {format_seconds(back)} back, {between} between"
    return f"{_less(footprint, unit)}; {moved}" if placement.elementwise else moved


def _less(footprint: Footprint, unit: str) -> str:
    """What a unit does not save, and what its block recomputes for that."""
    block = footprint.units[unit]
    before = footprint.usual or footprint
    nbytes = before.saved_bytes[unit] - footprint.saved_bytes[unit]
    members = [one for one, where in footprint.units.items() if where == block]
    usual, now = (sum(step.forward_s[one] + step.backward_s[one] for one in members) for step in (before, footprint))
    return f"{format_bytes(max(0, nbytes))} less saved, {format_seconds(max(0.0, now - usual))} more a block"


def _time_between(footprint: Footprint, unit: str) -> float:
    mine = [one for one in footprint.saved if one.unit == unit]
    begin, end = min(one.packed for one in mine), min(one.needed for one in mine)
    return sum(segment.seconds for segment in footprint.segments[begin:end])
