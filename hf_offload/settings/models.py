"""Models by a short name, such as ``llama-8b``: their published configurations, known without the hub."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_offload.settings.layers import read_layers
from hf_offload.settings.recipe_files import PRESETS, is_recipe_file, read_yaml, recipe_roots, resolve_shape
from hf_offload.settings.recipe_model import ModelShape

_FILE = Path(__file__).with_suffix(".yaml")
_RANDOM_TOKENS = f"{PRESETS}gpt2-small"
"""A preset whose data and training suit any of the models."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A published model.

    Attributes:
        shape: Its configuration, and its names on the hub.
        dtype: Of the published weights.
        task: What it is trained for.
    """

    shape: ModelShape
    dtype: str
    task: str


def model_names() -> list[str]:
    """All short names."""
    return sorted(_entries())


def known_model(name: str) -> KnownModel | None:
    """The model with this short name or this name on the hub; None if it is not known."""
    entry = _entries().get(name)
    if entry is not None:
        return _read(entry)
    read = map(_read, _entries().values()) if "/" in name else ()
    return next((one for one in read if name in one.shape.of), None)


def measured_recipe(name: str) -> tuple[str, tuple[str, ...]]:
    """The recipe to measure a model with, and changes to it: a preset such as ``gpt2-small``, or a model of
    :func:`model_names` with random weights on random tokens. Anything else is the name or the file of a recipe.
    """
    recipe = resolve_shape(name)
    known = None if recipe != name or is_recipe_file(name) else known_model(name)
    if known is None:
        return recipe, ()
    shape = known.shape
    model = {"architecture": shape.architecture, "config": shape.config, "task": known.task, "dtype": known.dtype}
    return _RANDOM_TOKENS, (f"model={json.dumps(model)}",)


def _read(entry: Mapping[str, Any]) -> KnownModel:
    fields = {field: entry[field] for field in ("of", "architecture", "config") if field in entry}
    if "layer" in entry:
        file = next(path for root in recipe_roots() if (path := root / f"{entry['layer']}.yaml").is_file())
        fields = read_layers(file).tree["model"]["shape"]
    return KnownModel(shape=ModelShape(**fields), dtype=entry["dtype"], task=entry.get("task", "causal-lm"))


@functools.cache
def _entries() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = read_yaml(_FILE)
    return found
