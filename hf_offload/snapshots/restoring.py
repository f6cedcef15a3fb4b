"""The beginning of a training with snapshots: its snapshot process, and the newest whole snapshot to go on from."""

import dataclasses
import logging
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError, SnapshotError
from hf_offload.ranks import Ranks
from hf_offload.snapshots import disk, parity, retained
from hf_offload.snapshots.client import SnapshotClient, address_of
from hf_offload.snapshots.identity import Training, check_directory, training_of
from hf_offload.snapshots.memory import damage_of

logger = logging.getLogger(__name__)

LINKS = ".hf_offload-snapshot"
"""In the output directory, while a training resumes from memory: links to files that have no name."""
_Record = dict[str, Any]


@dataclasses.dataclass
class Found:
    """A whole snapshot.

    Attributes:
        record: Its step, its run and what else was noted when it was taken.
        folder: A folder with its files.
        numbers: Descriptors of its files in memory, with that of the parity; none if it is on disk.
        is_rebuilt: Whether it was made from those of other ranks.
    """

    record: _Record
    folder: Path
    numbers: list[int] = dataclasses.field(default_factory=list)
    is_rebuilt: bool = False

    @property
    def step(self) -> int:
        """Optimizer steps until then."""
        return int(self.record["step"])

    def __str__(self) -> str:
        return f"The snapshot of step {self.step} in {'memory' if self.numbers else self.folder}"

    def close(self) -> None:
        """Nothing of it is needed any more. Idempotent."""
        if self.numbers:
            shutil.rmtree(self.folder, ignore_errors=True)
        for number in self.numbers:
            os.close(number)
        self.numbers = []


@dataclasses.dataclass
class Opened:
    """A connection to the snapshot process of a training, and what it goes on from.

    Attributes:
        training: The training, in all its runs.
        client: The connection.
        address: Where the process listens.
        run, began, sequence: Number, time of the beginning and last snapshot of the run that goes on, or a new one's.
        found: The snapshot; None to start at the beginning.
    """

    training: Training
    client: SnapshotClient
    address: bytes
    run: str = ""
    began: float = 0.0
    sequence: int = 0
    found: Found | None = None

    def begin_run(self, ranks: Ranks) -> None:
        """Another run begins. All ranks call it."""
        self.run, self.began = ranks.first(lambda: (uuid.uuid4().hex, time.time()))

    def forget_found(self) -> None:
        """Nothing of the snapshot is needed any more. Idempotent."""
        if self.found is not None:
            self.found.close()
            self.found = None


def open_snapshots(
    output: Path,
    directory: Path | None,
    resume: bool,
    ranks: Ranks,
    checkpoint: str | None = None,
    *,
    is_asked: bool = True,
) -> Opened:
    """Connect to the snapshot process of the training that writes to ``output``, or start it. With ``resume``, find the
    newest snapshot that is whole in all ranks, in memory or in ``directory``; else training goes on from ``checkpoint``, or
    begins. Without ``is_asked``, the script has not said whether to resume. All ranks call it.

    Raises :class:`~hf_offload.errors.SnapshotError` if another training is connected to it, if ``directory`` is that of
    another one, or for snapshots of another version or number of processes.
    """
    if not hasattr(os, "memfd_create"):
        raise OffloadConfigError("snapshot_steps cannot be used here: snapshots need Linux. Leave it out.")
    training = ranks.first(lambda: training_of(output))
    if directory is not None:
        ranks.first(lambda: check_directory(directory, training))
    if retained.has_ended(training.number) and not (resume and is_asked) and checkpoint is None:
        raise SnapshotError(
            f"This process has trained in {output} already, and a restart would take one training for the other: give each "
            "an output directory of its own, or go on with resume_from_checkpoint=True."
        )
    address = address_of(training.number, ranks.number)
    retained.release(but=address)
    client, status = ranks.each(lambda: _joined(output, address))
    opened = Opened(training, client, address)
    if not resume:
        opened.begin_run(ranks)
        if status["snapshots"]:
            logger.warning(
                "Training %s, as was asked for: the snapshots that an earlier one has left in memory, the newest of step %d, "
                "are dropped.",
                "starts at its beginning" if checkpoint is None else f"goes on from {checkpoint}",
                max(each["step"] for each in status["snapshots"]),
            )
        return opened
    links = output / (LINKS if ranks.count == 1 else f"{LINKS}-{ranks.number}")
    try:
        found = opened.found = _newest_whole(client, status, directory, links, ranks)
    except BaseException:
        client.close()
        raise
    if found is None:
        opened.begin_run(ranks)
        return opened
    opened.run, opened.began, opened.sequence = (found.record[name] for name in ("run", "began", "sequence"))
    return opened


def _joined(output: Path, address: bytes) -> tuple[SnapshotClient, _Record]:
    for _ in range(2):
        client = SnapshotClient.connect(address, start=True)
        assert client is not None
        try:
            joined = client.ask("join")
        except ConnectionError as error:
            logger.warning("%s: another one is started.", str(error).capitalize())
            continue
        if "refused" not in joined:
            return client, joined
        client.close()
        raise SnapshotError(
            f"This process takes snapshots of the training in {output} already: let that one end before another begins."
            if joined["refused"] == os.getpid()
            else f"Process {joined['refused']} trains already with {output} as its output directory, and takes snapshots: "
            "end it, or write to another directory."
        )
    raise SnapshotError("The snapshot process has ended again: see whether the machine has memory.")


def _newest_whole(
    client: SnapshotClient, status: _Record, directory: Path | None, links: Path, ranks: Ranks
) -> Found | None:
    """The newest snapshot of the run that is whole in all ranks, or can be made so; a warning names each one that cannot."""
    ranks.each(lambda: _check_format(status, "in memory"))
    listed = [
        (each["began"], each["run"], each["sequence"], each["step"], each["ranks"]) for each in status["snapshots"]
    ]
    everyone = [each for of_rank in ranks.gather(listed) for each in of_rank]
    run = max(everyone, default=(0.0, None))[1]
    here = {each["sequence"]: each for each in status["snapshots"] if each["run"] == run}
    on_disk: dict[int, tuple[_Record, Path]] = ranks.first(lambda: _listed_on_disk(directory, run))
    in_memory = {sequence: (step, count) for _, of_run, sequence, step, count in everyone if of_run == run}
    ends = [last for last in ranks.gather(status["last"]) if last is not None]
    places = [(sequence, True) for sequence in in_memory] + [(sequence, False) for sequence in on_disk]
    for sequence, is_in_memory in sorted(places, reverse=True):
        if ends and sequence > min(ends):  # on disk: a loop would go on after its last step
            continue
        record = None if is_in_memory else on_disk[sequence][0]
        step, count = in_memory[sequence] if record is None else (record["step"], record["ranks"])
        if count != ranks.count:
            raise SnapshotError(
                f"The snapshot of step {step} is of {count} processes, and {ranks.count} train now: start as many, or start "
                "from the beginning without resume_from_checkpoint."
            )
        if record is None:
            found = _found_in_memory(client, here.get(sequence), step, links, ranks)
        else:
            found = _found_on_disk(record, on_disk[sequence][1], ranks)
        if found is not None:
            return found
    return None


def _check_format(record: Mapping[str, Any], where: str) -> None:
    if record.get("format") != disk.FORMAT:
        raise SnapshotError(
            f"The snapshots {where} are of format {record.get('format')}, and this version of hf_offload reads "
            f"{disk.FORMAT}: resume with the version that took them, or start from the beginning without "
            "resume_from_checkpoint."
        )


# -- in memory -------------------------------------------------------------------------------------------------------------


class _Part:
    """What the snapshot process of this rank has of a snapshot, and what is wrong with it."""

    def __init__(self, client: SnapshotClient, record: _Record | None):
        self.record: _Record = record or {}
        self.numbers: list[int] = []
        self.damage: str | None = "it is not there"
        if record is not None:
            try:
                self.numbers = client.fetch(record["sequence"])
                self.damage = _damage_in_memory(record, self.numbers)
            except ConnectionError as error:
                self.damage = str(error)

    def close(self) -> None:
        for number in self.numbers:
            os.close(number)
        self.numbers = []


def _found_in_memory(
    client: SnapshotClient, record: _Record | None, step: int, links: Path, ranks: Ranks
) -> Found | None:
    own = ranks.each(lambda: _Part(client, record))
    verdicts = ranks.gather((own.damage, own.record.get(parity.NAME)))
    lost = {rank: damage for rank, (damage, _) in enumerate(verdicts) if damage is not None}
    reasons = ", ".join(damage if ranks.count == 1 else f"{damage} (rank {rank})" for rank, damage in lost.items())
    described = next((description for _, description in verdicts if description is not None), None)
    is_rebuilt = False
    if len(lost) == 1 and described is not None:
        logger.warning(
            "The snapshot of step %d in memory is damaged and rebuilt from those of the other ranks: %s.", step, reasons
        )
        is_rebuilt = ranks.number in lost
        reasons = _rebuild(own, next(iter(lost)), described["length"], ranks)
    if reasons:
        own.close()
        logger.warning("The snapshot of step %d in memory is damaged and skipped: %s.", step, reasons)
        return None
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir(parents=True, mode=0o700)
    for (name, _, _), number in zip(own.record["files"], own.numbers, strict=False):
        (links / name).symlink_to(f"/proc/self/fd/{number}")
    return Found(own.record, links, own.numbers, is_rebuilt)


def _rebuild(own: _Part, lost: int, length: int, ranks: Ranks) -> str:
    """Have the rank that has lost its part get it again. Returns why that was not possible."""
    stream, row = None, None
    if ranks.number != lost:
        stream, row = parity.Stream(own.record, own.numbers), own.numbers[len(own.record["files"])]
    try:
        made = parity.rebuild(ranks, lost, length, stream, row)
        if made is not None:
            own.close()
            own.record, own.numbers = made
            own.damage = _damage_in_memory(own.record, own.numbers)
    except OSError as error:
        own.damage = str(error)
    return next((damage for damage in ranks.gather(own.damage) if damage is not None), "")


def _damage_in_memory(record: _Record, numbers: Sequence[int]) -> str | None:
    listed = [*record["files"], *([parity.NAME, *each] for each in record.get(parity.NAME, {}).get("files", ()))]
    if len(numbers) != len(listed):
        return f"{len(listed)} files were taken, and {len(numbers)} are there"
    damages = ((name, damage_of(number, *each)) for (name, *each), number in zip(listed, numbers, strict=True))
    return next((f"{name} {damage}" for name, damage in damages if damage is not None), None)


# -- on disk ---------------------------------------------------------------------------------------------------------------


def _listed_on_disk(directory: Path | None, run: str | None) -> dict[int, tuple[_Record, Path]]:
    """Snapshots of ``run``, or else of the run that wrote there last, by their sequence."""
    last = None if directory is None else disk.read_record(directory / disk.RUN_FILE)
    if directory is None or last is None:
        return {}
    _check_format(last, f"in {directory}")
    records = ((disk.read_record(path / disk.RECORD_FILE), path) for path in directory.glob(f"{disk.PREFIX}*"))
    wanted = run or last["run"]
    return {record["sequence"]: (record, path) for record, path in records if record and record["run"] == wanted}


def _found_on_disk(record: _Record, folder: Path, ranks: Ranks) -> Found | None:
    """One that the first rank finds whole, and all can read."""
    damage = ranks.first(lambda: damage_on_disk(record, folder))
    there = ranks.gather(None if folder.is_dir() else f"{folder} is not there")
    damage = damage or next((each for each in there if each), None)
    if damage is None:
        return Found(record, folder)
    logger.warning("The snapshot of step %d in %s is damaged and skipped: %s.", record["step"], folder, damage)
    return None


def damage_on_disk(record: Mapping[str, Any], folder: Path) -> str | None:
    """What is wrong with the files that a snapshot's record lists, in words."""
    for name, nbytes, checksum in record["files"]:
        try:
            with (folder / name).open("rb") as file:
                damage = damage_of(file.fileno(), nbytes, checksum)
        except OSError as error:
            damage = f"cannot be read: {error}"
        if damage is not None:
            return f"{name} {damage}"
    return None


def named_snapshot(folder: Path, count: int) -> Found | None:
    """The snapshot in ``folder``, of ``count`` processes; None if it is another checkpoint, which is one like any other.

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
