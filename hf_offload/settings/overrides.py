"""Changes to a recipe from the command line, such as ``training.max_steps=3``."""

import json
from collections.abc import Sequence
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.classes import ALWAYS, NEVER, forms
from hf_offload.settings.evaluation import EvaluationRecipe, Generation
from hf_offload.settings.recipe_data import DataRecipe, HubData
from hf_offload.settings.recipe_model import ModelRecipe, ModelShape
from hf_offload.settings.recipe_training import training_text
from hf_offload.settings.sampling import SampledLinearConfig
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.shown import cropped, shown
from hf_offload.settings.yaml_text import parse_yaml

_CLASSES: dict[tuple[str, ...], Any] = {
    ("model",): ModelRecipe,
    ("model", "shape"): ModelShape,
    ("data",): DataRecipe,
    ("data", "hub"): HubData,
    ("evaluation",): EvaluationRecipe,
    ("evaluation", "generation"): Generation,
    ("offload",): OffloadConfig,
    ("offload", "sampled_linear"): SampledLinearConfig,
    ("sampling",): SampledLinearConfig,
}


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Apply ``override``, such as ``training.max_steps=3``, to ``tree``; ``null`` removes a key.

    Values are YAML. Of settings that are text or a path, they are the text as it stands, unless it is in quotes.
    """
    key, equals, text = override.partition("=")
    *parents, last = key.strip().split(".")
    if not equals or not last or not all(parents):
        raise OffloadConfigError(
            f"{shown(override)} is not an override: write section.key=value, such as training.max_steps=3."
        )
    value = _value([*parents, last], text, shown(override))
    where = tree
    for depth, part in enumerate(parents):
        if not isinstance(where.get(part), dict):
            if where.get(part) is not None:
                parent = cropped(".".join(parents[: depth + 1]))
                raise OffloadConfigError(f"{shown(override)}: {parent} is not a mapping.")
            where[part] = {}
        where = where[part]
    if value is None and where.get(last) is not None:
        del where[last]
    else:
        where[last] = value


def text_override(key: str, text: str) -> str:
    """The override that sets ``key`` to ``text``, whatever it looks like."""
    return f"{key}={text}" if _value(key.split("."), text, key) == text else f"{key}={json.dumps(text)}"


def _value(keys: Sequence[str], text: str, where: str) -> Any:
    plain = text.strip()
    if plain in ("", "~", "null", "Null", "NULL"):
        return None
    quoted, collection = plain[0] in "'\"", plain[0] in "[{"
    as_text = _as_text(keys)
    if not quoted and (as_text == ALWAYS or (as_text != NEVER and not collection)):
        return text
    try:
        value = parse_yaml(text, where)
    except OffloadConfigError:
        if as_text == ALWAYS:
            return text
        raise
    # A word is the whole of the text: a # begins no comment here.
    return text if isinstance(value, str) and not quoted else value


def _as_text(keys: Sequence[str]) -> str:
    *section, key = keys
    if section == ["training"]:
        return training_text(key)
    if tuple(section) in _CLASSES:
        form = forms(_CLASSES[tuple(section)]).get(key)
        return NEVER if form is None else form.as_text  # the class itself refuses unknown keys
    return NEVER
