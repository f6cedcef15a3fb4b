"""Finding the newest whole snapshot, in memory or on disk."""

import contextlib
import errno
import logging
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from hf_offload.errors import SnapshotError
from hf_offload.ranks import Ranks
from hf_offload.settings.sizes import format_bytes
from hf_offload.snapshots import disk, layout, parity
from hf_offload.snapshots.client import SnapshotClient
from hf_offload.snapshots.memory import MemoryFile, damage_of

logger = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 20
"""So much of a snapshot in memory is copied to the output directory, if need be, while a training resumes."""


class Found:
    """A whole snapshot.

    Attributes:
        record: Its step, its run and what else was noted when it was taken.
        folder: A folder with its files.
        slot: Where the snapshot process has it, or what was left of it; None if it has nothing.
        files: Their descriptors, with that of the parity; none if it is on disk.
        is_rebuilt: Whether it was made from those of other ranks.
        assembled: By their number, those of its files that have all bytes, where parts of them are on drives.
        names: What is in the folder.
    """

    def __init__(
        self,
        record: dict[str, Any],
        folder: Path,
        slot: int | None = None,
        files: Sequence[int] = (),
        is_rebuilt: bool = False,
        assembled: Mapping[int, int] | None = None,
    ):
        self.record = record
        self.folder = folder
        self.slot = slot
        self.files = list(files)
        self.is_rebuilt = is_rebuilt
        self.assembled = dict(assembled or {})
        self.names: list[str] = []
        for place, (name, nbytes, _) in enumerate(record["files"]):
            if name == disk.SMALL_FILES:
                self.names += [each for each, *_ in disk.small_files(self.files[place], nbytes)]
            else:
                self.names.append(name)

    @property
    def step(self) -> int:
        """Optimizer steps until then."""
        return int(self.record["step"])

    @property
    def place(self) -> str:
        """Where it was found, in words."""
        return "memory" if self.files else str(self.folder)

    def close(self) -> None:
        """Nothing of it is needed any more. Idempotent."""
        if not self.files:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        for file in [*self.files, *self.assembled.values()]:
            os.close(file)
        self.files, self.assembled = [], {}


def newest_whole(
    client: SnapshotClient, status: dict[str, Any], directory: Path | None, training: str, links: Path, ranks: Ranks
) -> Found | None:
    """The newest snapshot that is whole in all ranks, or can be made so; a warning names each one that cannot, and those
    that are not of the ``training`` with this number.

    ``client`` is connected to the snapshot process, which has said its ``status``, and ``directory`` is where that of the
    first rank writes, if anywhere. The folder of one that is found in memory is ``links``: until :meth:`Found.close`, its
    files are links to memory.

    Raises :class:`~hf_offload.errors.SnapshotError` for those of another version, or of another number of processes.
    """
    ranks.each(lambda: _check_format(status.get("format"), "in memory"))
    here = {each["record"]["sequence"]: (each["record"], each["slot"]) for each in status["snapshots"]}
    listed = [record for record, _ in here.values()]
    told = [each for of_rank in ranks.gather([_summary(record) for record in listed]) for each in of_rank]
    run = max(told, default=(0.0, None))[1]
    if status["run"] != run:
        here = {}
    on_disk: dict[int, tuple[dict[str, Any], Path]] = ranks.first(
        lambda: {record["sequence"]: (record, path) for path, record in _on_disk(directory, run, training)}
    )
    if status.get("kept") is not None:  # what is on disk may be newer, for a loop that would go on behind its end
        on_disk = {sequence: each for sequence, each in on_disk.items() if sequence <= status["kept"]}
    in_memory = {sequence: (step, count) for _, of_run, sequence, step, count in told if of_run == run}
    places = [(sequence, True) for sequence in in_memory] + [(sequence, False) for sequence in on_disk]
    for sequence, is_in_memory in sorted(places, reverse=True):
        if is_in_memory:
            step, count = in_memory[sequence]
            _check_count(step, count, ranks)
            found = _found_in_memory(client, here.get(sequence), step, links, ranks)
        else:
            record, folder = on_disk[sequence]
            _check_count(record["step"], record["ranks"], ranks)
            found = _found_on_disk(record, folder, ranks)
        if found is not None:
            return found
    return None


def _summary(record: dict[str, Any]) -> tuple[float, str, int, int, int]:
    return record["began"], record["run"], record["sequence"], record["step"], record["ranks"]


def _check_count(step: int, count: int, ranks: Ranks) -> None:
    if count != ranks.count:
        raise SnapshotError(
            f"The snapshot of step {step} is of {count} processes, and {ranks.count} train now: start as many, or start from "
            "the beginning without resume_from_checkpoint."
        )


def _found_in_memory(
    client: SnapshotClient, held: tuple[dict[str, Any], int] | None, step: int, links: Path, ranks: Ranks
) -> Found | None:
    own = ranks.each(lambda: _Held(client, held))
    verdicts = ranks.gather((own.damage, own.record.get(parity.NAME)))
    lost = {rank: damage for rank, (damage, _) in enumerate(verdicts) if damage is not None}
    what = f"The snapshot of step {step} in memory"
    reasons = ", ".join(damage if ranks.count == 1 else f"{damage} (rank {rank})" for rank, damage in lost.items())
    kept = next((description for _, description in verdicts if description is not None), None)
    if lost and len(lost) == 1 and kept is not None:
        logger.warning("%s is damaged and rebuilt from those of the other ranks: %s.", what, reasons)
        reasons = _rebuild(own, next(iter(lost)), kept["length"], ranks)
    if reasons:
        own.close()
        logger.warning("%s is damaged and skipped: %s.", what, reasons)
        return None
    folder = _linked(
        links, own.record, [own.assembled.get(number, each) for number, each in enumerate(own.numbers)], own.assembled
    )
    return Found(own.record, folder, own.slot, own.numbers, own.is_rebuilt, own.assembled)


class _Held:
    """What the snapshot process of this rank has of a snapshot, and what is wrong with it."""

    def __init__(self, client: SnapshotClient, held: tuple[dict[str, Any], int] | None):
        self.record: dict[str, Any] = {}
        self.slot: int | None = None
        self.numbers: list[int] = []
        self.is_rebuilt = False
        self.assembled: dict[int, int] = {}
        self.damage: str | None = "it is not there"
        if held is None:
            return
        self.record, self.slot = held
        try:
            self.numbers = client.fetch(self.slot)
            self.damage = _damage_in_memory(self.record, self.numbers, self.assembled)
        except ConnectionError as error:
            self.damage = str(error)

    def replace(self, rebuilt: parity.Rebuilt, row: MemoryFile, length: int) -> None:
        self.close()
        self.record = {**rebuilt.record, parity.NAME: {"files": [[row.nbytes, row.checksum]], "length": length}}
        self.is_rebuilt, self.numbers = True, [file.number for file in (*rebuilt.files, row)]
        self.damage = _damage_in_memory(self.record, self.numbers, self.assembled)

    def close(self) -> None:
        for number in [*self.numbers, *self.assembled.values()]:
            os.close(number)
        self.numbers, self.assembled = [], {}


def _rebuild(own: _Held, lost: int, length: int, ranks: Ranks) -> str:
    """Have the rank that has lost its part get it again. Returns why that was not possible."""
    stream, row = None, None
    if ranks.number != lost:
        stream, row = parity.Stream(own.record, own.numbers), own.numbers[len(own.record["files"])]
    try:
        made = parity.rebuild(ranks, lost, length, stream, row)
        if made is not None:
            own.replace(*made, length)
    except OSError as error:
        own.damage = str(error)
    return next((damage for damage in ranks.gather(own.damage) if damage is not None), "")


def _found_on_disk(record: dict[str, Any], folder: Path, ranks: Ranks) -> Found | None:
    """One that the first rank finds whole, and all can read."""
    damage = ranks.first(lambda: damage_on_disk(record, folder))
    if damage is None:
        damage = next(
            (each for each in ranks.gather(None if folder.is_dir() else f"{folder} is not there") if each), None
        )
    if damage is None:
        return Found(record, folder)
    logger.warning("The snapshot of step %d in %s is damaged and skipped: %s.", record["step"], folder, damage)
    return None


def _on_disk(directory: Path | None, run: str | None, training: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Those of ``run``, or else of the run that wrote there last, if it is of this ``training``."""
    if directory is None:
        return
    last = disk.read_record(directory / disk.RUN_FILE)
    if last is None:
        return
    _check_format(last.get("format"), f"in {directory}")
    for path in directory.glob(f"{disk.PREFIX}*"):
        record = disk.read_record(path / disk.RECORD_FILE)
        if record is None:
            continue
        if record["training"] != training:
            logger.warning("The snapshot of step %d in %s is of another training, and not taken.", record["step"], path)
        elif record["run"] == (run or last["run"]):
            yield path, record


def _check_format(found: Any, where: str) -> None:
    if found != disk.FORMAT:
        raise SnapshotError(
            f"The snapshots {where} are of format {found}, and this version of hf_offload reads {disk.FORMAT}: resume "
            "with the version that took them, or start from the beginning without resume_from_checkpoint."
        )


def _damage_in_memory(record: dict[str, Any], numbers: list[int], assembled: dict[int, int]) -> str | None:
    """What is wrong with it. What lacks ranges that are on drives is assembled on the way."""
    listed = [*record["files"], *([parity.NAME, *each] for each in record.get(parity.NAME, {}).get("files", ()))]
    count = len(listed) + (1 + record[disk.KEPT]["sources"] if disk.KEPT in record else 0)
    if len(numbers) != count:
        return f"{count} files were taken, and {len(numbers)} are there"
    ranges, damage = layout.layout_of(record, numbers)
    if damage is not None:
        return damage
    for place, ((name, nbytes, checksum), number) in enumerate(zip(listed, numbers, strict=False)):
        if place in ranges:
            try:
                number = assembled[place] = layout.assembled(record, numbers, ranges, place)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EACCES, errno.EROFS):
                    raise SnapshotError(
                        f"The snapshot of step {record['step']} has state on a drive, which cannot be gathered in "
                        f"{record[disk.KEPT]['directory']}: {error}. Make room for {format_bytes(nbytes)} there."
                    ) from error
                return f"{name} cannot be read from the drive: {error}"
        damage = damage_of(number, nbytes, checksum, layout.ranges_of(ranges, place))
        if damage is not None:
            return f"{_damaged_part(number, nbytes) if name == disk.SMALL_FILES else name} {damage}"
    return None


def _damaged_part(number: int, nbytes: int) -> str:
    """The name of the small file that is damaged, if one is."""
    with contextlib.suppress(OSError, ValueError, struct.error):
        for name, begin, count, checksum in disk.small_files(number, nbytes):
            if xxhash.xxh3_64_intdigest(os.pread(number, count, begin)) != checksum:
                return name
    return "the list of small files"


def damage_on_disk(record: dict[str, Any], folder: Path) -> str | None:
    """What is wrong with the files that a snapshot's record lists, in words."""
    for place, (name, nbytes, checksum) in enumerate(record["files"]):
        ranges = [(begin, count) for number, begin, count in record.get(disk.RANGES, ()) if number == place]
        try:
            with (folder / name).open("rb") as file:
                damage = damage_of(file.fileno(), nbytes, checksum, ranges)
        except OSError as error:
            damage = f"cannot be read: {error}"
        if damage is not None:
            return f"{name} {damage}"
    return None


def snapshot_on_disk(folder: Path, count: int) -> Found | None:
    """The snapshot in ``folder`` that was named, of ``count`` processes; None if it is another checkpoint, or of another
    version or number of processes: then it is one like any other.

    Raises :class:`~hf_offload.errors.SnapshotError` if it is damaged.
    """
    if not (folder / disk.RECORD_FILE).exists():
        return None
    record = disk.read_record(folder / disk.RECORD_FILE)
    damage = "its record cannot be read" if record is None else damage_on_disk(record, folder)
    if record is None or damage is not None:
        raise SnapshotError(f"The snapshot in {folder} is damaged: {damage}. Resume from another one.")
    is_known = record["format"] == disk.FORMAT and record["ranks"] == count and "trainer" in record
    return Found(record, folder) if is_known else None


def _linked(folder: Path, record: dict[str, Any], numbers: list[int], kept: dict[int, int]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    for (name, nbytes, _), number in zip(record["files"], numbers, strict=False):
        if name == disk.SMALL_FILES:
            _unpack(folder, number, nbytes, kept)
        else:
            (folder / name).symlink_to(f"/proc/self/fd/{number}")
    return folder


def _unpack(folder: Path, source: int, nbytes: int, kept: dict[int, int]) -> None:
    """Small files are copied. What turns out to be larger stays in memory: its file is added to those that are ``kept``."""
    for place, (name, begin, count, _) in enumerate(disk.small_files(source, nbytes)):
        if count > _SMALL_BYTES:
            number = kept[-1 - place] = os.memfd_create("hf_offload-snapshot", os.MFD_CLOEXEC)
            disk.copy(number, source, begin, count)
            (folder / name).symlink_to(f"/proc/self/fd/{number}")
        else:
            with (folder / name).open("xb") as file:
                disk.copy(file.fileno(), source, begin, count)
