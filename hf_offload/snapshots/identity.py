"""Which training an output directory is of, and whose snapshots a ``snapshot_dir`` holds.

Note: a mark
    A path does not tell one training from another: two containers have the same one for different directories, and a
    directory is moved. Nor does the number of an inode: it is given to another directory later, and a drive that is mounted
    again may have another number itself. So a small file with a random number lies in the output directory. It goes where the
    directory goes, and is known again on another machine. A copy of the directory would have the same number: it gets one of
    its own if the original is still where it was. The same file lies in ``snapshot_dir`` while a training has not ended well,
    so that no other one removes what this one needs to go on.
"""

import contextlib
import dataclasses
import logging
import uuid
from pathlib import Path

from hf_offload.errors import SnapshotError
from hf_offload.snapshots import disk

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Training:
    """One training, however often it is started.

    Attributes:
        number: By which it is known.
        output: Path of its output directory.
    """

    number: str
    output: str


def known_training(folder: Path) -> Training | None:
    """The one whose mark is in ``folder``."""
    found = disk.read_record(folder / disk.MARK_FILE)
    return None if found is None else Training(found["training"], found["output"])


def training_of(output: Path) -> Training:
    """The one that writes to ``output``: a new one where there is no mark yet, or that of a directory which is a copy.

    Raises :class:`~hf_offload.errors.SnapshotError` if nothing can be written there.
    """
    known = known_training(output)
    if known is not None and known.output == str(output):
        return known
    is_moved = known is not None and not _is_copy(output, known)
    if known is not None and not is_moved:
        logger.warning(
            "%s is a copy of %s: snapshots of the training there are not those of this one.", output, known.output
        )
    training = Training(known.number if known is not None and is_moved else uuid.uuid4().hex, str(output))
    try:
        output.mkdir(parents=True, exist_ok=True)
        return _marked(output, training, is_first=known is None)
    except OSError as error:
        raise SnapshotError(
            f"Snapshots need to know {output} again, and nothing can be written there: {error}."
        ) from error


def claim(directory: Path, training: Training) -> None:
    """``directory`` is to hold the snapshots of ``training``.

    Raises :class:`~hf_offload.errors.SnapshotError` if it holds those of another one that has not ended well, or if nothing
    can be written there.
    """
    owner = known_training(directory)
    if owner is not None and owner.number != training.number and _has_snapshots_of(owner, directory):
        raise SnapshotError(
            f"{directory} holds snapshots of another training, which writes to {owner.output} and has not ended: name "
            "another snapshot_dir. If it is this one, whose output directory was lost, copy "
            f"{directory / disk.MARK_FILE} to {training.output}."
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if owner != training:
            _marked(directory, training)
    except OSError as error:
        raise SnapshotError(
            f"Snapshots cannot be written to {directory}: {error}. Name another snapshot_dir, or none."
        ) from error


def release(directory: Path, training: Training) -> None:
    """``training`` has ended well: another one may use its ``directory``."""
    if known_training(directory) == training and not _is_same(directory, Path(training.output)):
        with contextlib.suppress(OSError):
            (directory / disk.MARK_FILE).unlink()


def _marked(folder: Path, training: Training, is_first: bool = False) -> Training:
    """With ``is_first``, the training that was the first one to mark it: two may start at once."""
    content = {"training": training.number, "output": training.output}
    if is_first:
        try:
            with (folder / disk.MARK_FILE).open("x") as file:
                file.write(disk.text_of(content))
            return training
        except FileExistsError:
            other = known_training(folder)
            if other is not None:
                return other  # else it is damaged
    disk.write_record(folder / disk.MARK_FILE, content)
    return training


def _is_copy(output: Path, known: Training) -> bool:
    original = Path(known.output)
    there = known_training(original)
    return there is not None and there.number == known.number and not _is_same(original, output)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _has_snapshots_of(training: Training, directory: Path) -> bool:
    records = (disk.read_record(path / disk.RECORD_FILE) for path in directory.glob(f"{disk.PREFIX}*"))
    return any(record is not None and record.get("training") == training.number for record in records)
