"""From settings to an open tier."""

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.file_systems import free_disk_bytes
from hf_offload.storage.ram import RamTier
from hf_offload.storage.service import ACTIVATIONS, RunStorage
from hf_offload.storage.spill import SpillTier
from hf_offload.storage.tier import Tier

logger = logging.getLogger(__name__)


def open_tier(
    storage: RunStorage,
    config: OffloadConfig,
    on_host: bool,
    account: str = ACTIVATIONS,
    directories: Sequence[Path] | None = None,
) -> Tier:
    """The tier for ``account``, an account of ``storage``, that the settings ask for: over ``directories``, or RAM if there
    are none. By default, those for activations.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a directory that cannot be used, or one without the room that
    ``disk_budget`` asks for.
    """
    checksum = config.verify == "checksum"

    def open_ram() -> RamTier:
        return RamTier(storage=storage, account=account, pinned=not on_host, checksum=checksum)

    directories = drives_for(config, on_host) if directories is None else directories
    if not directories:
        if on_host:
            logger.warning("The model is on the CPU: moving %s from RAM to RAM saves no memory.", account)
        return open_ram()
    disk = DiskTier(directories, storage=storage, account=account, **disk_options(config))
    if config.disk_budget is not None:
        try:
            _check_room(int(config.disk_budget), disk)
        except BaseException:
            disk.close()
            raise
    if not config.directories:
        logger.warning("No directory was named for %s: files are in %s.", account, directories[0])
    return SpillTier(open_ram(), disk) if storage.ram.limit_bytes else disk


def disk_options(config: OffloadConfig) -> dict[str, Any]:
    """The keywords of :class:`DiskTier` on which its rates depend."""
    options: dict[str, Any] = {"checksum": config.verify == "checksum"}
    if config.io_threads is not None:
        options |= dict.fromkeys(("write_threads", "read_threads"), config.io_threads)
    if config.io_chunk_bytes is not None:
        options["chunk_bytes"] = int(config.io_chunk_bytes)
    return options


def drives_for(config: OffloadConfig, on_host: bool) -> tuple[Path, ...]:
    """The directories that files go to; empty where none are written."""
    # Unless a drive is asked for: a step of a large model would write more to it than a drive endures.
    spares_drives = config.tier == "auto" and not on_host and config.ram_budget != 0 and not config.drive_settings
    if config.tier in ("none", "ram"):
        return ()  # even if a directory is named: that of a memory mode
    return config.directories if spares_drives else named_directories(config)


def named_directories(config: OffloadConfig) -> tuple[Path, ...]:
    """The directories that are named, or the system's temporary folder."""
    # Files have no names and no other user can open them: they need no directory of their own, not even in /tmp.
    return config.directories or (Path(tempfile.gettempdir()),)


def _check_room(budget_bytes: int, disk: DiskTier) -> None:
    free = disk.call_with_watchdog(lambda: free_disk_bytes(file.directory for file in disk.files))
    if budget_bytes > free:
        raise OffloadConfigError(
            f"disk_budget={format_bytes(budget_bytes)}, but only {format_bytes(free)} are free in {disk.where}: free some "
            "space, name another directory, or lower disk_budget."
        )
