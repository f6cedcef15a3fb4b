"""A Trainer whose training step is two losses instead of a backward."""

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_offload.errors import OffloadError
from hf_offload.integrations.without_gradients import LeavesModelsUnwrapped, check_processes
from hf_offload.methods.mezo import LOG_FILE, MeZO, MezoLog
from hf_offload.surgery import extend

logger = logging.getLogger(__name__)


def train_without_gradients(trainer: Trainer) -> None:
    """Let ``trainer``, whose optimizer will be a :class:`~hf_offload.methods.mezo.MeZO`, evaluate losses alone."""
    extend(trainer, None, _EvaluatesTwice)


def mezo_of(optimizer: Any) -> MeZO | None:
    """The MeZO in wrappers such as accelerate's, or None."""
    while not isinstance(optimizer, MeZO) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, MeZO) else None


class _EvaluatesTwice(Trainer):
    """Right in front of :class:`~transformers.Trainer`, so that a subclass's ``training_step`` may do more around it.

    Micro-batches of an accumulated step are collected: both losses are those of all of them. One without labels (all -100),
    whose loss is NaN, counts as 0 in both, as its gradient does with backward: where a step has no others, weight decay alone
    changes weights. The loss of such a step is NaN, which the Trainer leaves out of its log.
    """

    _collected: list[Any]

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._collected = []  # an earlier training may have ended in the middle of a step
        check_processes(self.accelerator, "mezo")
        unwrapped = extend(self.accelerator, LeavesModelsUnwrapped)
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            unwrapped.remove()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """A checkpoint without the optimizer's state (``save_only_model``) has the log."""
        super()._load_optimizer_and_scheduler(checkpoint)
        optimizer = mezo_of(self.optimizer)
        if checkpoint is None or optimizer is None or optimizer.log.rows:
            return
        if (Path(checkpoint) / LOG_FILE).is_file():
            optimizer.load_log(MezoLog.load(checkpoint))
        else:
            logger.warning(
                "%s has neither an optimizer's state nor a %s: directions begin with those of the first step again. If MeZO "
                "trained these weights, set another seed in memory_mode_kwargs.",
                checkpoint,
                LOG_FILE,
            )

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The step's loss with its last micro-batch, and 0 before."""
        optimizer = mezo_of(self.optimizer)
        if optimizer is None:
            raise OffloadError(
                "This Trainer was made for memory_mode='mezo', and its optimizer was replaced: leave it."
            )
        self._collected.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._collected = self._collected, []
        labelled = [self._has_labels(batch) for batch in batches]
        lost = False

        def closure() -> list[Tensor]:
            nonlocal lost
            found = self._losses(model, batches, num_items_in_batch)
            for place, loss in enumerate(found):
                if not labelled[place] and loss.isnan():
                    lost, found[place] = True, torch.zeros_like(loss)
            return found

        with self._collecting_for_training():
            losses = optimizer.evaluate(closure, sums=self._is_scaled(num_items_in_batch))
        return (torch.full_like(losses, torch.nan) if lost else losses).to(self.args.device)

    def _has_labels(self, batch: Any) -> bool:
        """Whether any label of ``batch`` counts, or it has none that are known here."""
        labels = batch.get("shift_labels", batch.get("labels")) if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return True
        if "shift_labels" not in batch and getattr(self, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
        return bool((labels != -100).any())

    @contextlib.contextmanager
    def _collecting_for_training(self) -> Iterator[None]:
        """TRL's trainers collect what they log by the mode of the model, and both losses are computed in eval mode."""
        collected = getattr(self, "_metrics", {})
        if not (isinstance(collected, dict) and collected.keys() >= {"train", "eval"}):
            yield
            return
        of_evaluation, collected["eval"] = collected["eval"], collected["train"]
        try:
            yield
        finally:
            collected["eval"] = of_evaluation

    def _losses(self, model: nn.Module, batches: list[Any], num_items_in_batch: Tensor | int | None) -> list[Tensor]:
        losses: list[Any] = []
        for batch in batches:
            with self.compute_loss_context_manager():
                inputs = copy.copy(batch)  # labels may be taken out
                losses.append(self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch))
        return losses

    def _is_scaled(self, num_items_in_batch: Tensor | int | None) -> bool:
        """Whether the losses of micro-batches are parts of their sum."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)  # from transformers 5.19 on
        if scaled is None:
            by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = by_model or self.compute_loss_func is not None
        return bool(scaled)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return None  # there are no gradients
