"""What the user asked for. Frozen, checked on construction; nothing here touches a device or a disk."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.sizes import parse_bytes

TIERS = ("none", "ram", "ssd")
TIER_ALIASES = {"cpu": "ram", "disk": "ssd", "nvme": "ssd"}
VERIFY = ("off", "checksum")

Directory = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of one offloaded run.

    Sizes are numbers of bytes or strings such as ``"20GiB"``; after construction they are ``int``. All mistakes are
    reported in one :class:`~hf_offload.errors.OffloadConfigError`.

    Args:
        tier: Where activations go: ``"ssd"`` (files; with ``ram_budget``, RAM first), ``"ram"`` (pinned memory on CUDA)
            or ``"none"``. ``cpu`` is accepted for ``ram``; ``disk`` and ``nvme`` for ``ssd``.
        directory: One directory, or several to stripe over, for ``tier="ssd"``. Default: a fresh private directory
            under the system's temporary folder, named in the log.
        ram_budget: Most bytes of RAM the RAM tier may take. With ``tier="ssd"`` the disk is used when it is full.
        disk_budget: Most bytes of disk the run may occupy at any time, over all directories.
        min_offload_bytes: Smaller tensors stay where they are.
        keep_last_count: How many of the model's last blocks keep their activations: backward needs those first.
        read_ahead_bytes: How far backward reads ahead. Default: six tensors of usual size, enough not to wait.
        verify: ``"checksum"`` compares a CRC-32 of every buffer before the store and after the load.
        max_disk_write_bytes: Stop writing to disk after this many bytes in one run, to spare the drive; what follows
            stays in memory.
    """

    tier: str = "ssd"
    directory: Directory | Sequence[Directory] | None = None
    ram_budget: int | str | None = None
    disk_budget: int | str | None = None
    min_offload_bytes: int | str = "256KiB"
    keep_last_count: int = 0
    read_ahead_bytes: int | str | None = None
    verify: str = "off"
    max_disk_write_bytes: int | str | None = None

    def __post_init__(self) -> None:
        with collect_errors("offload settings") as check:
            with check:
                self._set("tier", TIER_ALIASES.get(self.tier, self.tier))
                choose("tier", self.tier, TIERS, aliases=TIER_ALIASES)
            with check:
                choose("verify", self.verify, VERIFY)
            for name in ("ram_budget", "disk_budget", "min_offload_bytes", "read_ahead_bytes", "max_disk_write_bytes"):
                with check:
                    value = getattr(self, name)
                    if value is not None:
                        self._set(name, parse_bytes(value, name))
            with check:
                self._set("directory", _directories(self.directory))
            with check:
                if isinstance(self.keep_last_count, bool) or not isinstance(self.keep_last_count, int):
                    raise OffloadConfigError(
                        f"keep_last_count={self.keep_last_count!r} is not a whole number of blocks."
                    )
                if self.keep_last_count < 0:
                    raise OffloadConfigError(f"keep_last_count={self.keep_last_count} is negative: give zero or more.")
            with check:
                if self.tier == "none" and self.directory:
                    raise OffloadConfigError(
                        "directory is given but tier='none' offloads nothing: set tier='ssd' or drop it."
                    )
                given = [
                    name
                    for name in ("directory", "disk_budget", "max_disk_write_bytes")
                    if getattr(self, name) is not None
                ]
                if self.tier == "ram" and given:
                    raise OffloadConfigError(
                        f"{', '.join(given)} given, but tier='ram' writes no files: set tier='ssd', or leave it out."
                    )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories to stripe over; empty when none was named."""
        return self.directory or ()  # type: ignore[return-value]  # __post_init__ made it a tuple of paths


def _directories(value: Any) -> tuple[Path, ...] | None:
    if value is None or value == "":
        return None
    items = [value] if isinstance(value, (str, os.PathLike)) else list(value)
    if not items or not all(isinstance(item, (str, os.PathLike)) for item in items):
        raise OffloadConfigError(f"directory={value!r} is neither a path nor a list of paths.")
    paths = tuple(Path(item).expanduser() for item in items)
    if len(set(paths)) != len(paths):
        raise OffloadConfigError(f"directory names the same path twice: {', '.join(map(str, paths))}.")
    return paths
