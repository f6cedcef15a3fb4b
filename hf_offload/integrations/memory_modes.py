"""Memory modes in the Trainer: training arguments with a ``memory_mode`` change its model and its optimizer, as the last of
what its constructor does.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_offload.errors import OffloadConfigError
from hf_offload.generators import process_states, set_process_states
from hf_offload.integrations.checkpoints import checkpoint_folder
from hf_offload.integrations.two_losses import train_without_gradients
from hf_offload.methods.applied import check_settings
from hf_offload.methods.protocol import MemoryMode
from hf_offload.settings.load import collect_errors
from hf_offload.settings.schema import OffloadConfig
from hf_offload.surgery import extend


def apply_memory_mode(trainer: Trainer, mode: MemoryMode, config: OffloadConfig) -> None:
    """Let ``trainer``, whose constructor ends, train as ``mode`` does, that of ``config``. Not twice.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for settings that exclude the mode, and for a model that does.
    """
    if any(isinstance(one, MemoryModeCallback) for one in trainer.callback_handler.callbacks):
        return
    _refuse_twice(trainer, config)
    check_arguments(mode, config, trainer.args)  # which may have changed since they were made
    made: Any = trainer
    if made.model_init is not None:
        made.model_init = _Prepared(mode, made.model_init)
    made.model = made.model_wrapped = made.callback_handler.model = _prepared(mode, made.model)
    callback = MemoryModeCallback(mode)
    trainer.add_callback(callback)
    callback.join(trainer)


def check_arguments(mode: MemoryMode, config: OffloadConfig, args: TrainingArguments) -> None:
    """Refuse settings and training arguments that exclude ``mode``, that of ``config``.

    Raises :class:`~hf_offload.errors.OffloadConfigError` that lists all errors, before any weight is touched.
    """
    name = config.memory_mode
    with collect_errors("training arguments with a memory mode") as check:
        with check:
            check_settings(mode, config)
        with check:
            optim = _optim(args)
            if not optim.startswith("adamw_torch"):
                raise OffloadConfigError(
                    f"optim={optim!r} and memory_mode={name!r} both choose the optimizer: drop one of them."
                )
        with check:
            if args.deepspeed:
                raise OffloadConfigError(
                    f"memory_mode={name!r} has an optimizer of its own, and DeepSpeed brings its own, too: drop one."
                )
        for problem in mode.conflicts(args):
            with check:
                raise OffloadConfigError(problem)


class MemoryModeCallback(TrainerCallback):
    """What a mode does while a training runs."""

    def __init__(self, mode: MemoryMode):
        self._mode = mode
        self._made: Any = None
        self._end: Callable[[], None] | None = None

    def join(self, trainer: Trainer) -> None:
        """Let ``trainer``, which has this callback and the model of the mode, train as the mode does."""
        made: Any = trainer
        made.optimizer_cls_and_kwargs = self._optimizer_factory, {"args": trainer.args}
        if not self._mode.uses_gradients:
            train_without_gradients(trainer)
        elif self._mode.updates_in_backward():
            extend(trainer, None, _LogsNoGradientNorm)

    def _optimizer_factory(self) -> Callable[..., Any]:
        return self._make_optimizer

    def _make_optimizer(self, model: nn.Module, args: TrainingArguments) -> Any:
        kernel = {"fused": True} if self._mode.takes_fused and _optim(args) == "adamw_torch_fused" else {}
        self._made = self._mode.optimizer(
            model,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
            **kernel,
        )
        return self._made

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self._end_training()  # of one that raised
        while optimizer is not self._made and hasattr(optimizer, "optimizer"):  # a wrapper, such as accelerate's
            optimizer = optimizer.optimizer
        if optimizer is not self._made or optimizer is None:
            raise OffloadConfigError(
                f"memory_mode={getattr(args, 'memory_mode', type(self._mode).__name__)!r} chooses the optimizer, but the "
                f"Trainer trains with another one ({type(optimizer).__name__}): drop memory_mode, or what makes that "
                "optimizer, such as a create_optimizer of the Trainer's class."
            )
        self._end = self._mode.begin_training(optimizer)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero and self._made is not None:
            self._mode.save_beside(self._made, checkpoint_folder(args, state))

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        self._end_training()

    def _end_training(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None


class _LogsNoGradientNorm(Trainer):
    """For updates in backward: by the time of the log the gradients are gone, and the norm of none is 0."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return None


class _Prepared:
    """A ``model_init`` whose models are prepared."""

    def __init__(self, mode: MemoryMode, model_init: Any):
        self._mode = mode
        self._model_init = model_init
        functools.update_wrapper(self, model_init)  # the Trainer looks at its parameters

    def __call__(self, *args: Any) -> nn.Module:
        return _prepared(self._mode, self._model_init(*args))


def _prepared(mode: MemoryMode, model: nn.Module) -> nn.Module:
    """``model`` as ``mode`` trains it. What is drawn later, such as the order of the data, is that of a run without it."""
    states = process_states()
    try:
        return mode.prepare(model)
    finally:
        set_process_states(states)


def _optim(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


def _refuse_twice(trainer: Trainer, config: OffloadConfig) -> None:
    if trainer.optimizer is not None:
        raise OffloadConfigError(
            f"The Trainer was given an optimizer, and memory_mode={config.memory_mode!r} chooses one: drop one of them."
        )
    if trainer.optimizer_cls_and_kwargs is not None:
        raise OffloadConfigError(
            f"The Trainer was given optimizer_cls_and_kwargs, and memory_mode={config.memory_mode!r} chooses the optimizer: "
            "drop one."
        )
