"""How much offloading has written to each drive: by this run, and by all runs together.

A drive's file holds one line of JSON of a fixed length, changed in place by one write under a lock: whatever kills the
process leaves the old line or the new one, and nothing else. Counting never stops a training: what cannot be read or written
is logged once, and what another process keeps locked is counted the next time.
"""

import collections
import contextlib
import dataclasses
import datetime
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hf_offload.folders import user_folder
from hf_offload.storage.disk_io import DataFile
from hf_offload.storage.file_systems import MEMORY_FILE_SYSTEMS, file_system_of

logger = logging.getLogger(__name__)

_LINE_BYTES = 512
_KEEP_EVERY_S = 60.0
_TRIES = 10


def wear_folder() -> Path:
    """Where the counts are kept: ``hf_offload/drives`` in the user's state folder (XDG). Raises ``OSError`` without one."""
    return user_folder("XDG_STATE_HOME", "~/.local/state") / "drives"


@dataclasses.dataclass(frozen=True)
class Drive:
    """A drive, or a file system whose drives are not known.

    Attributes:
        key: Identifies it, also after a restart; a file's name.
        name: For messages.
    """

    key: str
    name: str


@dataclasses.dataclass(frozen=True)
class Written:
    """Bytes written to a drive: in this run by account, and by all runs since a date (None where they cannot be kept)."""

    drive: Drive
    accounts: dict[str, int]
    total_bytes: int | None
    since: str | None

    @property
    def run_bytes(self) -> int:
        """Bytes written in this run."""
        return sum(self.accounts.values())


def drive_of(directory: Path, devices: Path = Path("/sys/dev/block")) -> Drive | None:
    """The drive that a directory lies on; None for one that lies in memory."""
    kind = file_system_of(directory)
    if kind in MEMORY_FILE_SYSTEMS:
        return None
    number = directory.stat().st_dev
    device = (devices / f"{os.major(number)}:{os.minor(number)}").resolve()
    if (device / "partition").exists():
        device = device.parent
    found = [_text(device / name) for name in ("wwid", "device/wwid", "device/serial", "serial", "dm/uuid", "md/uuid")]
    identity = next(filter(None, found), None) or f"{device.name} {os.statvfs(directory).f_fsid:x}"
    model = _text(device / "device/model") or kind
    name = f"{model} ({device.name})" if device.exists() else f"{kind} at {directory}"
    return Drive(re.sub(r"[^A-Za-z0-9.-]+", "_", f"{_text(device / 'device/model')} {identity}").strip("_")[:120], name)


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return ""


class Wear:
    """Keeps count of what the offload ``files`` write. :meth:`keep` is cheap and may be called after every step."""

    def __init__(self, files: Iterable[DataFile] = (), folder: Path | None = None):
        self._folder = folder
        self._files: list[tuple[Drive, DataFile]] = []
        self._before: dict[Drive, collections.Counter[str]] = {}  # what was written when the run began
        self._kept_bytes: dict[Drive, int] = {}
        self._next_s = time.monotonic() + _KEEP_EVERY_S
        self._warned = False
        for file in files:
            self.add(file)

    def add(self, file: DataFile) -> None:
        """Count another file, too."""
        try:
            drive = drive_of(file.directory)
        except OSError as error:
            self._warn(error)
            return
        if drive is not None:
            self._files.append((drive, file))

    def begin_run(self) -> None:
        """What is written from now on belongs to another run."""
        self._before = self._written()

    def keep(self, now: bool = True) -> None:
        """Add to the drives' files what has been written since the last time; ``now`` or once a minute."""
        if not now and time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _KEEP_EVERY_S
        for drive, written in self._written().items():
            more = written.total() - self._kept_bytes.get(drive, 0)
            if more <= 0:
                continue
            try:
                with _locked(_path(drive, self._folder), tries=_TRIES if now else 1) as fd:
                    _write(fd, drive, _read(fd), more)
            except BlockingIOError:
                continue
            except OSError as error:
                self._warn(error)
                continue
            self._kept_bytes[drive] = written.total()

    def report(self) -> list[Written]:
        """What was written to each drive, as far as it is known."""
        found = []
        for drive, written in self._written().items():
            known = read_wear(drive, self._folder)
            more = written.total() - self._kept_bytes.get(drive, 0)
            total = None if known is None else known[0] + more
            in_run = written - self._before.get(drive, collections.Counter())
            found.append(Written(drive, dict(in_run), total, None if known is None else known[1]))
        return found

    def _written(self) -> dict[Drive, collections.Counter[str]]:
        """Bytes of all files, by drive and account."""
        sums: dict[Drive, collections.Counter[str]] = {}
        for drive, file in self._files:
            sums.setdefault(drive, collections.Counter()).update(file.written)
        return sums

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "The count of bytes written to drives cannot be kept (%s): training goes on without it.", error
            )


def read_wear(drive: Drive, folder: Path | None = None) -> tuple[int, str] | None:
    """Bytes that all runs have written to ``drive``, and the day of the first; None if that is not known."""
    try:
        with _path(drive, folder).open("rb") as file:
            state = _parse(file.read(_LINE_BYTES))
    except OSError:
        return None
    return None if state is None else (state["written_bytes"], state["since"])


def _path(drive: Drive, folder: Path | None) -> Path:
    return (wear_folder() if folder is None else folder) / f"{drive.key}.json"


@contextlib.contextmanager
def _locked(path: Path, tries: int) -> Iterator[int]:
    """The file, open and locked. Raises BlockingIOError if another process keeps it locked."""
    import fcntl  # not on every platform

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        for left in range(tries - 1, -1, -1):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    raise
                time.sleep(0.02)
        yield fd
    finally:
        os.close(fd)


def _read(fd: int) -> dict[str, Any] | None:
    return _parse(os.pread(fd, _LINE_BYTES, 0))


def _parse(line: bytes) -> dict[str, Any] | None:
    """The state, or None of a file that is new, or that something else has written to."""
    try:
        state = json.loads(line)
        return {"written_bytes": max(0, int(state["written_bytes"])), "since": str(state["since"])}
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def _write(fd: int, drive: Drive, state: dict[str, Any] | None, more: int) -> None:
    state = state or {"written_bytes": 0, "since": datetime.date.today().isoformat()}
    state = {"drive": drive.name[:200], **state, "written_bytes": state["written_bytes"] + more}
    line = json.dumps(state).encode()
    if os.pwrite(fd, line.ljust(_LINE_BYTES - 1) + b"\n", 0) < _LINE_BYTES:
        raise OSError("the file took only a part of the line")
