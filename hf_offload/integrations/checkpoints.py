"""Files of a Trainer's checkpoints: which checkpoints are complete, and what a snapshot holds as they do.

The Trainer itself resumes from the newest folder, whatever is in it: a run that is killed while it writes one leaves a part.
"""

import copy
import dataclasses
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
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


# -- what a snapshot has in common with a checkpoint -------------------------------------------------------------------------


def unchanging_files(trainer: Any, model: Any, scratch: Path) -> dict[str, bytes]:
    """Those that are the same at every step: of the model's config, the tokenizer, and the arguments. They are written to the
    folder ``scratch`` first, which is gone afterwards.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        if hasattr(model, "peft_config"):
            _write_adapter_config(model, scratch)
        elif isinstance(model, PreTrainedModel):
            model.config.save_pretrained(scratch)
            if model.can_generate():
                model.generation_config.save_pretrained(scratch)
        tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        torch.save(trainer.args, scratch / TRAINING_ARGS_NAME)
        return {path.name: path.read_bytes() for path in sorted(scratch.iterdir()) if path.is_file()}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def state_of(trainer: Any) -> Any:
    """The Trainer's state as a checkpoint has it: with that of its callbacks, and what was counted since the last one."""
    state = copy.copy(trainer.state)
    state.log_history = list(state.log_history)
    state.total_flos = state.total_flos + trainer.current_flos
    states: dict[str, list[Any]] = {}
    for one in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(one, ExportableState):
            states.setdefault(type(one).__name__, []).append(one.state())
    state.stateful_callbacks = {
        name: found if isinstance(trainer.state.stateful_callbacks.get(name), list) else found[-1]
        for name, found in states.items()
    }
    return state


def json_of(state: Any) -> bytes:
    """The file of a state."""
    return (json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n").encode()


def _write_adapter_config(model: Any, folder: Path) -> None:
    """As peft writes it for an adapter."""
    config = copy.copy(model.peft_config["default"])
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = model.base_model.model.__dict__.get("name_or_path")
    config.save_pretrained(folder)
