"""The plan: what the engine does with which part of the model. Immutable; the engine holds no policy of its own."""

import dataclasses
from collections.abc import Sequence

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.schema import OffloadConfig

# Bytes that may wait to be written before forward is held back. On a CPU they are what offloading has not freed yet, so
# they are part of the peak; with less, forward waits whenever attention saves its largest tensors in a row.
_WRITE_BEHIND_BYTES = 160 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do with saved tensors.

    Attributes:
        tier: ``"none"``, ``"ram"`` or ``"ssd"``.
        keep_units: Names of modules whose saved tensors stay in memory.
        min_offload_bytes: Smaller tensors stay in memory.
        read_ahead_bytes: Window of the prefetcher; None: six records of usual size.
        write_behind_bytes: Most bytes that wait to be written from memory that is short.
        reason: Why, in words a user can read.
    """

    tier: str
    keep_units: frozenset[str]
    min_offload_bytes: int
    read_ahead_bytes: int | None
    write_behind_bytes: int
    reason: str


def plan_from_settings(config: OffloadConfig, block_names: Sequence[str]) -> Plan:
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
        tier=config.tier,
        keep_units=frozenset(kept),
        min_offload_bytes=int(config.min_offload_bytes),
        read_ahead_bytes=None if config.read_ahead_bytes is None else int(config.read_ahead_bytes),
        write_behind_bytes=_WRITE_BEHIND_BYTES,
        reason=reason,
    )
