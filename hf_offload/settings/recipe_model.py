"""The section ``model`` of a recipe."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import check_text, choose, collect_errors, from_mapping, nearest
from hf_offload.settings.shapes import ModelShape

TASKS = {
    "causal-lm": "causal language model",
    "masked-lm": "masked language model",
    "seq2seq-lm": "sequence-to-sequence language model",
    "sequence-classification": "model for sequence classification",
}
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """Which model: ``name`` (a hub name or a folder), or random weights of an ``architecture`` with ``config``, or of a
    ``shape`` with ``config`` on top; ``architecture`` and ``config`` then say the whole.

    Args:
        name: Hub name or folder of a pretrained model.
        architecture: Model type of transformers, such as ``gpt2``, for a model from random weights.
        config: Fields of that architecture's configuration.
        task: ``causal-lm`` (text, or conversations where the data has columns for them), ``masked-lm``, ``seq2seq-lm``
            (translation, summaries) or ``sequence-classification``.
        dtype: Of the weights: ``float32``, ``bfloat16`` or ``float16``.
        attention: Attention implementation, such as ``sdpa`` or ``eager``. Default: the model's own choice.
        shape: The published configuration behind ``name``: for plans, and for random weights where there is no name.
    """

    name: str | None = None
    architecture: str | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    task: str = "causal-lm"
    dtype: str = "float32"
    attention: str | None = None
    shape: ModelShape | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        with collect_errors("model section") as check:
            for field in ("name", "architecture", "attention"):
                with check:
                    check_text("model", field, getattr(self, field))
            with check:
                choose("model.task", self.task, TASKS)
            with check:
                choose("model.dtype", self.dtype, DTYPES)
            with check:
                self._read_shape()
            with check:
                if (self.name is None) == (self.architecture is None):
                    raise OffloadConfigError(
                        "model: give either name (a pretrained model) or architecture (with config, for random "
                        f"weights), not {'both' if self.name else 'neither'}."
                    )
            with check:
                if not isinstance(self.config, Mapping):
                    raise OffloadConfigError(f"model.config={self.config!r} is not a mapping of configuration fields.")
                if self.name is not None and self.config:
                    raise OffloadConfigError(
                        "model.config is for models from random weights: set architecture, or drop config."
                    )
            with check:
                if isinstance(self.architecture, str) and isinstance(self.config, Mapping):
                    _check_architecture(self.architecture, self.config, self.task)

    def _read_shape(self) -> None:
        if self.shape is None:
            return
        if not isinstance(self.shape, (Mapping, ModelShape)):
            raise OffloadConfigError(f"model.shape={self.shape!r} is not a mapping with of, architecture and config.")
        shape = from_mapping(ModelShape, self.shape, "model.shape") if isinstance(self.shape, Mapping) else self.shape
        object.__setattr__(self, "shape", shape)
        if self.name is not None:
            _check_architecture(shape.architecture, shape.config, self.task)
        elif self.architecture is None and isinstance(self.config, Mapping):
            object.__setattr__(self, "architecture", shape.architecture)
            object.__setattr__(self, "config", {**shape.config, **self.config})

    @property
    def published(self) -> ModelShape | None:
        """The shape of the pretrained model that is named; None if the recipe does not know it."""
        shape = self.shape
        return shape if isinstance(shape, ModelShape) and self.name in shape.of else None


def _check_architecture(architecture: str, config: Mapping[str, Any], task: str) -> None:
    """Refuse an unknown architecture and configuration fields that its configuration would swallow silently."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    models: Mapping[str, Mapping[str, Any]] = {
        "causal-lm": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked-lm": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "seq2seq-lm": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "sequence-classification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }
    # An unknown task is a mistake of its own, and no reason to leave out the others.
    trainable = [name for name in CONFIG_MAPPING_NAMES if task not in models or name in models[task]]
    if architecture not in trainable:
        known = f"has no {TASKS[task]}" if architecture in CONFIG_MAPPING_NAMES else "is unknown to transformers"
        raise OffloadConfigError(f"model.architecture={architecture!r} {known}.{nearest(architecture, trainable)}")
    config_class = CONFIG_MAPPING[architecture]
    known_fields = {*config_class().to_dict(), *config_class.attribute_map}
    with collect_errors(f"configuration of {architecture}") as check:
        for key in config:
            with check:
                if key not in known_fields:
                    hint = nearest(key, known_fields)
                    raise OffloadConfigError(f"model.config: {architecture} has no field {key!r}.{hint}")
        with check:
            try:
                # The architecture's own special tokens may lie outside a small vocabulary; those of the tokenizer
                # replace them.
                tokens: dict[str, Any] = {
                    token: None for token in ("bos_token_id", "eos_token_id") if token in known_fields
                }
                config_class(**(tokens | dict(config)))
            except (StrictDataclassError, TypeError, ValueError) as error:  # the configuration's own checks
                raise OffloadConfigError(f"model.config: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
