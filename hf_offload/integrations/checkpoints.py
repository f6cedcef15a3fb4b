"""Which checkpoints of a Trainer are complete: a run that is killed while it writes one leaves a part of it.

The Trainer itself resumes from the newest folder, whatever is in it.
"""

import json
import logging
import os
import re
from pathlib import Path

from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_offload.snapshots.restoring import damage_on_disk

logger = logging.getLogger(__name__)


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
        damage = _damage(checkpoint)
        if damage is None:
            return str(checkpoint)
        logger.warning("%s is incomplete and skipped (%s): the run that wrote it was killed.", checkpoint, damage)
    return None


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in words. The Trainer writes its state last, so a run that is killed leaves none, or a
    part of it; only the random states of other processes may come later. A snapshot has a record of all its files.
    """
    names = {path.name for path in checkpoint.iterdir()}
    if TRAINER_STATE_NAME not in names:
        return f"{TRAINER_STATE_NAME}, which is written last, is missing"
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_bytes())
    except (OSError, ValueError) as error:
        return f"{TRAINER_STATE_NAME} cannot be read: {error}"
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        return f"{TRAINER_STATE_NAME} names no step"
    for rank in range(sum(re.fullmatch(r"rng_state_\d+\.pth", name) is not None for name in names)):
        if f"rng_state_{rank}.pth" not in names:
            return f"rng_state_{rank}.pth is missing"
    return damage_on_disk(checkpoint)
