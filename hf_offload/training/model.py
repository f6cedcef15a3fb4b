"""The model of a recipe."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.pretrained.errors import loading
from hf_offload.pretrained.load import create_from_config, from_pretrained
from hf_offload.settings.recipes import Recipe
from hf_offload.settings.schema import with_checked
from hf_offload.settings.shown import LONGEST
from hf_offload.settings.text_files import reason_of
from hf_offload.training.tasks.table import find_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_model(
    recipe: Recipe,
    tokenizer: "PreTrainedTokenizerBase | None",
    device: torch.device | None = None,
    labels: Sequence[str] | None = None,
) -> torch.nn.Module:
    """The recipe's model, with a class for each of ``labels``, checked against the tokenizer and the length of a block.

    Random weights are drawn on ``device``, which for a large model takes an accelerator a moment and a CPU minutes. With
    ``params``, weights are on their tier as soon as they are made.
    """
    import transformers

    model = recipe.model
    # The default decides once the optimizer is known.
    offload = with_checked(recipe.offload, params=recipe.offload.params or "none")
    auto: Any = getattr(transformers, find_task(recipe).auto_model)
    options: dict[str, Any] = {"dtype": getattr(torch, model.dtype)}
    if model.attention is not None:
        options["attn_implementation"] = model.attention
    classes: dict[str, Any] = {}
    if labels is not None:
        classes = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    if model.name is not None:
        if labels is not None:
            options |= {
                "num_labels": len(labels),
                "ignore_mismatched_sizes": True,
                **classes,
            }  # a head for other classes
        with loading(f"{recipe.name}, section model", model.name):
            built: Any = from_pretrained(auto, model.name, offload=offload, **options)
    else:
        try:
            values = _config_values(recipe, tokenizer) | classes
            config = transformers.AutoConfig.for_model(str(model.architecture), **values)
            if model.task == "seq2seq-lm" and getattr(config, "decoder_start_token_id", None) is None:
                config.decoder_start_token_id = config.pad_token_id
            with torch.device(device) if device is not None and device.type != "cpu" else contextlib.nullcontext():
                built = create_from_config(auto, config, config=offload, **options)
        except OffloadError:
            raise
        except Exception as error:  # whatever a model raises for a configuration that it cannot take
            raise OffloadConfigError(f"{recipe.name}, section model: {reason_of(error, 2 * LONGEST)}") from error
    if labels is not None and tokenizer is not None and getattr(built.config, "pad_token_id", None) is None:
        built.config.pad_token_id = tokenizer.pad_token_id  # decoders look at the last token that is none
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
