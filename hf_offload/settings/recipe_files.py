"""Files of recipes: where they are found, and their content."""

from pathlib import Path
from typing import Any

import hf_offload
from hf_offload.errors import OffloadConfigError
from hf_offload.settings.shown import listed, nearest, shown
from hf_offload.settings.text_files import is_file, read_text
from hf_offload.settings.values import expand
from hf_offload.settings.yaml_text import parse_yaml

PRESETS = "bench/"
"""Where shipped recipes lie that are models to measure with."""


def recipe_roots() -> list[Path]:
    """The folders that hold shipped recipes: in an installed package, or in a checkout."""
    package = Path(hf_offload.__file__).resolve().parent
    roots = [package / "_recipes"]
    if (package.parent / "pyproject.toml").is_file():
        roots.append(package.parent / "recipes")
    return [root for root in roots if root.is_dir()]


def recipe_names() -> list[str]:
    """Names of all shipped recipes, such as ``gpt/demo``."""
    return [name for name in _shipped_names() if not is_layer(name)]


def layer_names() -> list[str]:
    """Names of the shipped files that recipes are made of, such as ``llama/_8b``: no recipes themselves."""
    return [name for name in _shipped_names() if is_layer(name)]


def is_layer(name: str) -> bool:
    """Whether the name of a shipped file, or that of any file, says that it is only a layer: with an underscore in front."""
    return any(part.startswith("_") for part in name.split("/"))


def shipped_name(path: Path) -> str | None:
    """The name of a shipped recipe or layer, from its file; None for other files."""
    for root in recipe_roots():
        if path.resolve().is_relative_to(root.resolve()):
            return path.resolve().relative_to(root.resolve()).with_suffix("").as_posix()
    return None


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe, from its path or its shipped name.

    Raises :class:`OffloadConfigError` with the nearest names if there is none, and for a layer.
    """
    path = expand("recipe", str(name) or ".")
    found = path if is_file(path) else None
    if found is None and path.suffix not in (".yaml", ".yml"):
        shipped = (root / f"{name}.yaml" for root in recipe_roots())
        found = next((file for file in shipped if is_file(file)), None)
    if found is None:
        names = recipe_names()
        raise OffloadConfigError(
            f"There is no recipe {shown(str(name))}: no such file, and no shipped recipe of that name."
            f"{nearest(name, names)} Shipped: {listed(names, name)}."
        )
    if is_layer(shipped_name(found) or found.name):
        raise OffloadConfigError(
            f"{shown(str(name))} is a layer, not a recipe: name it under base: in a recipe of your own."
        )
    return found


def is_recipe_file(name: str) -> bool:
    """Whether ``name`` is the path of a file, and not that of a shipped recipe."""
    return is_file(expand("recipe", name or "."))


def resolve_shape(shape: str) -> str:
    """The recipe that a preset's name such as ``gpt2-small`` stands for; anything else is a recipe's name or file."""
    return f"{PRESETS}{shape}" if f"{PRESETS}{shape}" in recipe_names() and not is_recipe_file(shape) else shape


def _shipped_names() -> list[str]:
    found = [path.relative_to(root) for root in recipe_roots() for path in root.rglob("*.yaml")]
    return sorted({path.with_suffix("").as_posix() for path in found})


def read_yaml(path: Path) -> Any:
    """The content of a recipe's file, unchecked."""
    return parse_yaml(read_text(path, "The recipe"), str(path))
