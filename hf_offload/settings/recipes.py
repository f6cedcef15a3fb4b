"""Recipes: what one YAML file says about a training run, and how that is checked.

Sections: ``model``, ``data``, ``training`` (the fields of ``transformers.TrainingArguments``), ``offload`` (those of
:class:`~hf_offload.settings.schema.OffloadConfig`), ``sampling`` (those of
:class:`~hf_offload.settings.sampling.SampledLinearConfig`) and ``memory`` (``mode`` and its settings). A key that nothing
reads is an error, and all mistakes of a recipe are reported at once.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.layers import drop_nulls, read_layers
from hf_offload.settings.load import choose, collect_errors, from_mapping, nearest
from hf_offload.settings.recipe_files import apply_override, find_recipe, recipe_names
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.shapes import ModelShape
from hf_offload.settings.sizes import parse_bytes

RANDOM_TOKENS = "random-tokens"
TASKS = {
    "causal-lm": "causal language model",
    "masked-lm": "masked language model",
    "seq2seq-lm": "sequence-to-sequence language model",
}
SOURCES = ("python-stdlib", RANDOM_TOKENS)
DTYPES = ("float32", "bfloat16", "float16")
SECTIONS = ("model", "data", "training", "offload", "sampling", "memory")
SMALLEST_BPE = 257
"""All 256 byte values and the end-of-text token."""

# What a recipe run does not do, so that a recipe cannot ask for it and be ignored.
_NOT_FOR_RECIPES = {
    "do_train": "a recipe always trains: drop it",
    "do_eval": "a recipe only trains: evaluate the saved model afterwards",
    "do_predict": "a recipe only trains: predict with the saved model afterwards",
    "eval_strategy": "a recipe only trains: evaluate the saved model afterwards",
    "eval_on_start": "a recipe only trains: evaluate the saved model afterwards",
    "resume_from_checkpoint": "a recipe starts from its model section: set model.name to the checkpoint's folder",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """Which model: ``name`` (a hub name or a folder), or random weights of an ``architecture`` with ``config``, or of a
    ``shape`` with ``config`` on top; ``architecture`` and ``config`` then say the whole.

    Args:
        name: Hub name or folder of a pretrained model.
        architecture: Model type of transformers, such as ``gpt2``, for a model from random weights.
        config: Fields of that architecture's configuration.
        task: ``causal-lm``, ``masked-lm`` or ``seq2seq-lm``; the last two need ``data.source: random-tokens`` so far.
        dtype: Of the weights: ``float32``, ``bfloat16`` or ``float16``.
        attention: Attention implementation, such as ``sdpa`` or ``eager``. Default: the model's own choice.
        shape: The published configuration behind ``name``: for plans, and for random weights where there is no name.
    """

    name: str | None = None
    architecture: str | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shape: ModelShape | Mapping[str, Any] | None = None
    task: str = "causal-lm"
    dtype: str = "float32"
    attention: str | None = None

    def __post_init__(self) -> None:
        with collect_errors("model section") as check:
            for field in ("name", "architecture", "attention"):
                with check:
                    _text("model", field, getattr(self, field))
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubData:
    """A dataset of the hub: its ``name``, ``config`` and ``split``."""

    name: str | None = None
    config: str | None = None
    split: str = "train"

    def __post_init__(self) -> None:
        with collect_errors("data.hub") as check:
            for field in ("name", "config", "split"):
                with check:
                    _text("data.hub", field, getattr(self, field))
            with check:
                if not self.name:
                    raise OffloadConfigError("data.hub has no name: write hub: {name: owner/dataset}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Which text, from exactly one of ``source``, ``files`` and ``hub``, cut into blocks of ``sequence_length`` tokens.

    Args:
        source: ``python-stdlib``: the source code of Python's standard library, found on every machine.
            ``random-tokens``: as many rows of random token ids as the run needs, for measuring memory and time.
        max_bytes: With ``python-stdlib``: stop after the file that reaches this many bytes.
        files: Local files or patterns: text (one document a file), JSON lines, CSV or Parquet.
        hub: A dataset's name, or a mapping with ``name``, ``config`` and ``split``.
        streaming: Read while training instead of preparing everything first.
        text_column: The column that holds the text.
        sequence_length: Tokens in a block.
        tokenizer: Hub name or folder, or ``{train_bpe: vocabulary size}`` to train one on the data. Default: that of
            the model.
        cache_dir: Where the prepared data and the trained tokenizer go. Default: ``data`` in the output directory.
    """

    source: str | None = None
    max_bytes: int | str | None = None
    files: str | Sequence[str] | None = None
    hub: HubData | str | Mapping[str, Any] | None = None
    streaming: bool = False
    text_column: str = "text"
    sequence_length: int = 512
    tokenizer: str | Mapping[str, Any] | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        with collect_errors("data section") as check:
            with check:
                given = [name for name in ("source", "files", "hub") if getattr(self, name) is not None]
                if len(given) != 1:
                    raise OffloadConfigError(
                        f"data: give exactly one of source, files and hub, not {' and '.join(given) or 'none'}."
                    )
            with check:
                if self.source is not None:
                    choose("data.source", self.source, SOURCES)
            with check:
                if self.max_bytes is not None:
                    self._set("max_bytes", parse_bytes(self.max_bytes, "data.max_bytes"))
                    if self.source in (None, RANDOM_TOKENS):
                        raise OffloadConfigError("data.max_bytes goes with data.source=python-stdlib only: drop it.")
            with check:
                if self.files is not None:
                    files = (self.files,) if isinstance(self.files, str) else self.files
                    if not isinstance(files, Sequence) or not files or not all(isinstance(f, str) for f in files):
                        raise OffloadConfigError(f"data.files={self.files!r} is neither a path nor a list of paths.")
                    self._set("files", tuple(files))
            with check:
                if self.hub is not None and not isinstance(self.hub, HubData):
                    hub = {"name": self.hub} if isinstance(self.hub, str) else self.hub
                    if not isinstance(hub, Mapping):
                        raise OffloadConfigError(f"data.hub={self.hub!r} is neither a name nor a mapping.")
                    self._set("hub", from_mapping(HubData, hub, "data.hub"))
            with check:
                if not isinstance(self.streaming, bool):
                    raise OffloadConfigError(f"data.streaming={self.streaming!r} is neither true nor false.")
            for field in ("text_column", "cache_dir"):
                with check:
                    _text("data", field, getattr(self, field))
            with check:
                _whole("data.sequence_length", self.sequence_length, at_least=2)
            with check:
                if isinstance(self.tokenizer, Mapping):
                    for key in self.tokenizer:
                        if key != "train_bpe":
                            raise OffloadConfigError(
                                f"data.tokenizer: unknown key {key!r}.{nearest(key, ['train_bpe'])} Known: train_bpe."
                            )
                    _whole("data.tokenizer.train_bpe", self.tokenizer.get("train_bpe"), at_least=SMALLEST_BPE)
                else:
                    _text("data", "tokenizer", self.tokenizer)
            for field, unused in (("tokenizer", None), ("streaming", False), ("text_column", "text")):
                with check:
                    if self.source == RANDOM_TOKENS and getattr(self, field) != unused:
                        raise OffloadConfigError(f"data.{field}: {RANDOM_TOKENS} are no text and need none: drop it.")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def train_bpe(self) -> int | None:
        """Vocabulary size of the tokenizer to train; ``None`` when an existing one is used."""
        return self.tokenizer["train_bpe"] if isinstance(self.tokenizer, Mapping) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole training run. Built by :func:`load_recipe`."""

    name: str
    model: ModelRecipe
    data: DataRecipe
    training: Mapping[str, Any]
    offload: OffloadConfig
    memory: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """``mode`` and its settings; empty for all weights and the optimizer of the section training."""

    @property
    def output_dir(self) -> Path:
        """Where checkpoints and, unless ``data.cache_dir`` says otherwise, prepared data go."""
        return Path(self.training.get("output_dir") or Path("runs") / self.name.replace("/", "_"))

    @property
    def cache_dir(self) -> Path:
        """Where prepared data and a trained tokenizer go."""
        return Path(self.data.cache_dir) if self.data.cache_dir else self.output_dir / "data"


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply ``overrides`` such as ``training.max_steps=3``; a later one wins.

    Values are YAML: ``offload.tier=ssd``, ``data.files=[a.txt, b.txt]``, ``offload={tier: none}`` (a whole section),
    ``offload.directory=null`` (back to the default). What the file names under ``base`` is merged below it
    (:mod:`hf_offload.settings.layers`). Raises :class:`OffloadConfigError` with every mistake in it.
    """
    path = find_recipe(path_or_name)
    layers = read_layers(path)
    tree = layers.tree
    name = str(path_or_name) if str(path_or_name) in recipe_names() else path.stem
    with collect_errors(f"recipe {name}") as check:
        for override in overrides:
            with check:
                apply_override(tree, override)
        drop_nulls(tree)
        for key in list(tree):
            with check:
                if key not in SECTIONS:
                    where = layers.other_layer(key) or name
                    raise OffloadConfigError(
                        f"{where}: unknown section {key!r}.{nearest(key, SECTIONS)} Known: {', '.join(SECTIONS)}."
                    )
        sections: dict[str, Mapping[str, Any]] = {}
        for key in SECTIONS:
            sections[key] = {}
            with check:
                section = tree.get(key)
                if section is not None and not isinstance(section, Mapping):
                    raise OffloadConfigError(f"{name}: section {key} is {section!r}, not a mapping of settings.")
                sections[key] = section or {}
        with check, layers.naming("model"):
            model = from_mapping(ModelRecipe, sections["model"], "model")
        with check, layers.naming("data"):
            data = from_mapping(DataRecipe, sections["data"], "data")
        training: dict[str, Any] = {}
        for key, value in sections["training"].items():
            with check, layers.naming("training"):
                training[key] = _training_value(key, value)
        with check, layers.naming("offload"):
            # A recipe without the section asks for no offloading; with it, OffloadConfig's own default holds.
            asked: dict[str, Any] = dict(sections["offload"]) if "offload" in tree else {"tier": "none"}
            if "sampling" in tree:
                if "sampled_linear" in asked:
                    raise OffloadConfigError("offload.sampled_linear and the section sampling say the same: drop one.")
                asked["sampled_linear"] = sections["sampling"]
            offload = from_mapping(OffloadConfig, asked, "offload")
        with check, layers.naming("memory"):
            if sections["memory"]:
                from hf_offload.memory_modes.registry import memory_mode  # loads optimizers, which few recipes need

                settings = {key: value for key, value in sections["memory"].items() if key != "mode"}
                memory_mode(str(sections["memory"].get("mode", "none")), settings)
        with check:
            if sections["data"].get("streaming") is True and int(training.get("max_steps") or 0) <= 0:
                raise OffloadConfigError("data.streaming has no known end: set training.max_steps.")
        random_tokens = sections["data"].get("source") == RANDOM_TOKENS
        with check:
            if random_tokens and int(training.get("max_steps") or 0) <= 0:
                raise OffloadConfigError(f"data.source: {RANDOM_TOKENS} have no end: set training.max_steps.")
        with check:
            task = sections["model"].get("task", "causal-lm")
            if task in TASKS and task != "causal-lm" and not random_tokens:
                raise OffloadConfigError(
                    f"model.task: {task} needs data.source: {RANDOM_TOKENS} so far. Set that, or take causal-lm."
                )
        with check:
            if not sections["model"].get("name") and not sections["data"].get("tokenizer") and not random_tokens:
                raise OffloadConfigError(
                    "data.tokenizer is missing: a model from random weights brings none. Name one, or give "
                    "tokenizer: {train_bpe: 8192}."
                )
    memory = sections["memory"]
    return Recipe(name=name, model=model, data=data, training=training, offload=offload, memory=memory)


# -------------------------------------------------------------------------------------------------------------- checks


def _text(section: str, name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise OffloadConfigError(f"{section}.{name}={value!r} is not text.")


def _whole(name: str, value: object, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OffloadConfigError(f"{name}={value!r} is not a whole number.")
    if value < at_least:
        raise OffloadConfigError(f"{name}={value} is too small: give {at_least} or more.")


def _check_architecture(architecture: str, config: Mapping[str, Any], task: str) -> None:
    """Refuse an unknown architecture and configuration fields that its configuration would swallow silently."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    models: Mapping[str, Mapping[str, Any]] = {
        "causal-lm": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked-lm": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "seq2seq-lm": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
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


def _training_value(key: str, value: Any) -> Any:
    """Check one key of the training section against TrainingArguments; return the value in the field's type."""
    from transformers import TrainingArguments

    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    if key in _NOT_FOR_RECIPES:
        raise OffloadConfigError(f"training.{key}: {_NOT_FOR_RECIPES[key]}.")
    if key == "offload" or key.startswith("offload_"):
        raise OffloadConfigError(f"training.{key}: settings of offloading go into the section offload.")
    if key not in names:
        raise OffloadConfigError(f"training: TrainingArguments has no field {key!r}.{nearest(key, names)}")
    hints = tuple(_plain_types(typing.get_type_hints(TrainingArguments)[key]))
    if float in hints and isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, hints) or (isinstance(value, bool) and bool not in hints):
        wanted = " or ".join(sorted({"null" if hint is type(None) else hint.__name__ for hint in hints}))
        raise OffloadConfigError(f"training.{key}={value!r} is not of type {wanted}.")
    return value


def _plain_types(hint: Any) -> Iterator[type]:
    """The classes that ``isinstance`` can check in a type hint: ``dict[str, Any] | None`` -> dict, NoneType."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from _plain_types(part)
    elif origin is typing.Literal:
        yield from {type(value) for value in typing.get_args(hint)}
    elif hint is Any:
        yield object
    else:
        yield origin or hint


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
