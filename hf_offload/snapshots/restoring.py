"""Finding the newest whole snapshot, in memory or on disk."""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from hf_offload.errors import SnapshotError
from hf_offload.snapshots import process
from hf_offload.snapshots.client import SnapshotClient

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 8 << 20


class Found:
    """A whole snapshot.

    Attributes:
        record: Its step, its run and what else was noted when it was taken.
        folder: A folder with its files.
        slot: Where the snapshot process has it; None if it is on disk.
        files: Their descriptors; none if it is on disk.
    """

    def __init__(self, record: dict[str, Any], folder: Path, slot: int | None = None, files: Sequence[int] = ()):
        self.record = record
        self.folder = folder
        self.slot = slot
        self.files = list(files)

    @property
    def step(self) -> int:
        """Optimizer steps until then."""
        return int(self.record["step"])

    @property
    def place(self) -> str:
        """Where it was found, in words."""
        return str(self.folder) if self.slot is None else "memory"

    def close(self) -> None:
        """Nothing of it is needed any more. Idempotent."""
        if self.slot is None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        for file in self.files:
            os.close(file)
        self.files = []


def newest_whole(client: SnapshotClient | None, directory: Path | None, links: Path) -> Found | None:
    """The newest snapshot that is whole; a warning names each one that is not.

    ``client`` is connected to the snapshot process, if there is one, and ``directory`` is where it writes, if anywhere. The
    folder of one that is found in memory is ``links``: until :meth:`Found.close`, its files are links to memory.

    Raises :class:`~hf_offload.errors.SnapshotError` for those of another version.
    """
    status = {} if client is None else client.ask("status")
    _check_format(status.get("format", process.FORMAT), "in memory")
    run = status.get("run")
    candidates: list[tuple[int, bool, dict[str, Any], Any]] = [
        (each["record"]["sequence"], True, each["record"], each["slot"]) for each in status.get("snapshots", ())
    ]
    for path, record in _on_disk(directory, run):
        candidates.append((record["sequence"], False, record, path))
    for _, in_memory, record, place in sorted(candidates, key=lambda one: one[:2], reverse=True):
        if in_memory:
            assert client is not None
            numbers = client.fetch(place)
            damage = _damage_in_memory(record, numbers)
            if damage is None:
                return Found(record, _linked(links, record, numbers), place, numbers)
            for number in numbers:
                os.close(number)
        else:
            damage = _damage_on_disk(record, place)
            if damage is None:
                return Found(record, place)
        logger.warning(
            "The snapshot of step %d in %s is damaged and skipped: %s.",
            record["step"],
            "memory" if in_memory else place,
            damage,
        )
    return None


def _on_disk(directory: Path | None, run: str | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Those of ``run``, or else of the run that wrote there last."""
    if directory is None:
        return
    last = process.read_record(directory / process.RUN_FILE)
    if last is None:
        return
    _check_format(last.get("format"), f"in {directory}")
    for path in directory.glob(f"{process.PREFIX}*"):
        record = process.read_record(path / process.RECORD_FILE)
        if record is not None and record["run"] == (run or last["run"]):
            yield path, record


def _check_format(found: Any, where: str) -> None:
    if found != process.FORMAT:
        raise SnapshotError(
            f"The snapshots {where} are of format {found}, and this version of hf_offload reads {process.FORMAT}: resume "
            "with the version that took them, or start from the beginning without resume_from_checkpoint."
        )


def _damage_in_memory(record: dict[str, Any], numbers: list[int]) -> str | None:
    if len(numbers) != len(record["files"]):
        return f"{len(record['files'])} files were taken, and {len(numbers)} are there"
    for (name, nbytes, checksum), number in zip(record["files"], numbers, strict=True):
        damage = _damage_of(number, nbytes, checksum)
        if damage is not None:
            return f"{name} {damage}"
    return None


def _damage_on_disk(record: dict[str, Any], folder: Path) -> str | None:
    for name, nbytes, checksum in record["files"]:
        try:
            with (folder / name).open("rb") as file:
                damage = _damage_of(file.fileno(), nbytes, checksum)
        except OSError as error:
            damage = f"cannot be read: {error}"
        if damage is not None:
            return f"{name} {damage}"
    return None


def _damage_of(number: int, nbytes: int, checksum: int) -> str | None:
    size = os.fstat(number).st_size
    if size != nbytes:
        return f"has {size} bytes instead of {nbytes}"
    found, done = xxhash.xxh3_64(), 0
    while done < size:  # not mapped into memory, where a drive that fails ends the process
        chunk = os.pread(number, _CHUNK_BYTES, done)
        if not chunk:
            return f"ends after {done} bytes"
        found.update(chunk)
        done += len(chunk)
    return None if found.intdigest() == checksum else "does not match its checksum"


def _linked(folder: Path, record: dict[str, Any], numbers: list[int]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    for (name, _, _), number in zip(record["files"], numbers, strict=True):
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(f"/proc/self/fd/{number}")
    return folder
