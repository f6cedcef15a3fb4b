"""What a simulated step takes, and what it is made with."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Channel:
    """Bandwidths of a tier, in bytes a second.

    Attributes:
        store_bytes_per_s, load_bytes_per_s: One direction.
        both_bytes_per_s: The sum of both directions when both are busy.
        link_bytes_per_s: From an accelerator, bytes have left once they are copied to pinned memory, at this rate; None on a
            host, where they leave when they are stored. Copies of all tiers follow each other.
        ring_bytes: The pinned memory through which they pass to the tier; 0 where the tier itself is pinned memory.
        busy_s: Kind -> seconds for which a byte of it keeps a host busy that computes itself, each way. An accelerator's
            kernels run meanwhile.
    """

    store_bytes_per_s: float
    load_bytes_per_s: float
    both_bytes_per_s: float = math.inf
    link_bytes_per_s: float | None = None
    ring_bytes: int = 0
    busy_s: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def shared(self) -> float:
        """What is left of each direction's bandwidth while the other is busy, as a share."""
        return min(1.0, self.both_bytes_per_s / (self.store_bytes_per_s + self.load_bytes_per_s))


@dataclasses.dataclass(frozen=True)
class Windows:
    """How much may be in memory on its way: read ahead of backward, and waiting to be written."""

    read_ahead_bytes: int
    write_behind_bytes: int


@dataclasses.dataclass(frozen=True)
class Interval:
    """One bar of the timeline: ``channel`` is ``"compute"``, ``"recompute"``, ``"store"``, ``"load"`` or ``"wait"``."""

    channel: str
    unit: str
    begin_s: float
    end_s: float


class MemoryUse(NamedTuple):
    """What is in memory from ``at_s`` on.

    Attributes:
        total_bytes: Everything, weights and optimizer state included.
        gradient_bytes: Gradients of weights.
        kept_bytes: Saved tensors that do not leave, or that a recompute has brought back.
        moving_bytes: Saved tensors on their way to a tier or back.
    """

    at_s: float
    total_bytes: int
    gradient_bytes: int
    kept_bytes: int
    moving_bytes: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What a plan is predicted to do.

    ``tier_bytes`` is the most that lies in each tier at once; ``resident_bytes`` the most that the engine holds of saved
    tensors at once, whatever else holds them, too. ``must_fit_bytes`` is what has to fit into the budget: the peak if the
    tier stopped writing at the worst moment of forward, until forward has to wait; while the step is measured; and with a
    block that did not run when the footprint was taken.

    ``memory`` holds what is in memory at every moment.
    """

    step_s: float
    peak_bytes: int
    must_fit_bytes: int
    peak_unit: str
    store_stall_s: float
    load_stall_s: float
    recompute_s: float
    tier_bytes: Mapping[str, int]
    moved_bytes: int
    resident_bytes: int
    memory: tuple[MemoryUse, ...]
    intervals: tuple[Interval, ...]

    @property
    def stall_s(self) -> float:
        """Time in which nothing was computed because bytes were on their way."""
        return self.store_stall_s + self.load_stall_s
