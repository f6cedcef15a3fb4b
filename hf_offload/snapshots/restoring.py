"""Whose a snapshot is, and the newest whole one that a training can go on from.

Note: a mark
    A path does not tell one training from another: two containers have the same one for different directories, and a
    directory may be moved. So a small file lies in the output directory, with a random number of the training and one of its
    present run, and moves with it. A copy of the directory gets a number of its own, as long as the original is where it was.
"""

import dataclasses
import logging
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_offload.errors import SnapshotError
from hf_offload.ranks import Ranks
from hf_offload.snapshots import disk, parity
from hf_offload.snapshots.client import SnapshotClient
from hf_offload.snapshots.contents import damage_of

logger = logging.getLogger(__name__)

MARK_FILE = "_hf_offload_training.json"
"""A Trainer that uploads leaves out names that begin like this."""
LINKS = ".hf_offload-snapshot"
"""In the output directory, while a training resumes from memory: links to files that have no name."""
_Record = dict[str, Any]


def known_training(output: Path) -> _Record | None:
    """The mark in ``output``, if there is one."""
    found = disk.read_record(output / MARK_FILE)
    return None if found is None or "run" not in found else found


def training_of(output: Path, begins: bool = False) -> _Record:
    """The mark of the training that writes to ``output``: its number, as ``training``, that of its present ``run``, when this
    ``began``, and the path. A directory without one, or which is a copy, is that of a new training. ``begins`` where another
    run does.

    Raises :class:`~hf_offload.errors.SnapshotError` if nothing can be written there.
    """
    mark = known = known_training(output)
    if mark is not None and mark["output"] != str(output):
        original = known_training(Path(mark["output"]))
        if original is not None and original["training"] == mark["training"] and not output.samefile(mark["output"]):
            logger.warning(
                "%s is a copy of %s: snapshots of the training there are not those of this one.", output, mark["output"]
            )
            mark = None
    training = uuid.uuid4().hex if mark is None else mark["training"]
    if mark is None or begins:
        mark = {"run": uuid.uuid4().hex, "began": time.time()}
    mark = {**mark, "training": training, "output": str(output)}
    if mark != known:
        try:
            output.mkdir(parents=True, exist_ok=True)
            disk.write_record(output / MARK_FILE, mark)
        except OSError as error:
            raise SnapshotError(
                f"Snapshots need to know {output} again, and nothing can be written there: {error}."
            ) from error
    return mark


@dataclasses.dataclass
class Found:
    """A whole snapshot.

    Attributes:
        record: Its step, its run and what else was noted when it was taken.
        folder: A folder with its files.
        numbers: Descriptors of its files in memory, with that of the parity; none if it is on disk.
    """

    record: _Record
    folder: Path
    numbers: list[int] = dataclasses.field(default_factory=list)

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


def check_format(record: Mapping[str, Any], where: str) -> None:
    """Raise :class:`~hf_offload.errors.SnapshotError` for what another version has taken."""
    if record.get("format") != disk.FORMAT:
        raise SnapshotError(
            f"The snapshots {where} are of format {record.get('format')}, and this version of hf_offload reads "
            f"{disk.FORMAT}: resume with the version that took them, or start from the beginning without "
            "resume_from_checkpoint."
        )


def snapshots_in(directory: Path | None, mark: _Record) -> dict[int, tuple[_Record, Path]]:
    """Those of the present run on disk, by their step.

    Raises :class:`~hf_offload.errors.SnapshotError` for those of another training.
    """
    found = {}
    for record, path in [] if directory is None else disk.records_in(directory):
        if record["training"] != mark["training"]:
            raise SnapshotError(
                f"{directory} holds snapshots of another training, which writes to {record['output']}: name another "
                "snapshot_dir, or remove them."
            )
        if record["run"] == mark["run"]:
            check_format(record, f"in {directory}")
            found[record["step"]] = record, path
    return found


def newest_whole(
    client: SnapshotClient, run: str, on_disk: Mapping[int, tuple[_Record, Path]], links: Path, ranks: Ranks
) -> Found | None:
    """The newest snapshot of the run that is whole in all ranks, or can be made so; a warning names each one that cannot. All
    ranks call it.
    """
    held = {each["step"]: each for each in client.status["snapshots"] if each["run"] == run}
    everyone = [record for of_rank in ranks.gather(list(held.values())) for record in of_rank]
    known = [*everyone, *(record for record, _ in on_disk.values())]
    for record in sorted(known, key=lambda each: int(each["step"]), reverse=True):
        if record["ranks"] != ranks.count:
            raise SnapshotError(
                f"The snapshot of step {record['step']} is of {record['ranks']} processes, and {ranks.count} train now: "
                "start as many, or start from the beginning without resume_from_checkpoint."
            )
    in_memory = {record["step"] for record in everyone}
    for step in sorted(in_memory | on_disk.keys(), reverse=True):
        found = _found_in_memory(client, held.get(step), step, links, ranks) if step in in_memory else None
        if found is None and step in on_disk:
            found = _found_on_disk(*on_disk[step], ranks)
        if found is not None:
            return found
    return None


# -- in memory -------------------------------------------------------------------------------------------------------------


def _found_in_memory(
    client: SnapshotClient, record: _Record | None, step: int, links: Path, ranks: Ranks
) -> Found | None:
    numbers, damage = _fetched(client, record)
    damages = ranks.gather(damage)
    with_parity = next((each for each in ranks.gather(record) if each is not None and "peers" in each), None)
    lost = {rank: each for rank, each in enumerate(damages) if each is not None}
    reasons = ", ".join(each if ranks.count == 1 else f"{each} (rank {rank})" for rank, each in lost.items())
    if len(lost) == 1 and with_parity is not None:
        logger.warning(
            "The snapshot of step %d in memory is damaged and rebuilt from those of the other ranks: %s.", step, reasons
        )
        record, numbers, damage = _rebuilt(record or with_parity, numbers, next(iter(lost)), ranks)
        reasons = next((each for each in ranks.gather(damage) if each is not None), "")
    if reasons or record is None:
        for number in numbers:
            os.close(number)
        logger.warning("The snapshot of step %d in memory is damaged and skipped: %s.", step, reasons)
        return None
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir(parents=True, mode=0o700)
    for (name, _, _), number in zip(record["files"], numbers, strict=False):
        (links / name).symlink_to(f"/proc/self/fd/{number}")
    return Found(record, links, numbers)


def _fetched(client: SnapshotClient, record: _Record | None) -> tuple[list[int], str | None]:
    """Descriptors of a snapshot's files, and what is wrong with them."""
    if record is None:
        return [], "it is not there"
    try:
        numbers = client.fetch(record["step"])
    except ConnectionError as error:
        return [], str(error)
    return numbers, _damage_in_memory(record, numbers)


def _rebuilt(record: _Record, numbers: list[int], lost: int, ranks: Ranks) -> tuple[_Record, list[int], str | None]:
    """The record and files of this rank, from which those of the rank ``lost`` are rebuilt; there, these."""
    try:
        made = parity.rebuild(ranks, lost, record["peers"], numbers)
    except OSError as error:
        return record, numbers, str(error)
    if ranks.number != lost:
        return record, numbers, None
    for number in numbers:
        os.close(number)
    numbers = [file.number for file in made]
    names = [name for name, _, _ in record["files"]]
    files = [[name, *each] for name, each in zip(names, record["peers"][lost], strict=True)]
    record = {**record, "files": files, "parity": [made[-1].nbytes, made[-1].checksum]}
    return record, numbers, _damage_in_memory(record, numbers)


def _damage_in_memory(record: _Record, numbers: Sequence[int]) -> str | None:
    listed = [*record["files"], *([["parity", *record["parity"]]] if "parity" in record else [])]
    if len(numbers) != len(listed):
        return f"{len(listed)} files were taken, and {len(numbers)} are there"
    damages = ((name, damage_of(number, *each)) for (name, *each), number in zip(listed, numbers, strict=True))
    return next((f"{name} {damage}" for name, damage in damages if damage is not None), None)


# -- on disk ---------------------------------------------------------------------------------------------------------------


def _found_on_disk(record: _Record, folder: Path, ranks: Ranks) -> Found | None:
    """One that the first rank finds whole, and all can read."""
    damage = ranks.first(lambda: damage_on_disk(folder))
    there = ranks.gather(None if folder.is_dir() else f"{folder} is not there")
    damage = damage or next((each for each in there if each), None)
    if damage is None:
        return Found(record, folder)
    logger.warning("The snapshot of step %d in %s is damaged and skipped: %s.", record["step"], folder, damage)
    return None


def damage_on_disk(folder: Path) -> str | None:
    """What is wrong with the files that a snapshot's record lists, in words. Of another checkpoint, nothing is known."""
    record = disk.read_record(folder / disk.RECORD_FILE)
    if record is None:
        return f"{disk.RECORD_FILE} is damaged" if (folder / disk.RECORD_FILE).exists() else None
    for name, nbytes, checksum in record["files"]:
        try:
            with (folder / name).open("rb") as file:
                damage = damage_of(file.fileno(), nbytes, checksum)
        except OSError as error:
            damage = f"cannot be read: {error}"
        if damage is not None:
            return f"{name} {damage}"
    return None
