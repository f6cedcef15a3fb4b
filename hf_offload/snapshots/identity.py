"""Which training an output directory is of, and whether a snapshot is of the model and optimizer that go on from it.

Note: a mark
    A path does not tell one training from another: two containers have the same one for different directories, and a
    directory may be moved. So a small file with a random number lies in the output directory, and moves with it. A copy of
    the directory gets a number of its own, as long as the original is where it was.
"""

import dataclasses
import hashlib
import logging
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hf_offload.errors import SnapshotError
from hf_offload.snapshots import disk

logger = logging.getLogger(__name__)

_LONGEST = 60
"""Longer values are known by their digest: a record is small."""

_NO_MATTER = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Of a config: the type of weights is that of the weights."""


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
    if known is not None and _is_copy(output, known):
        logger.warning(
            "%s is a copy of %s: snapshots of the training there are not those of this one.", output, known.output
        )
        known = None
    training = Training(uuid.uuid4().hex if known is None else known.number, str(output))
    try:
        output.mkdir(parents=True, exist_ok=True)
        disk.write_record(output / disk.MARK_FILE, {"training": training.number, "output": training.output})
    except OSError as error:
        raise SnapshotError(
            f"Snapshots need to know {output} again, and nothing can be written there: {error}."
        ) from error
    return training


def _is_copy(output: Path, known: Training) -> bool:
    original = Path(known.output)
    there = known_training(original)
    return there is not None and there.number == known.number and not original.samefile(output)


def check_directory(directory: Path, training: Training) -> None:
    """Raise :class:`~hf_offload.errors.SnapshotError` if ``directory`` has snapshots of another training."""
    run = disk.read_record(directory / disk.RUN_FILE)
    if run is None or run.get("training") == training.number or next(directory.glob(f"{disk.PREFIX}*"), None) is None:
        return
    raise SnapshotError(
        f"{directory} holds snapshots of another training, which writes to {run.get('output')}: name another snapshot_dir, "
        "or remove them."
    )


def traits_of(models: Iterable[nn.Module], optimizers: Iterable[Any]) -> dict[str, str]:
    """What shapes of weights do not tell, in words: classes of optimizers, and entries of models' configs."""
    found: dict[str, str] = {}
    for model in models:
        to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
        for key, value in to_dict().items():
            if key not in _NO_MATTER and not str(key).startswith("_"):
                text = repr(value)
                digest = f"{text[:20]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
                found[f"{key} of the {type(model).__name__}"] = text if len(text) <= _LONGEST else digest
    for number, optimizer in enumerate(optimizers):
        while hasattr(optimizer, "optimizer"):  # in accelerate's wrapper
            optimizer = optimizer.optimizer
        found["the optimizer" + f" {number}" * (number > 0)] = type(optimizer).__qualname__
    return found


def check_traits(there: Mapping[str, str], here: Mapping[str, str], what: str) -> None:
    """Raise :class:`~hf_offload.errors.SnapshotError` if the snapshot that ``what`` names is of others."""
    different = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if different:
        listed = ", ".join(
            f"{one} is {there.get(one, 'not')} there and {here.get(one, 'not')} here" for one in different
        )
        raise SnapshotError(
            f"{what} is of another training: {listed}. Resume with what it was taken with, or start from the beginning."
        )
