"""From a recipe to a trained model and a report of the run."""

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from hf_offload.allocator import current_allocator
from hf_offload.errors import OffloadConfigError
from hf_offload.settings.recipes import RANDOM_TOKENS, Recipe
from hf_offload.settings.schema import SIZES, OffloadConfig
from hf_offload.training.data import RandomTokens, build_tokenizer, collate, load_blocks
from hf_offload.training.report import TrainingReport, describe_machine, describe_versions, parameter_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

logger = logging.getLogger(__name__)

AroundStep = Callable[[torch.nn.Module], contextlib.AbstractContextManager[Any]]
"""Called once with the model on its device; what it returns is entered for forward and backward of every micro-batch."""


def run_recipe(
    recipe: Recipe,
    *,
    report: Path | None = None,
    measure: bool = False,
    around_step: AroundStep | None = None,
    callbacks: "Sequence[TrainerCallback]" = (),
) -> TrainingReport:
    """Train what ``recipe`` describes; with ``measure``, measure memory and step times too; with ``report``, measure and
    write everything to that JSON file.

    Ctrl-C ends the training, not the function: the report then has ``completed=False`` and what was done until then.
    """
    from transformers import Trainer, TrainerCallback, set_seed

    from hf_offload import OffloadCallback
    from hf_offload.reports.memory import MemoryMeter

    class RecordingTrainer(Trainer):
        """Keeps each micro-batch's loss as it is, because the Trainer's log holds means over steps."""

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            with around:
                loss = super().training_step(*args, **kwargs)
            micro_losses.append(loss.detach())
            return loss

    class StepLosses(TrainerCallback):
        """Closes a step's losses."""

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            step_losses.append(list(micro_losses))
            micro_losses.clear()

    micro_losses: list[torch.Tensor] = []
    step_losses: list[list[torch.Tensor]] = []

    arguments = build_arguments(recipe)
    set_seed(arguments.seed)
    tokenizer, blocks = None, None
    if recipe.data.source != RANDOM_TOKENS:
        tokenizer = build_tokenizer(recipe.data, recipe.model.name, recipe.cache_dir)
        blocks = load_blocks(recipe.data, tokenizer, recipe.cache_dir)
    # Again, so that weights and dropout do not depend on whether the tokenizer had to be trained first.
    set_seed(arguments.seed)
    model = build_model(recipe, tokenizer, arguments.device)
    trainer = RecordingTrainer(
        model=model,
        args=arguments,
        train_dataset=_random_tokens(recipe, model, arguments) if blocks is None else blocks,
        data_collator=collate,
        processing_class=tokenizer,
        callbacks=[StepLosses(), *callbacks],
    )
    around = contextlib.nullcontext() if around_step is None else around_step(model)
    meter = MemoryMeter() if measure or report is not None else None
    if meter is not None:
        meter.install(trainer)
    completed = True
    try:
        trainer.train()
    except KeyboardInterrupt:
        completed = False
        logger.warning(f"Stopped after {len(step_losses)} steps.")
        # The Trainer leaves this out when training does not come to its end: offloading is still attached.
        trainer.callback_handler.on_train_end(arguments, trainer.state, trainer.control)
    finally:
        if meter is not None:
            meter.stop()

    losses = [float(sum(loss.double().item() for loss in micro)) for micro in step_losses]
    callback = next((cb for cb in trainer.callback_handler.callbacks if isinstance(cb, OffloadCallback)), None)
    stats = callback.stats if callback is not None else None
    result = TrainingReport(
        recipe=recipe.name,
        settings=_plain(recipe),
        completed=completed,
        steps=len(losses),
        losses=losses,
        losses_hex=[loss.hex() for loss in losses],
        parameters_sha256=parameter_digest(model),
        parameter_count=sum(parameter.numel() for parameter in model.parameters()),
        step_times_s=meter.step_times_s if meter is not None else [],
        memory=dataclasses.asdict(meter.record) if meter is not None and meter.record is not None else None,
        offload=stats.total.as_dict() if stats is not None else None,
        allocator=current_allocator(),
        machine=describe_machine(),
        versions=describe_versions(),
        forecast=None if callback is None or callback.forecast is None else dataclasses.asdict(callback.forecast),
    )
    if report is not None:
        result.write(report)
    return result


def build_arguments(recipe: Recipe) -> "TrainingArguments":
    """The recipe's ``OffloadTrainingArguments``; what these refuse is a configuration error."""
    from hf_offload import OffloadTrainingArguments

    values: dict[str, Any] = {
        "output_dir": str(recipe.output_dir),
        "report_to": "none",
        # Pinning without an accelerator only warns.
        "dataloader_pin_memory": torch.accelerator.is_available(),
        **recipe.training,
        **_offload_arguments(recipe.offload),
    }
    if recipe.memory:
        settings = {key: value for key, value in recipe.memory.items() if key != "mode"}
        values |= {"memory_mode": recipe.memory.get("mode", "none"), "memory_mode_kwargs": settings or None}
    try:
        arguments = OffloadTrainingArguments(**values)
    except (TypeError, ValueError, ImportError) as error:
        if isinstance(error, OffloadConfigError):
            raise
        raise OffloadConfigError(f"{recipe.name}, section training: {error}") from error
    if arguments.offload_config() != recipe.offload:
        raise OffloadConfigError(
            f"{recipe.name}, section offload: {recipe.offload} does not fit into training arguments, which make it "
            f"{arguments.offload_config()}. A directory's name must not hold a comma or begin or end with a space."
        )
    return arguments


def _offload_arguments(offload: OffloadConfig) -> dict[str, Any]:
    """The flat training arguments that stand for ``offload``."""
    names = {
        "tier": "offload",
        "directory": "offload_dir",
        "min_offload_bytes": "offload_min_bytes",
        "read_ahead_bytes": "offload_read_ahead",
        "max_disk_write_bytes": "offload_max_disk_write",
        "disk_rated_bytes": "offload_disk_rated",
        # these are no offloading
        "tiled_loss": "tiled_loss",
        "tiled_mlp": "tiled_mlp",
        "tile_bytes": "tile_bytes",
        "sampled_linear": "sampled_linear",
        "lean_activations": "lean_activations",
    }
    values = {field.name: getattr(offload, field.name) for field in dataclasses.fields(offload)}
    values["directory"] = ",".join(str(path) for path in offload.directories) or None
    if not isinstance(offload.tiled_mlp, str):
        values["tiled_mlp"] = ",".join(offload.tiled_mlp)
    if offload.sampling is not None:
        values["sampled_linear"] = json.dumps(dataclasses.asdict(offload.sampling))
    if offload.lean is not None:
        values["lean_activations"] = str(offload.lean)
    for name in SIZES:
        values[name] = None if values[name] is None else str(values[name])
    return {names.get(name, f"offload_{name}"): value for name, value in values.items()}


def _random_tokens(recipe: Recipe, model: torch.nn.Module, arguments: "TrainingArguments") -> RandomTokens:
    """As many rows as the run has room for, so that it is one epoch."""
    per_step = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]  # every model of transformers has it
    vocabulary = embeddings.weight.shape[0]
    length = recipe.data.sequence_length
    return RandomTokens(arguments.max_steps * per_step, length, vocabulary, arguments.seed, recipe.model.task)


def build_model(
    recipe: Recipe, tokenizer: "PreTrainedTokenizerBase | None", device: torch.device | None = None
) -> torch.nn.Module:
    """The recipe's model, checked against the tokenizer and the length of a block.

    Random weights are drawn on ``device``, which for a large model takes an accelerator a moment and a CPU minutes.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    model = recipe.model
    auto: Any = {
        "causal-lm": AutoModelForCausalLM,
        "masked-lm": AutoModelForMaskedLM,
        "seq2seq-lm": AutoModelForSeq2SeqLM,
    }[model.task]
    options: dict[str, Any] = {"dtype": getattr(torch, model.dtype)}
    if model.attention is not None:
        options["attn_implementation"] = model.attention
    try:
        if model.name is not None:
            built = auto.from_pretrained(model.name, **options)
        else:
            config = AutoConfig.for_model(str(model.architecture), **_config_values(recipe, tokenizer))
            if model.task == "seq2seq-lm" and getattr(config, "decoder_start_token_id", None) is None:
                config.decoder_start_token_id = config.pad_token_id
            with torch.device(device) if device is not None and device.type != "cpu" else contextlib.nullcontext():
                built = auto.from_config(config, **options)
    except (OSError, TypeError, ValueError, ImportError) as error:
        raise OffloadConfigError(f"{recipe.name}, section model: {error}") from error
    rows = cast(torch.Tensor, built.get_input_embeddings().weight).shape[0]
    if tokenizer is not None and len(tokenizer) > rows:
        raise OffloadConfigError(
            f"The tokenizer has {len(tokenizer)} tokens, but the model has embeddings for {rows}: raise "
            "model.config.vocab_size or take the tokenizer that belongs to the model."
        )
    longest = getattr(built.config, "max_position_embeddings", None)
    if isinstance(longest, int) and recipe.data.sequence_length > longest:
        raise OffloadConfigError(
            f"data.sequence_length={recipe.data.sequence_length} is longer than the {longest} positions of the model."
        )
    return built


def _config_values(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, Any]:
    values = dict(recipe.model.config)
    if tokenizer is None:
        # The architecture's own may lie outside a smaller vocabulary.
        return {"bos_token_id": None, "eos_token_id": None, **values}
    values.setdefault("vocab_size", recipe.data.train_bpe or len(tokenizer))
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values.setdefault(token, getattr(tokenizer, token))
    return values


def _plain(value: Any) -> Any:
    """Nested dataclasses, mappings, tuples and paths as what JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
