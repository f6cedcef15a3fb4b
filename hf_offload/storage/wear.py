"""What a run has written to each drive."""

import collections
import contextlib
import logging
import os
from pathlib import Path

from hf_offload.storage.disk_io import DataFile
from hf_offload.storage.file_systems import MEMORY_FILE_SYSTEMS, file_system_of

logger = logging.getLogger(__name__)

_Writes = dict[str, collections.Counter[str]]


class Wear:
    """Bytes that offload files have written to each drive in the present run."""

    def __init__(self) -> None:
        self._files: list[tuple[str, DataFile]] = []
        self._before: _Writes = {}  # what was written when the run began

    def add(self, file: DataFile) -> None:
        """Count what is written to another file, too."""
        try:
            drive = drive_of(file.directory)
        except OSError as error:
            logger.warning("What is written to %s is not counted: %s.", file.directory, error)
            return
        if drive is not None:
            self._files.append((drive, file))

    def begin_run(self) -> None:
        """What is written from now on belongs to another run."""
        self._before = self._written()

    def report(self) -> dict[str, dict[str, int]]:
        """Bytes written in this run, by the drive's name and the account."""
        nothing: collections.Counter[str] = collections.Counter()
        return {drive: dict(written - self._before.get(drive, nothing)) for drive, written in self._written().items()}

    def _written(self) -> _Writes:
        sums: _Writes = {}
        for drive, file in self._files:
            sums.setdefault(drive, collections.Counter()).update(file.written)
        return sums


def drive_of(directory: Path, devices: Path = Path("/sys/dev/block")) -> str | None:
    """The name of the drive that a directory lies on, or of its file system; None for one that lies in memory."""
    kind = file_system_of(directory)
    if kind in MEMORY_FILE_SYSTEMS:
        return None
    number = directory.stat().st_dev
    device = (devices / f"{os.major(number)}:{os.minor(number)}").resolve()
    if not device.exists():
        return f"{kind} at {directory}"
    if (device / "partition").exists():
        device = device.parent
    model = kind
    with contextlib.suppress(OSError, UnicodeDecodeError):
        model = (device / "device/model").read_text(encoding="utf-8").strip() or kind
    return f"{model} ({device.name})"
