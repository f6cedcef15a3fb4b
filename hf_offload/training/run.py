"""From a recipe to a trained model and a report of the run."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_offload.allocator import current_allocator
from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.settings.recipe_data import HubData
from hf_offload.settings.recipes import RANDOM_TOKENS, Recipe
from hf_offload.settings.shown import LONGEST, cropped
from hf_offload.settings.text_files import reason_of
from hf_offload.tensors import parameter_count
from hf_offload.training.arguments import build_arguments
from hf_offload.training.metrics import FROM_LOSS, check_installed, choose_likeliest, make_compute
from hf_offload.training.model import build_model, build_tokenizer
from hf_offload.training.places import check_places, nothing_to_resume
from hf_offload.training.prepare import Prepared, RandomTokens, prepare_data
from hf_offload.training.report import TrainingReport, describe_machine, describe_versions, parameter_digest
from hf_offload.training.tasks.text import collate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments

    from hf_offload.integrations.trainer import OffloadCallback
    from hf_offload.training.memory import MemoryMeter
    from hf_offload.training.recording import Recording

logger = logging.getLogger(__name__)

AroundStep = Callable[[torch.nn.Module], contextlib.AbstractContextManager[Any]]
"""Called once with the model on its device; what it returns is entered for forward and backward of every micro-batch."""


def run_recipe(
    recipe: Recipe,
    *,
    report: Path | None = None,
    measure: bool = False,
    resume: bool = False,
    save: bool = True,
    evaluate: bool = True,
    around_step: AroundStep | None = None,
    callbacks: "Sequence[TrainerCallback]" = (),
) -> TrainingReport:
    """Train what ``recipe`` describes, evaluate it on ``data.validation``, and save it with its tokenizer.

    Ctrl-C ends the training, not the function: the report then has ``completed=False`` and what was done until then, and
    what is saved are the checkpoints.

    Args:
        recipe: Of :func:`~hf_offload.settings.recipes.load_recipe`.
        report: Measure, and write everything to this JSON file. That it can be written is checked first.
        measure: Measure memory and step times.
        resume: Go on from the last checkpoint in ``recipe.output_dir``.
        save: Whether checkpoints and the model are saved in ``recipe.output_dir``. A model that was trained on random tokens
            never is.
        evaluate: Whether there are evaluations, on the way and at the end. The rows that are trained on are the same without.
        around_step: Entered around each step.
        callbacks: For the Trainer.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for what the recipe asks for and cannot have.
    """
    from transformers import set_seed

    from hf_offload.integrations.trainer import OffloadCallback  # loads the Trainer
    from hf_offload.training.memory import MemoryMeter
    from hf_offload.training.recording import Recording

    check_places(recipe, report=report, save=save, resume=resume)
    arguments = build_arguments(recipe)
    if not save:
        arguments.save_strategy = "no"
    if not evaluate:
        arguments.eval_strategy, arguments.eval_on_start = "no", False
    has_metrics = evaluate and recipe.data.validation is not None
    check_installed(recipe.evaluation.metrics_for(recipe.model.task) if has_metrics else ())
    checkpoint = _last_checkpoint(recipe) if resume else None
    set_seed(arguments.seed)
    tokenizer, prepared = None, None
    if recipe.data.source != RANDOM_TOKENS:
        tokenizer = build_tokenizer(recipe.data, recipe.model.name, recipe.cache_dir)
        prepared = prepare_data(recipe, tokenizer, recipe.cache_dir)
        if not evaluate:  # only now: a share that is held back is neither trained on nor seen by a trained tokenizer
            prepared = dataclasses.replace(prepared, validation=None)
    # Again, so that weights and dropout do not depend on whether the tokenizer had to be trained first.
    set_seed(arguments.seed)
    model = build_model(recipe, tokenizer, arguments.device, None if prepared is None else prepared.setup.labels)
    recording, offloading = Recording(), OffloadCallback(recipe.offload)
    with _beginning(recipe, recording):
        trainer = _build_trainer(recipe, model, arguments, tokenizer, prepared, recording, [offloading, *callbacks])
    _ahead_of_reporters(trainer, offloading)
    if around_step is not None:
        recording.around = around_step(model)
    meter = MemoryMeter() if measure or report is not None else None
    if meter is not None:
        meter.install(trainer)
    completed = True
    try:
        with _beginning(recipe, recording) if checkpoint is None else contextlib.nullcontext():
            trainer.train(resume_from_checkpoint=checkpoint)
    except Exception as error:
        if checkpoint is None or recording.step_losses or isinstance(error, OffloadError):
            raise
        raise OffloadConfigError(
            f"{checkpoint} cannot be resumed with this recipe ({type(error).__name__}: {cropped(str(error))}): it is of "
            "another model or optimizer, or damaged. Resume with the recipe that wrote it, or train without --resume."
        ) from error
    except KeyboardInterrupt:
        completed = False
        logger.warning(f"Stopped after {len(recording.step_losses)} steps.")
        # The Trainer leaves this out when training does not come to its end: offloading is still attached.
        offloading.on_train_end(arguments, trainer.state, trainer.control, model=trainer.model)
    finally:
        if meter is not None:
            meter.stop()
    if completed and trainer.state.global_step == 0:
        raise OffloadConfigError(
            f"{recipe.name}: no step was trained, since the data made no batch: is every text of it empty? Nothing is saved."
        )
    metrics = _evaluate(trainer) if completed and prepared is not None and prepared.validation is not None else None
    if completed and save and prepared is not None:
        trainer.save_model()
        _write_card(recipe, trainer)
        logger.info(f"Saved in {recipe.output_dir}.")
    result = _describe(recipe, trainer, model, recording, offloading, meter, completed=completed, metrics=metrics)
    if report is not None:
        result.write(report)
    return result


@contextlib.contextmanager
def _beginning(recipe: Recipe, recording: "Recording") -> Iterator[None]:
    """What the Trainer raises before its first micro-batch is about the settings it was given."""
    try:
        yield
    except OffloadError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        if recording.begun:
            raise
        raise OffloadConfigError(
            f"{recipe.name}: the training cannot begin with this section training: {reason_of(error, 2 * LONGEST)}"
        ) from error


def _build_trainer(
    recipe: Recipe,
    model: torch.nn.Module,
    arguments: "TrainingArguments",
    tokenizer: "PreTrainedTokenizerBase | None",
    prepared: Prepared | None,
    recording: "Recording",
    callbacks: "Sequence[TrainerCallback]",
) -> "Trainer":
    from transformers import EarlyStoppingCallback

    from hf_offload.integrations.memory_modes import MemoryModeCallback
    from hf_offload.training.recording import RecordingSeq2SeqTrainer, RecordingTrainer

    seq2seq = prepared is not None and prepared.task.seq2seq
    own: list[TrainerCallback] = [recording]
    evaluates = prepared is not None and prepared.validation is not None
    if evaluates and recipe.evaluation.early_stopping_patience is not None:
        own.append(EarlyStoppingCallback(recipe.evaluation.early_stopping_patience))
    options: dict[str, Any] = {}
    if prepared is None:
        options |= {"train_dataset": _random_tokens(recipe, model, arguments), "data_collator": collate}
    else:
        if prepared.task.check_model is not None:
            prepared.task.check_model(prepared.setup, model)
        options |= {
            "train_dataset": prepared.train,
            "eval_dataset": prepared.validation,
            "data_collator": prepared.task.collator(prepared.setup, model),
        }
        task = recipe.model.task
        compute = make_compute(recipe.evaluation.metrics_for(task), task, prepared.setup.tokenizer)
        if prepared.validation is not None and compute is not None:
            options["compute_metrics"] = compute
            options["preprocess_logits_for_metrics"] = None if seq2seq else choose_likeliest
    mode = recipe.offload.mode()
    if mode is not None:
        model = mode.prepare(model)
        own.append(of_mode := MemoryModeCallback(mode))
    make = RecordingSeq2SeqTrainer if seq2seq else RecordingTrainer
    trainer = make(
        recording=recording,
        with_perplexity=FROM_LOSS in recipe.evaluation.metrics_for(recipe.model.task),
        model=model,
        args=arguments,
        processing_class=tokenizer,
        callbacks=[*own, *callbacks],
        **options,
    )
    if mode is not None:
        of_mode.join(trainer)
    return trainer


def _evaluate(trainer: "Trainer") -> dict[str, float]:
    """The metrics on the validation rows, without the time they took."""
    found = trainer.evaluate()
    return {name: value for name, value in found.items() if name != "epoch" and not name.endswith(_OF_TIME)}


_OF_TIME = ("_runtime", "_per_second", "_preparation_time")


def _write_card(recipe: Recipe, trainer: "Trainer") -> None:
    """The Trainer's own model card, which has a section on memory where the training was offloaded."""
    hub = recipe.data.hub
    dataset = str(hub.name) if isinstance(hub, HubData) else recipe.data.source or "files"
    # A folder, or the card would say that random weights were those of a model on the Hub.
    if recipe.model.name is None:
        trained: Any = trainer.model
        trained.config._name_or_path = trainer.args.output_dir
    trainer.create_model_card(model_name=recipe.name, tags=["hf_offload"], dataset=dataset)


def _last_checkpoint(recipe: Recipe) -> str:
    from hf_offload.integrations.checkpoints import last_complete_checkpoint

    folder = recipe.output_dir
    found = last_complete_checkpoint(folder) if folder.is_dir() else None
    if found is None:
        raise nothing_to_resume(folder)
    return found


def _describe(
    recipe: Recipe,
    trainer: "Trainer",
    model: torch.nn.Module,
    recording: "Recording",
    offloading: "OffloadCallback",
    meter: "MemoryMeter | None",
    *,
    completed: bool,
    metrics: dict[str, float] | None,
) -> TrainingReport:
    losses = recording.losses()
    stats = offloading.stats
    return TrainingReport(
        recipe=recipe.name,
        settings=_plain(recipe),
        completed=completed,
        steps=len(losses),
        losses=losses,
        losses_hex=[loss.hex() for loss in losses],
        parameters_sha256=parameter_digest(model),
        parameter_count=parameter_count(model),
        step_times_s=meter.step_times_s if meter is not None else [],
        memory=dataclasses.asdict(meter.record) if meter is not None and meter.record is not None else None,
        offload=stats.total.as_dict() if stats is not None else None,
        allocator=current_allocator(),
        machine=describe_machine(trainer.args.device),
        versions=describe_versions(),
        forecast=None if offloading.forecast is None else dataclasses.asdict(offloading.forecast),
        metrics=metrics,
    )


def _ahead_of_reporters(trainer: "Trainer", callback: "OffloadCallback") -> None:
    """Reporters then see what ``callback`` adds to the log; the Trainer puts the callbacks it is given behind them."""
    callbacks = trainer.callback_handler.callbacks
    callbacks.remove(callback)
    callbacks.insert(0, callback)


def _random_tokens(recipe: Recipe, model: torch.nn.Module, arguments: "TrainingArguments") -> RandomTokens:
    """As many rows as the run has room for, so that it is one epoch."""
    per_step = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]  # every model of transformers has it
    vocabulary = embeddings.weight.shape[0]
    length = recipe.data.sequence_length
    return RandomTokens(arguments.max_steps * per_step, length, vocabulary, arguments.seed, recipe.model.task)


def _plain(value: Any) -> Any:
    """Nested dataclasses, mappings, tuples and paths as what JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
