"""The training arguments that a recipe stands for."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.evaluation import LOSS, METRICS, Generation
from hf_offload.settings.load import choose
from hf_offload.settings.recipes import Recipe
from hf_offload.settings.shown import LONGEST, cropped
from hf_offload.training.metrics import needs_generation
from hf_offload.training.tasks.pairs import target_length

if TYPE_CHECKING:
    from transformers import TrainingArguments

_PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def build_arguments(recipe: Recipe) -> "TrainingArguments":
    """The recipe's ``TrainingArguments``, for seq2seq-lm the Seq2Seq ones; what these refuse, and what offloading and the
    memory mode refuse of them, is a configuration error.
    """
    from transformers import Seq2SeqTrainingArguments, TrainingArguments

    from hf_offload.integrations.memory_modes import check_arguments
    from hf_offload.integrations.trainer import refuse_conflicts

    values: dict[str, Any] = {
        "output_dir": str(recipe.output_dir),
        "report_to": "none",
        # Pinning without an accelerator only warns.
        "dataloader_pin_memory": torch.accelerator.is_available(),
        # Of models in wrappers, such as adapters, the Trainer would not find out.
        "label_names": ["labels"],
        # Looking for some makes DDP hand the logits a gradient, which those of a tiled loss cannot take. There are none: what
        # a recipe does not train is frozen.
        "ddp_find_unused_parameters": False,
        **recipe.training,
        **_evaluation_arguments(recipe),
    }
    try:
        make = Seq2SeqTrainingArguments if recipe.model.task == "seq2seq-lm" else TrainingArguments
        with _own_precision():
            arguments = make(**_with_present_names(values, make))
    except Exception as error:  # whatever TrainingArguments raises for values it cannot take
        raise OffloadConfigError(f"{recipe.name}, section training: {cropped(str(error), 2 * LONGEST)}") from error
    _check_reporters(arguments)
    if recipe.offload.changes_a_run:
        refuse_conflicts(arguments)
    mode = recipe.offload.mode()
    if mode is not None:
        check_arguments(mode, recipe.offload, arguments)
    return arguments


def _with_present_names(values: dict[str, Any], make: type["TrainingArguments"]) -> dict[str, Any]:
    """Transformers 5.23 renamed ``gradient_checkpointing`` and warns about that name, which recipes have for the sake of
    versions before it. Where both are given, the new one counts, as it does there.
    """
    values = dict(values)
    for end in ("checkpointing", "checkpointing_kwargs"):
        new = f"activation_{end}"
        if hasattr(make, new) and f"gradient_{end}" in values:
            former = values.pop(f"gradient_{end}")
            values[new] = former if values.get(new) is None else values[new]
    return values


def _check_reporters(arguments: "TrainingArguments") -> None:
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    installed = get_available_reporting_integrations()
    for name in arguments.report_to or ():
        choose("training.report_to", name, ("none", *INTEGRATION_TO_CALLBACK))
        if name not in ("none", *installed, "flyte", "hf_offload"):  # which are not looked for
            raise OffloadConfigError(f"training.report_to: {name} is not installed: install it, or set none.")


@contextlib.contextmanager
def _own_precision() -> Iterator[None]:
    """A recipe that says neither ``fp16`` nor ``bf16`` is trained in the dtype of its weights, as it was planned. Arguments
    that say neither take what the config file of the launcher says.
    """
    launched = os.environ.pop(_PRECISION_VARIABLE, None)
    try:
        yield
    finally:
        if launched is not None:
            os.environ[_PRECISION_VARIABLE] = launched


def _evaluation_arguments(recipe: Recipe) -> dict[str, Any]:
    values: dict[str, Any] = {}
    best = recipe.training.get("metric_for_best_model")
    if best is not None and recipe.training.get("greater_is_better") is None:
        name = str(best).removeprefix("eval_")
        values["greater_is_better"] = name != LOSS and METRICS[name].greater_is_better
    if needs_generation(recipe.evaluation.metrics_for(recipe.model.task)) and recipe.model.task == "seq2seq-lm":
        generation = recipe.evaluation.generation
        asked = generation if isinstance(generation, Generation) else Generation()
        values |= {
            "predict_with_generate": True,
            # The decoder's first token, with which it starts, is counted too.
            "generation_max_length": 1 + (asked.max_new_tokens or target_length(recipe.data)),
            "generation_num_beams": asked.num_beams,
        }
    return values
