"""Trainers that keep what a report of a run needs."""

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback

from hf_offload.training.metrics import FROM_LOSS, perplexity

if TYPE_CHECKING:
    from transformers.trainer_utils import EvalLoopOutput


class Recording(TrainerCallback):
    """Each micro-batch's loss as it is, because the Trainer's log holds means over steps.

    Attributes:
        around: Entered for each micro-batch.
        begun: Whether there was a micro-batch.
        step_losses: Losses of the micro-batches of each step.
    """

    def __init__(self) -> None:
        self.around: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self.begun = False
        self.step_losses: list[list[torch.Tensor]] = []
        self._micro_losses: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        """Of one micro-batch."""
        self._micro_losses.append(loss.detach())

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Close a step's losses."""
        self.step_losses.append(list(self._micro_losses))
        self._micro_losses.clear()

    def losses(self) -> list[float]:
        """The loss of each step."""
        return [float(sum(loss.double().item() for loss in micro)) for micro in self.step_losses]


class RecordingTrainer(Trainer):
    """Reports to a :class:`Recording`, and makes a perplexity of the loss of an evaluation if asked to."""

    def __init__(self, *args: Any, recording: Recording, with_perplexity: bool, **kwargs: Any):
        self._recording = recording
        self._with_perplexity = with_perplexity
        super().__init__(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._recording.begun = True
        with self._recording.around:
            loss = super().training_step(*args, **kwargs)
        self._recording.add(loss)
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> "EvalLoopOutput":
        output = super().evaluation_loop(*args, **kwargs)
        if self._with_perplexity and output.metrics is not None:
            for name in [name for name in output.metrics if name.endswith("_loss")]:
                output.metrics[f"{name.removesuffix('_loss')}_{FROM_LOSS}"] = perplexity(output.metrics[name])
        return output


class RecordingSeq2SeqTrainer(RecordingTrainer, Seq2SeqTrainer):
    """The same for sequences from sequences."""
