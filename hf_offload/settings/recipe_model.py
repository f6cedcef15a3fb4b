"""The section ``model`` of a recipe, and in it the published configuration of a model, so that plans need no hub."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.library_source import architectures, config_fields
from hf_offload.settings.load import collect_errors
from hf_offload.settings.shown import LONGEST, cropped, nearest, shown
from hf_offload.settings.values import mapping, names, one_of, path_text, read_fields, section, setting, text


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a plan needs to know of a model whose weights are elsewhere.

    Args:
        of: Whose configuration this is, one or several names of the hub. A recipe that names another model does without the
            shape.
        architecture: Model type of transformers, such as ``llama``.
        config: Fields of the configuration; those left out have the architecture's defaults.
    """

    of: str | Sequence[str] = setting((), names("names of the hub"))
    architecture: str = setting("", text())
    config: Mapping[str, Any] = setting({}, mapping("of configuration fields"))

    def __post_init__(self) -> None:
        with read_fields(self, "model.shape", "model.shape."):
            pass


TASKS = {
    "causal-lm": "causal language model",
    "masked-lm": "masked language model",
    "seq2seq-lm": "sequence-to-sequence language model",
    "sequence-classification": "model for sequence classification",
}
DTYPES = ("float32", "bfloat16", "float16")
DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"} | {f"torch.{name}": name for name in DTYPES}


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

    name: str | None = setting(None, path_text())
    architecture: str | None = setting(None, text())
    config: Mapping[str, Any] = setting({}, mapping("of configuration fields"))
    task: str = setting("causal-lm", one_of(TASKS))
    dtype: str = setting("float32", one_of(DTYPES, DTYPE_ALIASES))
    attention: str | None = setting(None, text())
    shape: ModelShape | Mapping[str, Any] | None = setting(
        None, section(ModelShape, "with of, architecture and config")
    )

    def __post_init__(self) -> None:
        with read_fields(self, "model section", "model.") as check:
            with check:
                if check.good("shape", "config") and self.name is None and self.architecture is None:
                    self._take_shape()
            with check:
                if check.good("name", "architecture", "shape") and (self.name is None) == (self.architecture is None):
                    raise OffloadConfigError(
                        "model: give either name (a pretrained model) or architecture (with config, for random "
                        f"weights), not {'both' if self.name else 'neither'}."
                    )
            with check:
                if check.good("name", "config") and self.name is not None and self.config:
                    raise OffloadConfigError(
                        "model.config is for models from random weights: set architecture, or drop config."
                    )
            with check:
                architecture, config = self._configured()
                if architecture is not None and check.good("architecture", "config", "shape"):
                    _check_names(architecture, config, self.task if check.good("task") else None)

    def _take_shape(self) -> None:
        if isinstance(self.shape, ModelShape):
            object.__setattr__(self, "architecture", self.shape.architecture)
            object.__setattr__(self, "config", {**self.shape.config, **self.config})

    def check_library(self) -> None:
        """Raise :class:`OffloadConfigError` for what transformers refuses. Loads torch, which takes seconds."""
        architecture, config = self._configured()
        if architecture is not None:
            _check_values(architecture, config)

    def _configured(self) -> tuple[str | None, Mapping[str, Any]]:
        if self.architecture is None and isinstance(self.shape, ModelShape):
            return self.shape.architecture, self.shape.config
        return self.architecture, self.config

    @property
    def published(self) -> ModelShape | None:
        """The shape of the pretrained model that is named; None if the recipe does not know it."""
        shape = self.shape
        return shape if isinstance(shape, ModelShape) and self.name in shape.of else None


def _check_names(architecture: str, config: Mapping[str, Any], task: str | None) -> None:
    """Refuse an unknown architecture and fields that its configuration would swallow silently."""
    trainable = architectures(task)
    if trainable and architecture not in trainable:
        known = f"has no {TASKS[task]}" if task and architecture in architectures() else "is unknown to transformers"
        raise OffloadConfigError(f"model.architecture={shown(architecture)} {known}.{nearest(architecture, trainable)}")
    _check_fields(architecture, config, config_fields(architecture))


def _check_fields(architecture: str, config: Mapping[str, Any], known: Iterable[str] | None) -> None:
    with collect_errors(f"configuration of {architecture}") as check:
        for key in config:
            with check:
                if known is not None and key not in known:
                    raise OffloadConfigError(
                        f"model.config: {architecture} has no field {shown(key)}.{nearest(key, sorted(known))}"
                    )


def _check_values(architecture: str, config: Mapping[str, Any]) -> None:
    """What the configuration's own checks refuse."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[architecture]
    known = {*config_class().to_dict(), *config_class.attribute_map}
    _check_fields(architecture, config, known)
    # The architecture's own special tokens may lie outside a small vocabulary; those of the tokenizer replace them.
    tokens: dict[str, Any] = {token: None for token in ("bos_token_id", "eos_token_id") if token in known}
    try:
        config_class(**(tokens | dict(config)))
    except Exception as error:  # whatever a configuration raises for values it cannot take
        raise OffloadConfigError(f"model.config: {cropped(str(error), 2 * LONGEST)}") from error
