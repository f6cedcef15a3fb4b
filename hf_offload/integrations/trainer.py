"""The Trainer's callback: attaches at the start of training, reports through the Trainer's log, detaches at the end."""

import logging
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.training_args import ParallelMode

from hf_offload.engine.stats import OffloadStats
from hf_offload.errors import OffloadConfigError
from hf_offload.integrations.checkpoints import checkpoint_folder
from hf_offload.integrations.extended_trainer import calling_trainer, extend_calling_trainer, snapshots_of_training
from hf_offload.integrations.memory_modes import MemoryModeCallback, apply_memory_mode
from hf_offload.integrations.streamed import (
    ClipsStreamedGradients,
    has_own_state,
    own_resident_state,
    refuse_own_state,
    stream_prepared,
    unwrapped,
)
from hf_offload.integrations.summary import card_lines, has_summary, log_entries, show_summary, summary_lines
from hf_offload.methods.protocol import conflicts_with_update_in_backward
from hf_offload.planning.shape_plan import Prediction
from hf_offload.session import OffloadSession, attach
from hf_offload.settings.load import refuse
from hf_offload.settings.memory_modes import NONE
from hf_offload.settings.schema import OffloadConfig, with_checked
from hf_offload.surgery import extend
from hf_offload.transforms.sampling.gradient_cache import CACHE_FILE

logger = logging.getLogger(__name__)


class OffloadCallback(TrainerCallback):
    """Offload a Trainer's activations: ``Trainer(..., callbacks=[OffloadCallback(OffloadConfig(tier="ssd"))])``.

    Without a config, it takes the settings of the training arguments (:class:`~hf_offload.OffloadArguments`), if they have
    any. ``stats`` holds the counters, also after training has ended; ``forecast`` the prediction and measurements of the plan
    for a budget; ``summary`` has both as text, and is a section of the model card that the Trainer writes.
    """

    def __init__(self, config: OffloadConfig | None = None):
        self.config = config
        self.session: OffloadSession | None = None
        self.stats: OffloadStats | None = None
        self.forecast: Prediction | None = None
        self.summary: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not attached: the session is that of the original's run."""
        return self.__dict__ | {"session": None}

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        config = self.config_for(args)
        mode = None if config is None else config.mode()
        if config is not None and config.without_mode().changes_a_run:
            extend_calling_trainer(self)
        trainer = calling_trainer(self)
        if config is not None and mode is not None and trainer is not None:
            apply_memory_mode(trainer, mode, config)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        # May be a second begin without an end between: auto_find_batch_size, or a training that raised.
        self._detach()
        config = self.config_for(args)
        if config is None or not config.changes_a_run or model is None:
            return
        trainer = extend_calling_trainer(self)  # for a callback that was added after the constructor
        config = _for_prepared(config, trainer)
        if not config.changes_a_run:
            return
        refuse_conflicts(args)
        if config.update_in_backward:
            refuse("training arguments", conflicts_with_update_in_backward(args))
        config = _without_twice(config, args)
        _refuse_data_parallel(args)
        if trainer is not None:
            refuse_own_state(trainer.accelerator, config)
        steps, config = (
            config.snapshot_steps,
            with_checked(config, snapshot_steps=None, snapshot_dir=None, snapshot_parity=0),
        )
        self.session = attach(model, config, run_id=state, owner="the Trainer's OffloadCallback")
        self.stats = self.session.stats
        self.summary = []
        own = trainer is not None and has_own_state(trainer.accelerator)
        if config.optimizer not in (None, "none") or (config.state_place == "auto" and not own):
            self._stream_optimizer(args, optimizer, trainer)
        else:
            self.session.watch_optimizer(unwrapped(optimizer))
        if self.session.active:
            logger.info("Offloading activations: %s.", self.session.plan.reason)
        if steps is not None:
            self._begin_snapshots(trainer)
        cache = self.session.carry_sample_ids(train_dataloader)
        if cache is not None and state.global_step:
            cache.load(checkpoint_folder(args, state) / CACHE_FILE)

    def _begin_snapshots(self, trainer: Trainer | None) -> None:
        snapshots = None if trainer is None else snapshots_of_training(trainer)
        if snapshots is None:
            raise OffloadConfigError(
                "snapshot_steps needs the callback before training begins: pass it to the Trainer's constructor, or use "
                "OffloadTrainingArguments."
            )
        snapshots.begin()

    def _stream_optimizer(self, args: TrainingArguments, optimizer: Any, trainer: Trainer | None) -> None:
        assert self.session is not None
        if trainer is not None and not isinstance(trainer.accelerator, ClipsStreamedGradients):
            extend(trainer.accelerator, ClipsStreamedGradients)
        try:
            stream_prepared(self.session, optimizer)
        except OffloadConfigError as error:
            mode = getattr(self.config_for(args), "memory_mode", NONE)  # which the session does not know
            if mode == NONE:
                raise
            raise OffloadConfigError(f"memory_mode={mode!r}: {error}") from error
        self.session.defer_updates()
        own_resident_state(optimizer)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.session is None:
            return
        self.session.end_step()
        if self.session.must_stop:
            control.should_training_stop = control.should_save = True
            if state.is_world_process_zero:
                logger.warning(
                    "offload_max_disk_write_bytes was reached in step %d: the model is saved and training ends.",
                    state.global_step,
                )

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.session is not None and self.session.gradient_cache is not None:
            self.session.gradient_cache.share()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.session is not None and self.session.gradient_cache is not None:
            self.session.gradient_cache.share()
            if state.is_world_process_zero:
                self.session.gradient_cache.save(checkpoint_folder(args, state) / CACHE_FILE)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.session is None or not self.session.active or not logs or "loss" not in logs:
            return
        steps = self.session.stats.steps
        if not steps:
            return
        values = log_entries(steps[-1], self.session.stats)
        logs.update(values)  # for the callbacks behind this one
        if state.log_history:
            state.log_history[-1].update(values)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.session is not None and has_summary(self.session):
            # After an interruption the other processes may not come here.
            finished = control.should_training_stop or state.global_step >= state.max_steps
            lines = summary_lines(self.session, together=finished)
            self.summary = card_lines(self.session, lines)
            if state.is_world_process_zero:
                show_summary(lines, logger)
        self._detach()

    def config_for(self, args: TrainingArguments) -> OffloadConfig | None:
        """The settings of a training with these arguments, if it has any."""
        from_arguments = getattr(args, "offload_config", None)
        if self.config is not None or from_arguments is None:
            return self.config
        config: OffloadConfig = from_arguments()
        return config

    def _detach(self) -> None:
        if self.session is not None:
            self.forecast = self.session.forecast
            self.session.detach()
            self.session = None


def _for_prepared(config: OffloadConfig, trainer: Trainer | None) -> OffloadConfig:
    """``config`` for a model that the Trainer was made with."""
    mode = config.mode()
    if mode is not None and not any(isinstance(one, MemoryModeCallback) for one in _callbacks_of(trainer)):
        raise OffloadConfigError(
            f"memory_mode={config.memory_mode!r} changes the model and the optimizer as the Trainer is made: give the "
            "callback to the Trainer's constructor, or set it in OffloadTrainingArguments."
        )
    if mode is None or mode.uses_gradients or config.params in (None, "none"):
        return config.without_mode()
    return config  # of which weights may leave memory in several processes, too: they exchange no gradients


def _callbacks_of(trainer: Trainer | None) -> list[TrainerCallback]:
    return [] if trainer is None else trainer.callback_handler.callbacks


def refuse_conflicts(args: TrainingArguments) -> None:
    """Refuse arguments that offload the same tensors themselves.

    Raises :class:`~hf_offload.errors.OffloadConfigError` that lists them all.
    """
    problems = []
    if getattr(args, "activation_offloading", False):
        problems.append(
            "activation_offloading=True (TRL) and hf_offload would both move the same tensors: set "
            "activation_offloading=False, or drop the offload argument."
        )
    problems += [
        f"{name}={{'offload': True}} (transformers) and hf_offload would both move the layers' inputs: drop one. "
        "Activation checkpointing together with hf_offload offloads them, too."
        for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
        if (getattr(args, name, None) or {}).get("offload")
    ]
    if problems:
        raise OffloadConfigError("\n".join(problems))


def _without_twice(config: OffloadConfig, args: TrainingArguments) -> OffloadConfig:
    """Liger's kernel computes head and loss together already."""
    if config.tiled_loss == "off" or not getattr(args, "use_liger_kernel", False):
        return config
    if config.tiled_loss == "on":
        raise OffloadConfigError(
            "use_liger_kernel=True and tiled_loss='on' both compute output head and loss in pieces: drop one, or set "
            "tiled_loss='auto', which leaves them to Liger."
        )
    logger.info("Liger's fused kernel computes the output head and the loss.")
    tile_bytes = config.tile_bytes if config.tiled_mlp != "off" else None
    return with_checked(config, tiled_loss="off", tile_bytes=tile_bytes)


def _refuse_data_parallel(args: TrainingArguments) -> None:
    # Only now: a Trainer with a model that is spread over the GPUs has set n_gpu to 1 by itself.
    if args.parallel_mode == ParallelMode.NOT_DISTRIBUTED and args.n_gpu > 1:
        raise OffloadConfigError(
            f"{args.n_gpu} GPUs are visible to one process, so the Trainer would use nn.DataParallel, which cannot be "
            "offloaded: start with `accelerate launch --multi_gpu train.py`, or set CUDA_VISIBLE_DEVICES to one GPU."
        )
