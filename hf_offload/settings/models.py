"""Models by a short name, such as ``llama-8b``: their published configurations, known without the hub."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_offload.settings.layers import read_layers
from hf_offload.settings.recipe_files import read_yaml, recipe_roots
from hf_offload.settings.shapes import ModelShape

_FILE = Path(__file__).with_suffix(".yaml")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A published model.

    Attributes:
        shape: Its configuration, and its names on the hub.
        dtype: Of the published weights.
        task: What it is trained for; None where its configuration says so.
    """

    shape: ModelShape
    dtype: str
    task: str | None


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


def _read(entry: Mapping[str, Any]) -> KnownModel:
    fields = {field: entry[field] for field in ("of", "architecture", "config") if field in entry}
    if "layer" in entry:
        file = next(path for root in recipe_roots() if (path := root / f"{entry['layer']}.yaml").is_file())
        fields = read_layers(file).tree["model"]["shape"]
    return KnownModel(shape=ModelShape(**fields), dtype=entry["dtype"], task=entry.get("task"))


@functools.cache
def _entries() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = read_yaml(_FILE)
    return found
