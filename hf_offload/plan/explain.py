"""A plan in words: what happens to each unit, equal blocks together, and what is where of each category of bytes."""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping

from hf_offload.plan.footprint import Footprint
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import Problem, Solution
from hf_offload.plan.state_placement import ACTIVATIONS, GRADIENTS, STATE, WEIGHTS, StatePlacement, least_weights
from hf_offload.settings.sizes import format_seconds

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
        alike = (_NUMBER.sub(".*", unit), footprint.classes[unit], placement, _few_digits(footprint.saved_bytes[unit]))
        groups.setdefault(alike, []).append(unit)
    lines = []
    for units in groups.values():
        first = units[0]
        lines.append(
            UnitLine(
                name=_joined(units),
                kind=footprint.classes[first],
                count=len(units),
                saved_bytes=footprint.saved_bytes[first],
                working_bytes=max((one.live_bytes for one in footprint.segments if one.unit in units), default=0),
                forward_s=_seconds(footprint, units, backward=False) / len(units),
                backward_s=_seconds(footprint, units, backward=True) / len(units),
                placement=solution.placements[first],
                reason=_reason(problem, solution, first),
                units=tuple(units),
            )
        )
    return lines


def _seconds(footprint: Footprint, units: Collection[str], backward: bool) -> float:
    return sum(one.seconds for one in footprint.segments if one.backward == backward and one.unit in units)


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
    if nbytes == 0:
        return "saves nothing"
    if placement is Placement.KEEP:
        everything = all(one is Placement.KEEP for one in solution.placements.values())
        return "the whole step fits" if everything else "fits"
    if placement.recomputes:
        block = footprint.units[unit] or unit
        members = [one for one, where in footprint.units.items() if where == block]
        again = _seconds(footprint, members, backward=False)
        text = f"{format_seconds(again)} again"
        if problem.channels:
            fastest = max(channel.store_bytes_per_s for channel in problem.channels.values())
            text += f"; moving takes {format_seconds(sum(footprint.saved_bytes[one] for one in members) / fastest)}"
        return text
    assert placement.tier is not None
    channel = problem.channels[placement.tier]
    out, back = nbytes / channel.store_bytes_per_s, nbytes / channel.load_bytes_per_s
    between = format_seconds(_time_between(footprint, unit))
    return f"{format_seconds(out)} out, {format_seconds(back)} back, {between} between"


def _time_between(footprint: Footprint, unit: str) -> float:
    mine = [one for one in footprint.saved if one.unit == unit]
    begin, end = min(one.packed for one in mine), min(one.needed for one in mine)
    return sum(segment.seconds for segment in footprint.segments[begin:end])


@dataclasses.dataclass(frozen=True)
class Category:
    """One category of bytes under a plan.

    Attributes:
        name: Weights, gradients, optimizer state or activations.
        total_bytes: All of it, as a run that moves nothing has it in memory.
        memory_bytes: How much of it stays in memory; of activations, what is kept.
        tiers: Tier -> the most that lies there.
        written_bytes, read_bytes: Tier -> bytes a step.
    """

    name: str
    total_bytes: int
    memory_bytes: int
    tiers: Mapping[str, int]
    written_bytes: Mapping[str, int]
    read_bytes: Mapping[str, int]

    @property
    def place(self) -> str:
        """Where it is, in words."""
        places = ["memory"] if self.memory_bytes or not self.tiers else []
        return ", ".join([*places, *(tier for tier, nbytes in self.tiers.items() if nbytes)])


def categories_of(
    counted: Footprint, problem: Problem, placement: StatePlacement, solution: Solution | None
) -> list[Category]:
    """All categories. ``counted`` is the step with everything in memory, ``problem`` what ``placement`` leaves of it."""
    every = counted.weights.values()
    weights = counted.base_bytes - counted.state_bytes - counted.buffer_bytes
    large = sum(one.weight_bytes for one in every)
    leaving = [
        one for unit, one in counted.weights.items() if placement.state is not None and unit not in placement.staying
    ]
    state, trained = (sum(getattr(one, name) for one in leaving) for name in ("state_bytes", "trained_bytes"))
    staying = (
        min(large, max(placement.weights_bytes, least_weights(counted))) if placement.weights is not None else large
    )
    gradients = counted.gradient_bytes
    left = 0 if placement.keeps_gradients else min(gradients, trained)
    found = [
        _category(problem, WEIGHTS, weights, weights - large + staying, placement.weights, large),
        _category(
            problem,
            GRADIENTS,
            gradients,
            gradients - left,
            placement.state if placement.moves_gradients else None,
            trained,
        ),
        _category(problem, STATE, counted.state_bytes, counted.state_bytes - state, placement.state, state),
    ]
    if solution is not None:
        saved = problem.footprint.saved_bytes
        kept = sum(saved[unit] for unit, one in solution.placements.items() if one.tier is None and not one.recomputes)
        moved = dict(solution.timeline.tier_bytes)
        found.append(Category(ACTIVATIONS, sum(counted.saved_bytes.values()), kept, moved, moved, moved))
    return found


def _category(problem: Problem, name: str, total: int, memory: int, tier: str | None, nbytes: int) -> Category:
    transfers = [one for one in problem.footprint.transfers if one.kind == name]
    moved = [
        {
            one.tier: sum(each.nbytes for each in transfers if each.loads == loads and each.tier == one.tier)
            for one in transfers
        }
        for loads in (False, True)
    ]
    return Category(name, total, memory, {} if tier is None else {tier: nbytes}, *moved)
