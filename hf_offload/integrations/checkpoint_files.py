"""Files of a Trainer's checkpoint other than weights and states of optimizers, as the Trainer writes them."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState


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
