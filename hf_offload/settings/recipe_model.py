"""The section ``model`` of a recipe, and in it the published configuration of a model, so that plans need no hub."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import model_validator

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.classes import settings
from hf_offload.settings.load import refuse
from hf_offload.settings.shown import LONGEST, cropped, nearest, shown
from hf_offload.settings.values import Text, mapping, names, one_of, path_text, section


@settings(frozen=True, kw_only=True)
class ModelShape:
    """What a plan needs to know of a model whose weights are elsewhere.

    Args:
        of: Whose configuration this is, one or several names of the hub. A recipe that names another model does without the
            shape.
        architecture: Model type of transformers, such as ``llama``.
        config: Fields of the configuration; those left out have the architecture's defaults.
    """

    of: Annotated[str | Sequence[str], names("names of the hub")]
    architecture: Text
    config: Annotated[Mapping[str, Any], mapping("of configuration fields")] = dataclasses.field(default_factory=dict)


TASKS = {
    "causal-lm": "causal language model",
    "masked-lm": "masked language model",
    "seq2seq-lm": "sequence-to-sequence language model",
    "sequence-classification": "model for sequence classification",
}
_TRAINABLE = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
"""Where transformers says which architectures have such a model."""
DTYPES = ("float32", "bfloat16", "float16")
DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"} | {f"torch.{name}": name for name in DTYPES}


@settings(frozen=True, kw_only=True)
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

    name: Annotated[str | None, path_text()] = None
    architecture: Text | None = None
    config: Annotated[Mapping[str, Any], mapping("of configuration fields")] = dataclasses.field(default_factory=dict)
    task: Annotated[str, one_of(TASKS)] = "causal-lm"
    dtype: Annotated[str, one_of(DTYPES, DTYPE_ALIASES)] = "float32"
    attention: Text | None = None
    shape: Annotated[ModelShape | Mapping[str, Any] | None, section(ModelShape, "with of, architecture and config")] = (
        None
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name is None and self.architecture is None and isinstance(self.shape, ModelShape):
            object.__setattr__(self, "architecture", self.shape.architecture)
            object.__setattr__(self, "config", {**self.shape.config, **self.config})
        refuse("model section", self._conflicts())
        return self

    def _conflicts(self) -> Iterator[str]:
        if (self.name is None) == (self.architecture is None):
            yield (
                "model: give either name (a pretrained model) or architecture (with config, for random weights), not "
                f"{'both' if self.name else 'neither'}."
            )
        if self.name is not None and self.config:
            yield "model.config is for models from random weights: set architecture, or drop config."

    def check_library(self) -> None:
        """Raise :class:`OffloadConfigError` for what transformers refuses of the configuration, and for fields that it would
        swallow silently. Loads torch, which takes seconds.
        """
        from transformers.models.auto import modeling_auto
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        architecture, config = self._configured()
        if architecture is None:
            return
        trainable = getattr(modeling_auto, _TRAINABLE[self.task])
        if architecture not in trainable:
            known = f"has no {TASKS[self.task]}" if architecture in CONFIG_MAPPING else "is unknown to transformers"
            raise OffloadConfigError(
                f"model.architecture={shown(architecture)} {known}.{nearest(architecture, trainable)}"
            )
        config_class = CONFIG_MAPPING[architecture]
        fields = {*config_class().to_dict(), *config_class.attribute_map}
        refuse(
            f"configuration of {architecture}",
            (
                f"model.config: {architecture} has no field {shown(key)}.{nearest(key, sorted(fields))}"
                for key in config
                if key not in fields
            ),
        )
        # The architecture's own special tokens may lie outside a small vocabulary; those of the tokenizer replace them.
        tokens: dict[str, Any] = {token: None for token in ("bos_token_id", "eos_token_id") if token in fields}
        try:
            config_class(**(tokens | dict(config)))
        except Exception as error:  # whatever a configuration raises for values it cannot take
            raise OffloadConfigError(f"model.config: {cropped(str(error), 2 * LONGEST)}") from error

    def _configured(self) -> tuple[str | None, Mapping[str, Any]]:
        if self.architecture is None and isinstance(self.shape, ModelShape):
            return self.shape.architecture, self.shape.config
        return self.architecture, self.config

    @property
    def published(self) -> ModelShape | None:
        """The shape of the pretrained model that is named; None if the recipe does not know it."""
        shape = self.shape
        return shape if isinstance(shape, ModelShape) and self.name in shape.of else None
