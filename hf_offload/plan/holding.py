"""Where weights, gradients and optimizer state are between uses, and what that makes of a step.

A footprint is one of a run that keeps them in memory. :func:`hold` takes what leaves out of it, and notes the transfers that
take its place on the links, which activations use, too.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from hf_offload.plan.footprint import Footprint, Segment, Transfer, UnitWeights
from hf_offload.plan.passing import Use, passing
from hf_offload.plan.windows import part_bytes, spare_bytes, state_window, update_bytes, weights_window

T = TypeVar("T")

WEIGHTS, STATE, GRADIENTS, ACTIVATIONS = "weights", "optimizer state", "gradients", "activations"


@dataclasses.dataclass(frozen=True)
class Held:
    """Where a run has them; None is memory.

    Attributes:
        state: The tier of gradients and optimizer state.
        weights: The tier of weights.
        weights_bytes: How many bytes of weights stay in memory at any time.
        in_backward: Whether each weight is updated in backward, and not when it is next used.
        keeps_gradients: Whether gradients stay in memory where state leaves it, as with several processes, which reduce them
            there. All weights are then updated after backward.
        staying: Units whose gradients and state stay in memory where those of the others leave it.
        width: Of the windows of gradients and state, as a multiple of the narrowest.
    """

    state: str | None = None
    weights: str | None = None
    weights_bytes: int = 0
    in_backward: bool = False
    keeps_gradients: bool = False
    staying: frozenset[str] = frozenset()
    width: int = 1

    @property
    def moves(self) -> bool:
        """Whether anything leaves memory."""
        return self.state is not None or self.weights is not None

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return dataclasses.asdict(self) | {"staying": sorted(self.staying)}

    @property
    def moves_gradients(self) -> bool:
        """Whether gradients are on the tier of the state from backward until they are used."""
        return self.state is not None and not self.in_backward and not self.keeps_gradients


IN_MEMORY = Held()
"""Nothing leaves memory."""


def hold(footprint: Footprint, held: Held, budget_bytes: int, on_host: bool, now: Held = IN_MEMORY) -> Footprint:
    """``footprint``, taken where they are as in ``now``, with weights, gradients and state where ``held`` says. What has left
    memory in ``now`` stays out of it. On an accelerator, buffers are in RAM.
    """
    if not held.moves:
        return footprint
    if held.weights is not None and has_no_backward(footprint) and footprint.is_one_stack and _leave(footprint, held):
        footprint = _in_turns(footprint)
    copies = footprint.copy_bytes if held.weights is not None and now.weights is None else 0
    windows = _windows(footprint, held, budget_bytes)
    buffers = sum(windows[kind] for kind in (STATE, GRADIENTS) if kind in windows) if on_host else 0
    weights = _memory_of_weights(footprint, held, on_host) - _memory_of_weights(footprint, now, on_host)
    passing = buffers + (windows[WEIGHTS] if on_host and _leave(footprint, held) else 0)
    found = dataclasses.replace(
        footprint,
        base_bytes=footprint.base_bytes + buffers + weights - copies,
        buffer_bytes=footprint.buffer_bytes - copies,
        transfers=tuple(sorted(_transfers(footprint, held), key=lambda one: one.at)),
        transfer_windows=windows,
        transfer_spares=_spares(footprint, windows, budget_bytes),
        passing_bytes=passing,
    )
    if buffers:
        found = dataclasses.replace(found, idle=_idle(found))
    if _left(footprint, held) != _left(footprint, now):
        found = _with_state(found, held, now, footprint, budget_bytes)
    found.saves_like(footprint)
    return found


def _windows(footprint: Footprint, held: Held, budget_bytes: int) -> dict[str, int]:
    """Of each kind that moves."""
    found = {}
    if _left(footprint, held):
        found[STATE] = state_window(budget_bytes, held.width)
        if not held.keeps_gradients:
            found[GRADIENTS] = found[STATE]
    if held.weights is not None:
        largest = max((nbytes for one in footprint.weights.values() for nbytes in one.each), default=0)
        found[WEIGHTS] = weights_window(staying_weights(footprint, held), largest)
    return found


def _spares(footprint: Footprint, windows: Mapping[str, int], budget_bytes: int) -> dict[str, int]:
    """Of each window, what may be spare buffers: weights come whole, gradients and state in parts."""
    part = part_bytes(budget_bytes)
    smallest: dict[str, list[int]] = {WEIGHTS: [], GRADIENTS: [], STATE: []}
    for one in footprint.weights.values():
        parts = [nbytes % part or part for nbytes in one.each] if one.trained_bytes else []
        smallest[WEIGHTS] += one.each
        smallest[GRADIENTS] += parts
        smallest[STATE] += [nbytes * one.state_bytes // one.trained_bytes for nbytes in parts]
    return {kind: spare_bytes(window, min(smallest[kind], default=0)) for kind, window in windows.items()}


def _idle(footprint: Footprint) -> tuple[tuple[int, int, int], ...]:
    """What of the windows of gradients and state cannot be used, and when: nothing is read that forward has read already, and
    nothing of it waits to be written until it is written again.
    """
    end, found = len(footprint.segments), []
    for kind in {STATE, GRADIENTS} & footprint.loads.keys():
        window, used = footprint.transfer_windows[kind], footprint.transfer_spares[kind]
        reads = max(one.at for one in footprint.loads[kind]) + 1
        writes = max(reads, min(one.at for one in footprint.transfers if one.kind == kind and not one.loads))
        found.append((reads, writes, window - used))
        found.append((writes, end, window - used - window // 2))
    return tuple(one for one in sorted(found) if one[0] < one[1])


def _memory_of_weights(footprint: Footprint, held: Held, on_host: bool) -> int:
    total = sum(one.weight_bytes for one in footprint.weights.values())
    if held.weights is None:
        return total
    if not _leave(footprint, held):
        return total  # nothing is on its way
    return staying_weights(footprint, held) + (_windows(footprint, held, 0)[WEIGHTS] if on_host else 0)


def _leave(footprint: Footprint, held: Held) -> bool:
    """Whether any weights do."""
    total = sum(one.weight_bytes for one in footprint.weights.values())
    return held.weights is not None and staying_weights(footprint, held) < total


def staying_weights(footprint: Footprint, held: Held) -> int:
    """Bytes of weights that may be in memory, where they are on a tier otherwise."""
    return max(held.weights_bytes, least_weights(footprint))


def least_weights(footprint: Footprint) -> int:
    """Bytes of the fewest weights that are ever left in memory: one block, in addition to those on their way."""
    blocks: collections.Counter[str] = collections.Counter()
    for unit, one in footprint.weights.items():
        blocks[footprint.units.get(unit) or unit] += one.weight_bytes
    return max(blocks.values(), default=0)


def _left(footprint: Footprint, held: Held) -> frozenset[str]:
    """Units whose state has left memory, and their gradients with it."""
    return frozenset() if held.state is None else _once(footprint, _trained_units, None) - held.staying


def _trained_units(footprint: Footprint, _: None) -> frozenset[str]:
    return frozenset(unit for unit, one in footprint.weights.items() if one.trained_bytes)


def units_in_order(footprint: Footprint) -> list[str]:
    """Those that are trained, as forward uses them: it needs the state of the first ones soonest, and backward has their
    gradients last.
    """
    uses = footprint.uses
    return sorted(_once(footprint, _trained_units, None), key=lambda unit: (uses[unit].forward, unit))


def tier_bytes(footprint: Footprint, held: Held) -> dict[str, int]:
    """Bytes that lie in each tier."""
    found: collections.Counter[str] = collections.Counter()
    left = _left(footprint, held)
    for unit, one in footprint.weights.items():
        if unit in left:
            assert held.state is not None
            found[held.state] += one.state_bytes + (one.trained_bytes if held.moves_gradients else 0)
        if held.weights is not None:
            found[held.weights] += one.weight_bytes
    return dict(found)


def snapshot_bytes(footprint: Footprint, now: Held, count: int, of_trained: bool) -> int:
    """Bytes of RAM that ``count`` snapshots take of a run that had weights and state as in ``now`` when the ``footprint`` was
    taken.

    They hold weights, buffers and optimizer state, wherever these are; ``of_trained``: of weights those that are trained, as
    large as their gradients.
    """
    weights, trained = (
        sum(getattr(one, name) for one in footprint.weights.values()) for name in ("weight_bytes", "trained_bytes")
    )
    moved_state = sum(footprint.weights[unit].state_bytes for unit in _left(footprint, now))
    nbytes = footprint.base_bytes + moved_state + weights - _memory_of_weights(footprint, now, on_host=False)
    if of_trained:
        nbytes = max(trained, footprint.gradient_bytes) + footprint.state_bytes + moved_state
    return count * nbytes


def moved_bytes(footprint: Footprint) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that the transfers of a footprint write to each tier, and read from it."""
    written: collections.Counter[str] = collections.Counter()
    read: collections.Counter[str] = collections.Counter()
    for one in footprint.transfers:
        (read if one.loads else written)[one.tier] += one.nbytes
    return dict(written), dict(read)


def _once(footprint: Footprint, find: Callable[[Footprint, Any], T], key: Any) -> T:
    """``find(footprint, key)``, found once."""
    known = footprint.parts_held
    if (find, key) not in known:
        known[find, key] = find(footprint, key)
    found: T = known[find, key]
    return found


def _transfers(footprint: Footprint, held: Held) -> list[Transfer]:
    found: list[Transfer] = []
    if held.state is not None:
        found += _once(footprint, _state, dataclasses.replace(held, weights=None, weights_bytes=0, width=1))
    if held.weights is not None:
        moves = _weights_of_forwards if has_no_backward(footprint) else _weights
        found += _once(footprint, moves, dataclasses.replace(held, state=None, staying=frozenset(), width=1))
    return found


def _state(footprint: Footprint, held: Held) -> list[Transfer]:
    assert held.state is not None
    found = []
    left = _left(footprint, held)
    for unit, one in footprint.weights.items():
        use = footprint.uses[unit]
        if unit in left:
            at = use.last if held.in_backward else use.forward
            at = len(footprint.segments) - 1 if held.keeps_gradients else at
            found += _both(STATE, unit, held.state, one.state_bytes, at)
            if held.moves_gradients:
                found.append(Transfer(GRADIENTS, unit, held.state, one.trained_bytes, use.last, loads=False))
                found.append(Transfer(GRADIENTS, unit, held.state, one.trained_bytes, use.forward, loads=True))
    return found


def _both(kind: str, unit: str, tier: str, nbytes: int, at: int) -> list[Transfer]:
    return [Transfer(kind, unit, tier, nbytes, at, loads) for loads in (True, False)] if nbytes else []


def _weights(footprint: Footprint, held: Held) -> list[Transfer]:
    assert held.weights is not None
    weights, uses = footprint.weights, footprint.uses
    in_order = sorted(weights, key=lambda unit: uses[unit].forward)
    moved = _moved_weights(
        tuple((unit, weights[unit]) for unit in in_order),
        staying_weights(footprint, held),
        least_weights(footprint),
        held.in_backward,
    )
    found: dict[tuple[int, str, bool], int] = {}
    for one in moved:
        key = uses[one.user].backward if one.backward else uses[one.user].forward, one.unit, one.loads
        found[key] = found.get(key, 0) + one.nbytes
    return [Transfer(WEIGHTS, unit, held.weights, nbytes, at, loads) for (at, unit, loads), nbytes in found.items()]


class _Moved(NamedTuple):
    """Weights of ``unit`` come or go when ``user`` computes."""

    user: str
    backward: bool
    unit: str
    loads: bool
    nbytes: int


@functools.lru_cache(maxsize=64)  # the same for every place of state, and in all steps that use them in this order
def _moved_weights(
    in_order: tuple[tuple[str, UnitWeights], ...], limit_bytes: int, ahead_bytes: int, in_backward: bool
) -> list[_Moved]:
    """What leaves is what is used last: when forward ends, the end of the model is in memory, and when backward ends, its
    beginning.
    """
    weights = dict(in_order)
    every = [(unit, place) for unit, one in in_order for place in range(len(one.each))]
    numbers = {each: number for number, each in enumerate(every)}
    sizes = [weights[unit].each[place] for unit, place in every]
    forward: list[tuple[str, int, bool]] = []  # the user, the weight, and whether it is updated there
    backward: list[tuple[str, int, bool]] = []
    for unit, one in in_order:
        own = [(unit, place) for place in range(len(one.each))]
        for each in (*own, *(tied for tied in one.borrowed if tied in numbers)):
            trains = weights[each[0]].trained_bytes > 0
            forward.append((unit, numbers[each], trains and not in_backward))
            if not one.is_looked_up or (trains and in_backward):
                backward.append((unit, numbers[each], trains and in_backward))
    uses = [*forward, *reversed(backward)]
    in_turn = [Use(number, place, changes) for place, (_, number, changes) in enumerate(uses)]
    moved = passing(in_turn, sizes, limit_bytes, ahead_bytes)
    found = []
    for loads, each_moved in ((True, moved.read), (False, moved.written)):
        for place, number in each_moved:
            owner, nbytes = every[number][0], sizes[number]
            one = weights[owner]
            nbytes = nbytes if loads else nbytes * one.trained_bytes // one.weight_bytes
            found.append(_Moved(uses[place][0], place >= len(forward), owner, loads, nbytes))
    return found


def has_no_backward(footprint: Footprint) -> bool:
    """Whether the step is two forward passes, after which each weight moves by itself."""
    return not any(segment.backward for segment in footprint.segments)


def _in_turns(footprint: Footprint) -> Footprint:
    """Both passes of ``footprint`` at once: each segment for one and then for the other, whose hidden states wait, and which
    uses the weights of a block in a copy.
    """
    first = footprint.segments[: len(footprint.segments) // 2 + 1]
    waiting = min((one.live_bytes for one in first if footprint.units.get(one.unit)), default=0)
    waiting += least_weights(footprint)
    both = tuple(
        dataclasses.replace(one, live_bytes=one.live_bytes + waiting, seconds=2 * one.seconds) for one in first
    )
    return dataclasses.replace(footprint, segments=both)


def _weights_of_forwards(footprint: Footprint, held: Held) -> list[Transfer]:
    """What leaves is brought and written once by both passes at once, and by each of two. Weights that are to be as they
    were are copied, and the copies are all written and read.
    """
    assert held.weights is not None
    total = sum(one.weight_bytes for one in footprint.weights.values())
    # Where any leave, there is room for a block that is read ahead; where no third one fits, none stays until the next step.
    block = least_weights(footprint)
    staying = held.weights_bytes - block if held.weights_bytes >= 3 * block else 0
    leaving = max(0, total - staying) if _leave(footprint, held) else 0
    share = leaving / max(1, total)
    second: dict[str, int] = {}
    for index, segment in enumerate(footprint.segments):
        if index > len(footprint.segments) // 2:
            second.setdefault(segment.unit, index)
    found = []
    for unit, one in footprint.weights.items():
        first = footprint.uses[unit].forward
        for use in [first] if footprint.is_one_stack else [first, second.get(unit, first)]:
            found += [
                Transfer(WEIGHTS, unit, held.weights, round(one.weight_bytes * share), use, loads=True),
                Transfer(WEIGHTS, unit, held.weights, round(one.trained_bytes * share), use, loads=False),
            ]
        if footprint.copy_bytes:
            found += _both(WEIGHTS, unit, held.weights, one.trained_bytes, first)
    return [one for one in found if one.nbytes]


def _with_state(found: Footprint, held: Held, now: Held, footprint: Footprint, budget_bytes: int) -> Footprint:
    """``found``, with gradients and state where they are in ``held``, not in ``now``. Gradients that leave are there while
    their unit computes, and updates are a part of backward or of forward then. ``footprint`` has the same segments, and is
    asked for them again.
    """
    weights, had_left, left = footprint.weights, _left(footprint, now), _left(footprint, held)
    state, trained = (
        sum(getattr(weights[unit], name) for unit in left) - sum(getattr(weights[unit], name) for unit in had_left)
        for name in ("state_bytes", "trained_bytes")
    )
    found = dataclasses.replace(
        found,
        base_bytes=found.base_bytes - state,
        state_bytes=found.state_bytes - state,
        optimizer_step_bytes=_bytes_of_updates(footprint, left, now, budget_bytes),
    )
    if held.keeps_gradients:
        return found
    changed = _once(footprint, _with_gradients, (held.in_backward, had_left, left))
    found = dataclasses.replace(
        found,
        segments=changed.segments,
        gradient_bytes=max(0, found.gradient_bytes - (0 if found.looks_at_gradients else trained)),
        optimizer_step_s=changed.optimizer_step_s,
    )
    found.computes_like(changed)
    return found


def _bytes_of_updates(footprint: Footprint, left: frozenset[str], now: Held, budget_bytes: int) -> int:
    """What updates need: of parts of what has left memory, and at once of what stays."""
    stays = [one for unit, one in footprint.weights.items() if one.trained_bytes and unit not in left]
    needed = footprint.optimizer_step_bytes
    if now.state is None:
        all_trained = sum(one.trained_bytes for one in footprint.weights.values())
        share = needed / max(1, all_trained)
        needed = update_bytes(needed, budget_bytes)
    else:
        share = footprint.step_share
    if not share or not stays:
        return needed
    at_once = round(share * sum(one.trained_bytes for one in stays))
    return max(needed, at_once, 2 * max((nbytes for one in stays for nbytes in one.each), default=0))


def _with_gradients(footprint: Footprint, key: tuple[bool, frozenset[str], frozenset[str]]) -> Footprint:
    """A step in which the units ``left`` have no gradients but while they compute, as the units ``had_left`` in the one that
    was measured, as far as its segments go. Where these are none, it has updated no weights either when their unit was used.
    """
    in_backward, had_left, left = key
    uses = footprint.uses
    trained = {unit: one.trained_bytes for unit, one in footprint.weights.items() if one.trained_bytes}
    all_trained = sum(trained.values())
    small = max(0, footprint.gradient_bytes - sum(nbytes for unit, nbytes in trained.items() if unit not in had_left))
    segments = list(footprint.segments)
    more = [0] * (len(segments) + 1)  # of gradients that stay, from this segment on
    for unit, nbytes in trained.items():
        stayed, stays = bool(had_left) and unit not in had_left, unit not in left
        more[0 if footprint.accumulates else uses[unit].last + 1] += (stays - stayed) * nbytes
    for index, (one, there) in enumerate(zip(footprint.segments, itertools.accumulate(more), strict=False)):
        if had_left:
            gradients = min(one.gradient_bytes + there, small + all_trained)
        else:
            gradients = min(one.gradient_bytes, small + trained.get(one.unit, 0) + there)
        if gradients != one.gradient_bytes:
            segments[index] = _changed(one, one.live_bytes - one.gradient_bytes + gradients, gradients, one.seconds)
    step_s = footprint.optimizer_step_s
    if left and not had_left:
        for unit in left:
            at = uses[unit].last if in_backward else uses[unit].forward
            one, share = segments[at], trained[unit] / all_trained
            seconds = one.seconds + footprint.optimizer_step_s * share
            segments[at] = _changed(one, one.live_bytes, one.gradient_bytes, seconds)
        step_s *= sum(nbytes for unit, nbytes in trained.items() if unit not in left) / all_trained
    return dataclasses.replace(footprint, segments=tuple(segments), optimizer_step_s=step_s)


def _changed(one: Segment, live_bytes: int, gradient_bytes: int, seconds: float) -> Segment:
    # It takes a fifth of the time of a changed copy.
    return Segment(one.unit, one.backward, live_bytes, gradient_bytes, seconds, one.measured_bytes)
