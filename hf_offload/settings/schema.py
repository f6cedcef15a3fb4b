"""What the user asked for. Frozen, checked on construction; nothing here touches a device or a disk."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.lean import LeanConfig, lean_activations
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.sampling import SampledLinearConfig, sampled_linear
from hf_offload.settings.sizes import parse_bytes

TIERS = ("none", "ram", "ssd", "auto")
TIER_ALIASES = {"cpu": "ram", "disk": "ssd", "nvme": "ssd"}
VERIFY = ("off", "checksum")
AT_LIMIT = ("keep", "stop")
TILED = ("auto", "on", "off")
SIZES = (
    "memory_budget",
    "ram_budget",
    "disk_budget",
    "min_offload_bytes",
    "read_ahead_bytes",
    "max_disk_write_bytes",
    "disk_rated_bytes",
    "tile_bytes",
)
"""The settings that are sizes in bytes."""

Directory = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of one offloaded run.

    Sizes are numbers of bytes or strings such as ``"20GiB"``; after construction they are ``int``. All mistakes are
    reported in one :class:`~hf_offload.errors.OffloadConfigError`.

    Args:
        tier: Where activations go: ``"ssd"`` (files; with ``ram_budget``, RAM first), ``"ram"`` (pinned memory on CUDA),
            ``"none"``, or ``"auto"``: only as much as ``memory_budget`` needs, wherever it costs least time. ``cpu`` is
            accepted for ``ram``; ``disk`` and ``nvme`` for ``ssd``.
        memory_budget: With ``tier="auto"``: most memory of the device for everything, weights and optimizer state
            included. On a CPU it counts tensors. Default: 90 % of what is free when training begins.
        directory: One directory, or several to stripe over, for ``tier="ssd"`` and ``"auto"``. Default: the
            system's temporary folder, named in the log.
        ram_budget: Most bytes of RAM the RAM tier may take. With ``tier="ssd"`` the disk is used when it is full.
        disk_budget: Most bytes of disk the run may occupy at any time, over all directories.
        min_offload_bytes: Smaller tensors stay where they are.
        keep_last_count: How many of the model's last blocks keep their activations: backward needs those first.
        read_ahead_bytes: How far backward reads ahead. Default: six tensors of usual size, enough not to wait.
        verify: ``"checksum"`` compares a CRC-32 of every buffer before the store and after the load.
        max_disk_write_bytes: Stop writing to disk after this many bytes in one run, to spare the drive.
        at_disk_write_limit: What then follows: ``"keep"``, activations stay in memory (in RAM's tier, where there is one);
            ``"stop"``, the run ends after the step, saved by a Trainer, with an error elsewhere.
        disk_rated_bytes: What the drive's maker says it can take in its life (TBW), such as ``"600TB"``: the summary then
            says how much of that all runs have used up.
        tiled_loss: Compute output head and loss a few tokens at a time, so that the logits never exist: ``"on"``, ``"auto"``
            (where the model allows it), ``"off"``. Losses and gradients change in their last bits, as in a larger batch.
        tiled_mlp: The same for modules that treat every token by itself: ``"on"`` (all of them), names of modules, ``"auto"``
            (only where a ``memory_budget`` needs it), ``"off"``. Backward computes them once more.
        tile_bytes: Size of the logits of one piece. Default: a sixteenth of all, or a 64th of ``memory_budget``.
        sampled_linear: Estimate the weight gradients of linear layers from this part of their input: a ratio such as 0.3, or
            the settings of :class:`~hf_offload.SampledLinearConfig`. Gradients are then right on average only.
        lean_activations: Make tensors again from what is saved anyway instead of saving them: some of ``"activations"``,
            ``"norms"``, ``"dropout"`` (``"exact"``: these three, which change no bit) and ``"derivative-8bit"`` (not exact);
            :class:`~hf_offload.LeanConfig` explains them.
    """

    tier: str = "ssd"
    memory_budget: int | str | None = None
    directory: Directory | Sequence[Directory] | None = None
    ram_budget: int | str | None = None
    disk_budget: int | str | None = None
    min_offload_bytes: int | str = "256KiB"
    keep_last_count: int = 0
    read_ahead_bytes: int | str | None = None
    verify: str = "off"
    max_disk_write_bytes: int | str | None = None
    at_disk_write_limit: str = "keep"
    disk_rated_bytes: int | str | None = None
    tiled_loss: str = "off"
    tiled_mlp: str | Sequence[str] = "off"
    tile_bytes: int | str | None = None
    sampled_linear: "float | str | Mapping[str, Any] | SampledLinearConfig | None" = None
    lean_activations: "str | Sequence[str] | LeanConfig | None" = None

    def __post_init__(self) -> None:
        with collect_errors("offload settings") as check:
            with check:
                self._set("tier", TIER_ALIASES.get(self.tier, self.tier))
                choose("tier", self.tier, TIERS, aliases=TIER_ALIASES)
            with check:
                choose("verify", self.verify, VERIFY)
            with check:
                choose("at_disk_write_limit", self.at_disk_write_limit, AT_LIMIT)
                if self.at_disk_write_limit == "stop" and self.max_disk_write_bytes is None:
                    raise OffloadConfigError(
                        "at_disk_write_limit='stop', but there is no limit: set max_disk_write_bytes, or leave it out."
                    )
            for name in ("tiled_loss", "tiled_mlp"):
                if isinstance(getattr(self, name), bool):  # what YAML makes of an unquoted on
                    self._set(name, "on" if getattr(self, name) else "off")
            with check:
                choose("tiled_loss", self.tiled_loss, TILED)
            with check:
                self._set("tiled_mlp", _modules(self.tiled_mlp))
            with check:
                if self.memory_budget is not None and self.tier != "auto" and self.tier in TIERS:
                    raise OffloadConfigError(
                        f"memory_budget is given, but tier={self.tier!r} moves everything whatever it is: set tier='auto'."
                    )
            with check:
                if self.tier == "auto" and (self.keep_last_count or self.read_ahead_bytes is not None):
                    raise OffloadConfigError(
                        "tier='auto' decides itself what is kept and how far is read ahead: drop keep_last_count and "
                        "read_ahead_bytes."
                    )
            for name in SIZES:
                with check:
                    value = getattr(self, name)
                    if value is not None:
                        self._set(name, parse_bytes(value, name))
            with check:
                if self.disk_rated_bytes == 0:
                    raise OffloadConfigError(
                        "disk_rated_bytes=0 is no drive: give what its maker says, or leave it out."
                    )
            with check:
                if self.tiled_mlp == "auto" and self.tier != "auto":
                    raise OffloadConfigError(
                        f"tiled_mlp='auto' waits for a memory budget that nothing else fits, and tier={self.tier!r} has "
                        "none: set tier='auto', or tiled_mlp='on'."
                    )
            with check:
                if self.tile_bytes == 0:
                    raise OffloadConfigError("tile_bytes=0 leaves no room for any token: give more, or leave it out.")
                if self.tile_bytes is not None and not self.tiles:
                    raise OffloadConfigError(
                        "tile_bytes is given, but nothing is tiled: set tiled_loss='on', or leave it out."
                    )
            with check:
                self._set("sampled_linear", sampled_linear(self.sampled_linear))
            with check:
                self._set("lean_activations", lean_activations(self.lean_activations))
            with check:
                self._set("directory", directory_paths(self.directory))
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
                    for name in ("directory", "disk_budget", "max_disk_write_bytes", "disk_rated_bytes")
                    if getattr(self, name) is not None
                ]
                if self.tier == "ram" and given:
                    raise OffloadConfigError(
                        f"{', '.join(given)} given, but tier='ram' writes no files: set tier='ssd', or leave it out."
                    )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def tiles(self) -> bool:
        """Whether anything may be computed in pieces."""
        return self.tiled_loss != "off" or self.tiled_mlp != "off"

    @property
    def changes_a_run(self) -> bool:
        """Whether these settings ask for anything at all."""
        return self.tier != "none" or self.tiles or self.sampling is not None or self.lean is not None

    @property
    def sampling(self) -> SampledLinearConfig | None:
        """How linear layers are sampled, if they are."""
        return self.sampled_linear  # type: ignore[return-value]  # __post_init__ made it one

    @property
    def lean(self) -> LeanConfig | None:
        """What is saved in fewer bytes, if anything is."""
        return self.lean_activations  # type: ignore[return-value]  # __post_init__ made it one

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories to stripe over; empty when none was named."""
        return self.directory or ()  # type: ignore[return-value]  # __post_init__ made it a tuple of paths


def _modules(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value in TILED:
        return value
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise OffloadConfigError(f"tiled_mlp={value!r} is none of {', '.join(TILED)} and no list of module names.")
    found = tuple(name.strip() for name in names if name.strip())
    if not found:
        raise OffloadConfigError(f"tiled_mlp={value!r} names no module: say one of {', '.join(TILED)}, or names.")
    return found


def directory_paths(value: Any) -> tuple[Path, ...] | None:
    """One directory or several, as paths; ``None`` for none. Raises :class:`OffloadConfigError` for anything else."""
    if value is None or value == "":
        return None
    items = [value] if isinstance(value, (str, os.PathLike)) else list(value)
    if not items or not all(isinstance(item, (str, os.PathLike)) for item in items):
        raise OffloadConfigError(f"directory={value!r} is neither a path nor a list of paths.")
    paths = tuple(Path(item).expanduser() for item in items)
    if len(set(paths)) != len(paths):
        raise OffloadConfigError(f"directory names the same path twice: {', '.join(map(str, paths))}.")
    return paths
