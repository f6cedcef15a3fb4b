"""The plan: what the engine does with which part of the model. Immutable; the engine holds no policy of its own."""

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence

from hf_offload.errors import OffloadConfigError
from hf_offload.plan import rules
from hf_offload.settings.schema import OffloadConfig

_SAFE_WRITE_BEHIND_BYTES = 32 << 20


class Placement(enum.StrEnum):
    """What happens to the tensors that a unit saves."""

    KEEP = "keep"
    RAM = "ram"
    SSD = "ssd"
    RECOMPUTE = "recompute"
    RECOMPUTE_RAM = "recompute+ram"
    RECOMPUTE_SSD = "recompute+ssd"

    @functools.cached_property  # asked for a million times a plan
    def recomputes(self) -> bool:
        """Whether the whole block is recomputed in backward."""
        return self.value.startswith("recompute")

    @functools.cached_property
    def tier(self) -> str | None:
        """Where the tensors go (for a recompute, the block's input), or None: nowhere."""
        return self.value.rpartition("+")[2] if self.value not in ("keep", "recompute") else None

    @functools.cached_property
    def in_full(self) -> "Placement":
        """The same place, for all that is saved."""
        return Placement.KEEP if self.tier is None else Placement(self.tier)


@dataclasses.dataclass(frozen=True)
class Keeping:
    """What keeps a step within its budget that saves more than the one that the plan was made of.

    Attributes:
        unit_bytes: How much of each unit's bytes the plan keeps.
        spare_bytes: How much all units together may keep beyond that; what is more is moved after all.
        resident_bytes: Most bytes of saved tensors that may be in memory at once, kept or on their way. Forward waits, and
            what was kept leaves, rather than pass it.
    """

    unit_bytes: Mapping[str, int]
    spare_bytes: int
    resident_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do with saved tensors.

    Attributes:
        default: The placement of what ``placements`` does not name.
        placements: Name of a unit -> what happens to what it saves.
        min_bytes: Smaller tensors stay in memory.
        read_ahead_bytes: Window of the prefetcher; None: six records of average size, ``most_ahead_bytes`` at most.
        write_behind_bytes: Most bytes that wait to be written from memory that is short.
        keeping: How much may be kept and be in memory; None: no limit, and what is kept is not tracked.
        elementwise: Whether all blocks recompute their elementwise operations, in backward or within their own recompute.
        reason: Why, in words a user can read.
    """

    default: Placement
    placements: Mapping[str, Placement] = dataclasses.field(default_factory=dict)
    min_bytes: int
    read_ahead_bytes: int | None
    write_behind_bytes: int
    most_ahead_bytes: int | None = None
    keeping: Keeping | None = None
    elementwise: bool = False
    reason: str

    def placement(self, unit: str) -> Placement:
        """What happens to what ``unit`` saves."""
        return self.placements.get(unit, self.default)

    @property
    def moves(self) -> bool:
        """Whether anything may leave memory."""
        return any(placement.tier is not None for placement in (self.default, *self.placements.values()))


def plan_from_settings(config: OffloadConfig, block_names: Sequence[str], on_host: bool) -> Plan:
    """The plan that the settings spell out: everything goes to the tier but the last ``keep_last_count`` blocks.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if more blocks are to be kept than there are.
    """
    keep = config.keep_last_count
    if keep > len(block_names):
        raise OffloadConfigError(
            f"keep_last_count={keep}, but the model has {len(block_names)} blocks that can be told apart"
            f"{'' if block_names else ' (none derives from GradientCheckpointingLayer)'}: give a smaller number."
        )
    kept = block_names[len(block_names) - keep :]
    reason = f"tier={config.tier!r} was asked for"
    if kept:
        reason += f"; {', '.join(kept)} stay in memory because backward needs them first"
    return Plan(
        default=Placement.KEEP if config.tier == "none" else Placement(config.tier),
        placements=dict.fromkeys(kept, Placement.KEEP),
        min_bytes=config.smallest_bytes(on_host),
        read_ahead_bytes=None if config.read_ahead_bytes is None else int(config.read_ahead_bytes),
        write_behind_bytes=rules.WRITE_BEHIND_BYTES,
        reason=reason,
    )


def safest_plan(config: OffloadConfig, on_host: bool) -> Plan:
    """Everything leaves, and little is on its way: what a run begins with, before its first step is measured."""
    return Plan(
        default=Placement.SSD if on_host else Placement.RAM,
        min_bytes=config.smallest_bytes(on_host),
        read_ahead_bytes=None,
        write_behind_bytes=_SAFE_WRITE_BEHIND_BYTES,
        reason="everything moves until the first step has been measured",
    )
