"""What the user asked for. Frozen, checked on construction; nothing here touches a device or a disk."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.lean import LeanConfig, lean_activations
from hf_offload.settings.sampling import SampledLinearConfig, sampled_linear
from hf_offload.settings.values import (
    FieldCheck,
    Reader,
    folders,
    names,
    one_of,
    read_fields,
    setting,
    size,
    whole,
)

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

MIN_OFFLOAD_BYTES = 256 << 10
MIN_OFFLOAD_BYTES_OF_ACCELERATORS = 2 << 20
"""Storing and loading a tensor takes its host some 80 us, in which a link of 25 GB/s moves this much: the host of an
accelerator, which it must keep busy, would spend longer on smaller tensors than the link does."""

Directory = str | os.PathLike[str]


def _tiled_mlp(name: str, value: Any) -> str | tuple[str, ...]:
    if isinstance(value, bool):
        value = "on" if value else "off"
    found: str | tuple[str, ...] = names("module names", alone=TILED)(name, value)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of one offloaded run.

    Sizes are numbers of bytes or strings such as ``"20GiB"``; after construction they are ``int``. All mistakes are
    reported in one :class:`~hf_offload.errors.OffloadConfigError`.

    Args:
        tier: Where activations go: ``"auto"``: only as much as ``memory_budget`` needs, wherever it costs least time;
            ``"ram"`` (pinned memory on an accelerator), ``"ssd"`` (files; with ``ram_budget``, RAM first), or ``"none"``.
            ``cpu`` is accepted for ``ram``; ``disk`` and ``nvme`` for ``ssd``.
        memory_budget: With ``tier="auto"``: most memory of the device for everything, weights and optimizer state
            included. On a CPU it counts tensors. Default: 90 % of what the device can give this process, including what it
            has already.
        directory: One directory, or several to stripe over, for ``tier="ssd"`` and ``"auto"``. Default: the
            system's temporary folder, named in the log; on an accelerator, ``"auto"`` without a directory writes no files.
        ram_budget: Most bytes of RAM the RAM tier may take. With ``tier="ssd"`` the disk is used when it is full. Default on
            an accelerator: 60 % of the RAM that is available, in equal parts for the machine's processes.
        disk_budget: Most bytes of disk the run may occupy at any time, over all directories.
        min_offload_bytes: Smaller tensors stay where they are. Default: 256 KiB on a CPU, 2 MiB on an accelerator.
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

    tier: str = setting("auto", one_of(TIERS, TIER_ALIASES))
    memory_budget: int | str | None = setting(None, size())
    directory: Directory | Sequence[Directory] | None = setting(None, folders())
    ram_budget: int | str | None = setting(None, size())
    disk_budget: int | str | None = setting(None, size())
    min_offload_bytes: int | str | None = setting(None, size())
    keep_last_count: int = setting(0, whole(0, "of blocks"))
    read_ahead_bytes: int | str | None = setting(None, size())
    verify: str = setting("off", one_of(VERIFY))
    max_disk_write_bytes: int | str | None = setting(None, size())
    at_disk_write_limit: str = setting("keep", one_of(AT_LIMIT))
    disk_rated_bytes: int | str | None = setting(None, size(at_least=1))
    tiled_loss: str = setting("off", one_of(TILED, on_off=True))
    tiled_mlp: str | Sequence[str] = setting("off", Reader(_tiled_mlp))
    tile_bytes: int | str | None = setting(None, size(at_least=1))
    sampled_linear: "float | str | Mapping[str, Any] | SampledLinearConfig | None" = setting(
        None, Reader(lambda name, value: sampled_linear(value, name))
    )
    lean_activations: "str | Sequence[str] | LeanConfig | None" = setting(
        None, Reader(lambda name, value: lean_activations(value, name))
    )

    def __post_init__(self) -> None:
        with read_fields(self, "offload settings") as check:
            with check:
                if (
                    check.good("at_disk_write_limit", "max_disk_write_bytes")
                    and self.at_disk_write_limit == "stop"
                    and self.max_disk_write_bytes is None
                ):
                    raise OffloadConfigError(
                        "at_disk_write_limit='stop', but there is no limit: set max_disk_write_bytes, or leave it out."
                    )
            with check:
                if check.good("tiled_loss", "tiled_mlp") and self.tile_bytes is not None and not self.tiles:
                    raise OffloadConfigError(
                        "tile_bytes is given, but nothing is tiled: set tiled_loss='on', or leave it out."
                    )
            if check.good("tier"):
                self._check_tier(check)

    def _check_tier(self, check: FieldCheck) -> None:
        with check:
            if self.memory_budget is not None and self.tier != "auto":
                raise OffloadConfigError(
                    f"memory_budget is given, but tier={self.tier!r} moves everything whatever it is: set tier='auto'."
                )
        with check:
            if self.tier == "auto" and (self.keep_last_count or self.read_ahead_bytes is not None):
                raise OffloadConfigError(
                    "tier='auto', the default, decides itself what is kept and how far is read ahead: drop keep_last_count "
                    "and read_ahead_bytes, or set tier='ram' or 'ssd'."
                )
        with check:
            if check.good("tiled_mlp") and self.tiled_mlp == "auto" and self.tier != "auto":
                raise OffloadConfigError(
                    f"tiled_mlp='auto' waits for a memory budget that nothing else fits, and tier={self.tier!r} has "
                    "none: set tier='auto', or tiled_mlp='on'."
                )
        with check:
            if self.tier == "none" and self.directory:
                raise OffloadConfigError(
                    "directory is given but tier='none' offloads nothing: set tier='ssd' or drop it."
                )
            of_files = ("directory", "disk_budget", "max_disk_write_bytes", "disk_rated_bytes")
            given = [name for name in of_files if getattr(self, name) is not None]
            if self.tier == "ram" and given:
                raise OffloadConfigError(
                    f"{', '.join(given)} given, but tier='ram' writes no files: set tier='ssd', or leave it out."
                )

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

    def smallest_bytes(self, on_host: bool) -> int:
        """Bytes of the smallest tensor that is moved; ``on_host``, the model is in RAM itself."""
        return smallest_bytes(self.min_offload_bytes, on_host)

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories to stripe over; empty when none was named."""
        return self.directory or ()  # type: ignore[return-value]  # __post_init__ made it a tuple of paths


def smallest_bytes(asked: int | str | None, on_host: bool) -> int:
    """Bytes of the smallest tensor that is moved where ``min_offload_bytes`` is ``asked``."""
    if asked is None:
        return MIN_OFFLOAD_BYTES if on_host else MIN_OFFLOAD_BYTES_OF_ACCELERATORS
    return int(asked)
