"""Which checkpoints of a Trainer are complete: a run that is killed while it writes one leaves a part of it.

The Trainer itself resumes from the newest folder, whatever is in it.
"""

import json
import logging
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from transformers import TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_offload.optimizers.mezo import LOG_FILE
from hf_offload.snapshots.restoring import damage_on_disk

logger = logging.getLogger(__name__)

_NO_WEIGHTS = ("training_args.bin", LOG_FILE)
_WEIGHTS = (".safetensors", ".bin")
_ZIP = b"PK\x03\x04"


def checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer saves in this step."""
    return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def last_complete_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint in ``folder``, or None. A warning names each one that is skipped, with the reason."""
    found: dict[int, Path] = {}
    for path in Path(folder).iterdir():
        match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name)
        if match is not None and path.is_dir():
            found[int(match[1])] = path
    for _, checkpoint in sorted(found.items(), reverse=True):
        damage = next(_damage(checkpoint), None)
        if damage is None:
            return str(checkpoint)
        logger.warning("%s is incomplete and skipped (%s): the run that wrote it was killed.", checkpoint, damage)
    return None


def _damage(checkpoint: Path) -> Iterator[str]:
    """What is wrong with a checkpoint, in words: of a Trainer, or of a snapshot, which has a record."""
    names = {path.name for path in checkpoint.iterdir()}
    if TRAINER_STATE_NAME not in names:
        yield f"{TRAINER_STATE_NAME}, which is written last, is missing"
    folders = any(path.is_dir() for path in checkpoint.iterdir())  # of FSDP, DeepSpeed, or several adapters
    if not folders and not any(name.endswith(_WEIGHTS) and name not in _NO_WEIGHTS for name in names):
        yield "there are no weights"
    yield from _missing_states(names, folders)
    for path in sorted(checkpoint.rglob("*")):
        found = _damage_of_file(path) if path.is_file() else None
        if found is not None:
            yield f"{path.relative_to(checkpoint)} {found}"
    found = damage_on_disk(checkpoint)
    if found is not None:
        yield found


def _missing_states(names: set[str], folders: bool) -> Iterator[str]:
    """Optimizer, schedule and random state are written together, or not at all (``save_only_model``)."""
    random = sorted(name for name in names if re.fullmatch(r"rng_state(_\d+)?\.pth", name))
    count = sum(name != "rng_state.pth" for name in random)
    there = {
        OPTIMIZER_NAME: folders or any(name.startswith("optimizer.") for name in names),
        SCHEDULER_NAME: folders or SCHEDULER_NAME in names,
        "rng_state": bool(random),
    }
    if random or OPTIMIZER_NAME in names or SCHEDULER_NAME in names:
        yield from (f"{name} is missing" for name, found in there.items() if not found)
    for rank in range(count):  # of the processes, in any order
        if f"rng_state_{rank}.pth" not in names:
            yield f"rng_state_{rank}.pth is missing"


def _damage_of_file(path: Path) -> str | None:
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_bytes())
            if path.name == TRAINER_STATE_NAME and not isinstance(content.get("global_step"), int):
                return "names no step"
            shards = set(content.get("weight_map", {}).values()) if path.name.endswith(".index.json") else set()
            missing = sorted(name for name in shards if not (path.parent / name).is_file())
            return f"names {missing[0]}, which is missing" if missing else None
        if path.suffix == ".safetensors":
            return None if _is_whole_safetensors(path) else "is cut off"
        if path.suffix in (".pt", ".pth", ".bin"):
            with path.open("rb") as file:
                start = file.read(len(_ZIP))
            # What torch.save() writes is a zip archive, whose directory is at the end; weights can be of an older format.
            if path.suffix == ".bin" and not _ZIP.startswith(start):
                return None
            if not zipfile.is_zipfile(path):
                return "is cut off"
            with zipfile.ZipFile(path) as archive:
                if any(
                    entry.CRC for entry in archive.infolist()
                ):  # else it was written without: see contents.archive()
                    broken = archive.testzip()
                    return broken and f"is damaged in {broken}"
    except (OSError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        return f"cannot be read: {error}"
    return None


def _is_whole_safetensors(path: Path) -> bool:
    """Eight bytes with the length of the header, the header, the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > path.stat().st_size:
            return False
        tensors = [one for name, one in json.loads(file.read(length)).items() if name != "__metadata__"]
    end = max((one["data_offsets"][1] for one in tensors), default=0)
    return path.stat().st_size == 8 + length + end and length > 0
