"""Short trainings by transformers' Trainer, on the CPU, that report and save nothing unless they are asked to."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_offload import OffloadTrainingArguments
from tests.helpers.tiny_models import ExampleDataset

_FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}
# Up to transformers 5.x the older name; where both exist the older one is deprecated.
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in _FIELDS else "gradient_checkpointing"
# trl and peft still use the older one.
ALIASES = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

QUIET: dict[str, Any] = {
    "max_steps": 3, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none", "save_strategy": "no",
    "disable_tqdm": True,
}  # fmt: skip


def make_trainer(
    folder: Path,
    model: nn.Module,
    *,
    data: Any = None,
    name: str = "llama",
    kind: type[Trainer] = Trainer,
    arguments: type[TrainingArguments] = OffloadTrainingArguments,
    callbacks: Iterable[TrainerCallback] = (),
    **settings: Any,
) -> Trainer:
    """A Trainer of ``model`` on ``data``, or on random examples for the architecture ``name``."""
    return kind(
        model=model,
        args=arguments(output_dir=str(folder), **{**QUIET, **settings}),
        train_dataset=ExampleDataset(name, 12) if data is None else data,
        eval_dataset=ExampleDataset(name, 4) if data is None else data,
        callbacks=list(callbacks),
    )
