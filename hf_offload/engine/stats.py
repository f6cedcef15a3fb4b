"""Counters of a session, per step and in total."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hf_offload.storage.tier import Tier, TierStats


@dataclasses.dataclass
class StepStats:
    """Bytes are bytes of saved tensors; seconds are wall-clock time in which the training thread waited."""

    offloaded_bytes: int = 0
    """Taken over from autograd to be moved, each storage once. Those forwarded may not have been written after all."""
    deduplicated_bytes: int = 0
    """Saved again while a record of the same bytes was there: moved only once."""
    forwarded_bytes: int = 0
    """Needed again before they had left memory, or so soon that they never left: taken from there, not loaded."""
    aliased_bytes: int = 0
    """Stored, but something else kept the original alive until backward: taken from there. No memory was saved."""
    kept_bytes: int = 0
    """Small, kept by the plan, or saved inside backward. Weights are not counted, nor are tensor subclasses."""
    refused_bytes: int = 0
    """Kept because the tier was full or failed."""
    loaded_bytes: int = 0
    """Asked back from the tier."""
    written_bytes: int = 0
    """Written to the tier's medium."""
    read_bytes: int = 0
    """Read from the tier's medium."""
    store_stall_s: float = 0.0
    """Forward waited because too many bytes were on their way out."""
    load_stall_s: float = 0.0
    """Backward waited for bytes that had not arrived."""
    write_bytes_per_s: float = 0.0
    """Bandwidth while at least one write ran."""
    read_bytes_per_s: float = 0.0
    """Bandwidth while at least one read ran."""
    peak_resident_bytes: int = 0
    """Most bytes of offloadable tensors in memory at once: on their way out, read ahead, in use, or refused."""

    @property
    def stall_s(self) -> float:
        """All time the training thread waited for the engine."""
        return self.store_stall_s + self.load_stall_s

    def as_dict(self) -> dict[str, Any]:
        """All counters by name."""
        return dataclasses.asdict(self) | {"stall_s": self.stall_s}


_SUMMED = [
    field.name
    for field in dataclasses.fields(StepStats)
    if not field.name.endswith("per_s") and "peak" not in field.name
]


class OffloadStats:
    """``total`` since the session began, ``step`` the step that is running, ``steps`` those that ended (last 1000).

    These count activations. ``accounts`` has counters of all that the run moves, by account (``"activations"``,
    ``"optimizer state"``) and tier: ``stats.accounts["optimizer state"]["ssd"].written_bytes``.
    """

    def __init__(self, tier: Tier | None, accounts: Mapping[str, Mapping[str, TierStats]] | None = None):
        self.accounts = {} if accounts is None else accounts
        self.step = StepStats()
        self.steps: collections.deque[StepStats] = collections.deque(maxlen=1000)
        self.ended_steps = 0
        self._ended = StepStats()
        self._tier = None if tier is None else tier.stats
        self._seen = (0, 0, 0.0, 0.0)

    @property
    def total(self) -> StepStats:
        """Sums over all steps; bandwidths over the whole session."""
        self._read_tier()
        total = dataclasses.replace(self._ended)
        _add(total, self.step)
        if self._tier is not None:
            total.write_bytes_per_s, total.read_bytes_per_s = self._tier.bytes_per_s
        return total

    @property
    def waited_s(self) -> float:
        """Seconds that the training waited for the engine, since the session began."""
        return self._ended.stall_s + self.step.stall_s

    def end_step(self, resident_bytes: int) -> StepStats:
        """Close the running step and open the next; returns the closed one."""
        self._read_tier()
        ended = self.step
        tier = self._tier
        if tier is not None:
            now = (tier.timed_written_bytes, tier.timed_read_bytes, tier.write_busy_s, tier.read_busy_s)
            ended.write_bytes_per_s = _rate(now[0] - self._seen[0], now[2] - self._seen[2])
            ended.read_bytes_per_s = _rate(now[1] - self._seen[1], now[3] - self._seen[3])
            self._seen = now
        _add(self._ended, ended)
        self.steps.append(ended)
        self.ended_steps += 1
        self.step = StepStats(peak_resident_bytes=resident_bytes)
        return ended

    def _read_tier(self) -> None:
        tier = self._tier
        if tier is not None:
            self.step.written_bytes = tier.written_bytes - self._ended.written_bytes
            self.step.read_bytes = tier.read_bytes - self._ended.read_bytes


def _add(total: StepStats, step: StepStats) -> None:
    for name in _SUMMED:
        setattr(total, name, getattr(total, name) + getattr(step, name))
    total.peak_resident_bytes = max(total.peak_resident_bytes, step.peak_resident_bytes)


def added(everyone: Sequence[StepStats]) -> StepStats:
    """The counters of several processes together: all of them are sums."""
    names = [field.name for field in dataclasses.fields(StepStats)]
    return StepStats(**{name: sum(getattr(one, name) for one in everyone) for name in names})


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if seconds > 0 else 0.0
