"""Extensions of a Trainer that offloads: it resumes from complete checkpoints and snapshots, which it takes, and its model
cards describe memory.

Note: reaching the Trainer
    transformers has no hook for either. Replacing functions of its modules would change every Trainer of the process, and a
    callback is passed everything but its Trainer. So the callback looks for the Trainer among the frames that called it, and
    extends that one object (:func:`~hf_offload.surgery.extend`).
"""

import sys
import zipfile
from pathlib import Path
from typing import Any, Protocol

from torch.utils.serialization import config as serialization_config
from transformers import Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME

from hf_offload.integrations.checkpoints import last_complete_checkpoint
from hf_offload.integrations.snapshots import TrainerSnapshots, snapshots_of
from hf_offload.integrations.streamed import has_own_state
from hf_offload.settings.schema import OffloadConfig
from hf_offload.surgery import extend

HEADING = "## Memory"
CARD_FILE = "README.md"
_CALLBACK = "_hf_offload_callback"
_SNAPSHOTS = "_hf_offload_snapshots"


class Summarizing(Protocol):
    """A callback with the ``summary`` of its last training; empty if nothing was offloaded."""

    summary: list[str]

    def config_for(self, args: TrainingArguments) -> OffloadConfig | None:
        """The settings of a training with these arguments, if it has any."""


def calling_trainer(callback: Summarizing) -> Trainer | None:
    """The Trainer that is calling ``callback``; None outside of a Trainer's events."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, Trainer) and callback in trainer.callback_handler.callbacks:
            return trainer
    return None


def extend_calling_trainer(callback: Summarizing) -> Trainer | None:
    """Extend the Trainer that is calling ``callback``, and return it. Idempotent; None outside of a Trainer's events."""
    trainer = calling_trainer(callback)
    if trainer is not None:
        if not isinstance(trainer, _Describing):
            extend(trainer, _Describing, _Resuming)
        setattr(trainer, _CALLBACK, callback)
    return trainer


def snapshots_of_training(trainer: Trainer) -> TrainerSnapshots | None:
    """The snapshots of the training that ``trainer`` is in, if it takes any."""
    return getattr(trainer, _SNAPSHOTS, None)


class _Describing(Trainer):
    """In front of the trainer's class, whose ``create_model_card`` may be its own, as in TRL."""

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._maybe_log_save_evaluate(*args, **kwargs)
        snapshots = snapshots_of_training(self)
        if snapshots is not None:
            snapshots.after_step()
        return result

    def create_model_card(self, *args: Any, **kwargs: Any) -> Any:
        result = super().create_model_card(*args, **kwargs)
        card = Path(self.args.output_dir or ".") / CARD_FILE
        lines = getattr(self, _CALLBACK).summary
        if lines and self.is_world_process_zero() and card.is_file():
            text = card.read_text(encoding="utf-8")
            if HEADING not in text.splitlines():
                listed = "\n".join(f"- {line}" for line in lines)
                card.write_text(f"{text.rstrip()}\n\n{HEADING}\n\n{listed}\n", encoding="utf-8")
        return result


class _Resuming(Trainer):
    """Right in front of :class:`~transformers.Trainer`, so that it also serves subclasses whose ``train`` asks to resume."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, _CALLBACK).config_for(self.args)
        if config is not None and config.snapshot_steps is not None:
            with snapshots_of(self, config, resume_from_checkpoint, _SNAPSHOTS) as checkpoint:
                result = super().train(checkpoint, *args, **kwargs)
                return result._replace(training_loss=result.metrics.get("train_loss", result.training_loss))
        if resume_from_checkpoint is True:
            folder = self.args.output_dir or "."
            resume_from_checkpoint = last_complete_checkpoint(folder)
            if resume_from_checkpoint is None:
                raise ValueError(f"No valid checkpoint found in output directory ({folder}): none is complete.")
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        snapshots = snapshots_of_training(self)
        if snapshots is not None and {"train_loss", "train_runtime"} <= logs.keys():  # the summary at the end
            logs["train_loss"] = snapshots.mean_loss
        super().log(logs, *args, **kwargs)

    def _may_stream(self, config: OffloadConfig, checkpoint: str | None) -> bool:
        if config.optimizer is not None or config.state_place == "none":
            return config.state_place != "none"
        file = Path(checkpoint or ".") / OPTIMIZER_NAME
        return not has_own_state(self.accelerator) and zipfile.is_zipfile(file)  # former formats cannot be mapped

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        config = getattr(self, _CALLBACK).config_for(self.args)
        if config is None or not self._may_stream(config, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        # Mapped into memory, a state is read as it is moved on, one parameter after the other.
        with serialization_config.patch({"load.mmap": True}):  # type: ignore[attr-defined]
            super()._load_optimizer_and_scheduler(checkpoint)
