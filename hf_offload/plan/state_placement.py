"""State placements: where weights, gradients and optimizer state are between uses, and the bytes that lie where."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from hf_offload.plan.footprint import Footprint

T = TypeVar("T")

WEIGHTS, STATE, GRADIENTS, ACTIVATIONS = "weights", "optimizer state", "gradients", "activations"


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
