"""State placements: where weights, gradients and optimizer state are between uses, the bytes that lie where, and the few
placements that a plan chooses from.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware

T = TypeVar("T")

WEIGHTS, STATE, GRADIENTS, ACTIVATIONS = "weights", "optimizer state", "gradients", "activations"

_SHARES = 8
"""Weights that stay are tried in so many steps."""
_SMALL_STATE = 0.25
"""Of the budget: gradients and state that may stay in memory while weights leave it."""


@dataclasses.dataclass(frozen=True)
class StatePlacement:
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


IN_MEMORY = StatePlacement()
"""Nothing leaves memory."""


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What may be where: ``"none"`` is memory, ``"auto"`` wherever it is best.

    Attributes:
        state, weights: Where gradients and state, and weights, may be.
        in_backward, keeps_gradients: As in :class:`StatePlacement`.
        may_recompute: Whether blocks may be recomputed in backward.
        now: Where a running training has them, and the footprint is taken so; None before it. What has left memory stays out
            of it, but how many bytes of weights are in memory may change, unless ``weights`` is ``"none"``.
        written_bytes: Most bytes that a step may write to drives; None: no limit.
        snapshots: How many of the run are held at a time.
        snapshots_of_trained: Whether they leave out what is not trained.
        is_measured: Whether a measured step had a part in where they are ``now``: if not, a plan is not bound to it.
        must_stay: Whether they are to be where they are ``now``.
        is_sharded: Whether several GPUs have a part of them each, which only settings of FSDP2 or DeepSpeed can move.
    """

    state: str = "auto"
    weights: str = "auto"
    in_backward: bool = False
    keeps_gradients: bool = False
    may_recompute: bool = True
    now: StatePlacement | None = None
    written_bytes: int | None = None
    snapshots: int = 0
    snapshots_of_trained: bool = False
    is_measured: bool = True
    must_stay: bool = False
    is_sharded: bool = False


def staying_weights(footprint: Footprint, placement: StatePlacement) -> int:
    """Bytes of weights that may be in memory, where they are on a tier otherwise."""
    return max(placement.weights_bytes, least_weights(footprint))


def least_weights(footprint: Footprint) -> int:
    """Bytes of the fewest weights that are ever left in memory: one block, in addition to those on their way."""
    blocks: collections.Counter[str] = collections.Counter()
    for unit, one in footprint.weights.items():
        blocks[footprint.units.get(unit) or unit] += one.weight_bytes
    return max(blocks.values(), default=0)


def weights_leave(footprint: Footprint, placement: StatePlacement) -> bool:
    """Whether any weights leave memory."""
    return weights_in_memory(footprint, placement) < sum(one.weight_bytes for one in footprint.weights.values())


def weights_in_memory(footprint: Footprint, placement: StatePlacement) -> int:
    """Bytes of weights in memory, without those on their way."""
    total = sum(one.weight_bytes for one in footprint.weights.values())
    return total if placement.weights is None else min(total, staying_weights(footprint, placement))


def left_units(footprint: Footprint, placement: StatePlacement) -> frozenset[str]:
    """Units whose state has left memory, and their gradients with it."""
    return frozenset() if placement.state is None else once(footprint, _trained_units, None) - placement.staying


def _trained_units(footprint: Footprint, _: None) -> frozenset[str]:
    return frozenset(unit for unit, one in footprint.weights.items() if one.trained_bytes)


def units_in_order(footprint: Footprint) -> list[str]:
    """Those that are trained, as forward uses them: it needs the state of the first ones soonest, and backward has their
    gradients last.
    """
    uses = footprint.uses
    return sorted(once(footprint, _trained_units, None), key=lambda unit: (uses[unit].forward, unit))


def tier_bytes(footprint: Footprint, placement: StatePlacement) -> dict[str, int]:
    """Bytes that lie in each tier."""
    found: collections.Counter[str] = collections.Counter()
    left = left_units(footprint, placement)
    for unit, one in footprint.weights.items():
        if unit in left:
            assert placement.state is not None
            found[placement.state] += one.state_bytes + (one.trained_bytes if placement.moves_gradients else 0)
        if placement.weights is not None:
            found[placement.weights] += one.weight_bytes
    return dict(found)


def snapshot_bytes(footprint: Footprint, now: StatePlacement, count: int, of_trained: bool) -> int:
    """Bytes of RAM that ``count`` snapshots take of a run that had weights and state as in ``now`` when the ``footprint`` was
    taken.

    They hold weights, buffers and optimizer state, wherever these are; ``of_trained``: of weights those that are trained, as
    large as their gradients.
    """
    weights, trained = (
        sum(getattr(one, name) for one in footprint.weights.values()) for name in ("weight_bytes", "trained_bytes")
    )
    moved_state = sum(footprint.weights[unit].state_bytes for unit in left_units(footprint, now))
    nbytes = footprint.base_bytes + moved_state + weights - weights_in_memory(footprint, now)
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


def once(footprint: Footprint, find: Callable[[Footprint, Any], T], key: Any) -> T:
    """``find(footprint, key)``, found once."""
    known = footprint.parts_held
    if (find, key) not in known:
        known[find, key] = find(footprint, key)
    found: T = known[find, key]
    return found


def has_no_backward(footprint: Footprint) -> bool:
    """Whether the step is two forward passes, after which each weight moves by itself."""
    return not any(segment.backward for segment in footprint.segments)


def state_placements(
    footprint: Footprint, hardware: Hardware, allowed: Allowed, width: int = 1
) -> Iterator[StatePlacement]:
    """What may be where: as it is, and then the others, everything in memory first if that is allowed. ``width``: of the
    windows of gradients and state in these.
    """
    total = sum(one.weight_bytes for one in footprint.weights.values())
    least = min(least_weights(footprint), total)
    trained = sum(one.trained_bytes for one in footprint.weights.values())
    now = allowed.now or IN_MEMORY
    if now.moves or allowed.must_stay:
        yield now
    if allowed.must_stay:
        return
    states = _tiers(allowed.state, hardware) if trained else [None]
    tiers = _tiers(allowed.weights, hardware) if total else [None]
    for state in states if now.state is None else [now.state]:
        stays = list(_staying(footprint, state, allowed, width))
        for weights in tiers if now.weights is None else [now.weights]:
            if weights is None:
                for staying, wide in stays:
                    found = StatePlacement(state, None, 0, allowed.in_backward, allowed.keeps_gradients, staying, wide)
                    if not now.moves or found != now:
                        yield found
                continue
            if now.weights is not None and allowed.weights == "none":
                if state != now.state:
                    yield dataclasses.replace(now, state=state, width=width)
                continue
            at_once = state is None and not has_no_backward(footprint)
            if at_once and allowed.weights == "auto" and trained > _SMALL_STATE * total:
                continue  # the optimizer's step takes all of them at once
            # Weights that have left may all come back.
            for share in range(_SHARES - (now.weights is None), -1, -1):
                there = least + (total - least) * share // _SHARES
                for staying, wide in stays if there == total else [(frozenset[str](), stays[-1][1])]:
                    found = StatePlacement(
                        state, weights, there, allowed.in_backward, allowed.keeps_gradients, staying, wide
                    )
                    if found != now:
                        yield found


def _staying(
    footprint: Footprint, state: str | None, allowed: Allowed, width: int
) -> Iterator[tuple[frozenset[str], int]]:
    """Which units' gradients and state stay, the first ones of the model, until all have left; and the width of the windows
    of those that do not. What moves where half of it stays needs no wide ones, which take the room that it leaves.
    """
    now = allowed.now or IN_MEMORY
    sizes = {unit: footprint.weights[unit] for unit in units_in_order(footprint)}
    ends = list(itertools.accumulate(one.state_bytes + one.trained_bytes for one in sizes.values()))
    may_stay = state is not None and allowed.state == "auto" and bool(ends)
    if may_stay and ends[-1] > _SMALL_STATE * sum(one.weight_bytes for one in footprint.weights.values()):
        # What has left may all come back.
        for share in range(_SHARES - (now.state is None), 0, -1):
            count = bisect.bisect_right(ends, ends[-1] * share // _SHARES)
            if count:
                yield frozenset(itertools.islice(sizes, count)), 1 if 2 * ends[count - 1] >= ends[-1] else width
    yield frozenset() if may_stay or state is None else now.staying, 1 if state is None else width


def _tiers(allowed: str, hardware: Hardware) -> Sequence[str | None]:
    tiers = [tier for tier in ("ram", "ssd") if tier in hardware.store_bytes_per_s]
    if hardware.device == "cpu":
        tiers = [tier for tier in tiers if tier != "ram"]
    if allowed == "auto":
        return [None, *tiers]
    return [None if allowed == "none" else allowed]
