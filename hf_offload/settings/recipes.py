"""Recipes: a training run in one YAML file, and its checks.

Sections: ``meta`` (:mod:`hf_offload.settings.recipe_meta`), ``model``, ``data``, ``training`` (the fields of
``transformers.TrainingArguments``; the precision is what they say, whatever a launcher's config file says), ``evaluation``,
``offload`` (those of :class:`~hf_offload.settings.schema.OffloadConfig`), ``sampling`` (those of
:class:`~hf_offload.settings.sampling.SampledLinearConfig`) and ``memory`` (``mode`` and its settings). A key that nothing
reads is an error, and all errors of a recipe are reported at once.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import model_validator

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.classes import build, from_mapping, in_section, settings
from hf_offload.settings.environment import check_variables
from hf_offload.settings.evaluation import EvaluationRecipe
from hf_offload.settings.layers import drop_nulls, read_layers
from hf_offload.settings.load import collect_errors, nearest, refuse
from hf_offload.settings.memory_modes import NONE
from hf_offload.settings.recipe_data import RANDOM_TOKENS, DataRecipe, HubData
from hf_offload.settings.recipe_files import find_recipe, recipe_names
from hf_offload.settings.recipe_meta import META, MetaRecipe
from hf_offload.settings.recipe_model import DTYPE_ALIASES, DTYPES, TASKS, ModelRecipe
from hf_offload.settings.recipe_training import check_training, training_values
from hf_offload.settings.sampling import SampledLinearConfig
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.shown import cropped, shown
from hf_offload.settings.values import Reader, Text, mapping, section
from hf_offload.settings.yaml_text import parse_yaml

__all__ = [
    "DTYPES",
    "DTYPE_ALIASES",
    "RANDOM_TOKENS",
    "TASKS",
    "DataRecipe",
    "HubData",
    "ModelRecipe",
    "Recipe",
    "apply_override",
    "load_recipe",
    "read_recipe",
    "text_override",
]

QUOTE = '"'
SECTIONS = (META, "model", "data", "training", "evaluation", "offload", "sampling", "memory")


@settings(frozen=True, kw_only=True)
class Recipe:
    """A whole training run. Built by :func:`load_recipe`.

    Attributes:
        meta: What changes nothing about the run.
    """

    name: Text
    meta: Annotated[MetaRecipe, section(MetaRecipe)] = MetaRecipe()
    model: Annotated[ModelRecipe, section(ModelRecipe)]
    data: Annotated[DataRecipe, section(DataRecipe)]
    training: Annotated[Mapping[str, Any], Reader(training_values, {"type": "object"})]
    evaluation: Annotated[EvaluationRecipe, section(EvaluationRecipe)] = EvaluationRecipe()
    offload: Annotated[OffloadConfig, section(OffloadConfig)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(f"recipe {self.name}", self._conflicts())
        return self

    def _conflicts(self) -> Iterator[str]:
        """What one section says that another one excludes."""
        random_tokens = self.data.source == RANDOM_TOKENS
        endless = int(self.training.get("max_steps") or 0) <= 0
        if self.data.streaming and endless:
            yield "data.streaming has no known end: set training.max_steps."
        if random_tokens and endless:
            yield f"data.source: {RANDOM_TOKENS} have no end: set training.max_steps."
        yield from self.data.conflicts_with(self.model.task)
        yield from self.evaluation.conflicts_with(
            self.model.task, self.training, has_validation=self.data.validation is not None
        )
        if not self.model.name and not self.data.tokenizer and not random_tokens:
            yield (
                "data.tokenizer is missing: a model from random weights brings none. Name one, or give "
                "tokenizer: {train_bpe: 8192}."
            )

    @property
    def output_dir(self) -> Path:
        """Where checkpoints and, unless ``data.cache_dir`` says otherwise, prepared data go."""
        return Path(self.training.get("output_dir") or Path("runs") / self.name.replace("/", "_")).expanduser()

    @property
    def cache_dir(self) -> Path:
        """Where prepared data and a trained tokenizer go."""
        return Path(self.data.cache_dir).expanduser() if self.data.cache_dir else self.output_dir / "data"


def read_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply ``overrides`` such as ``training.max_steps=3``; a later one wins. Imports no library.

    Values are YAML: ``offload.tier=ssd``, ``data.files=[a.txt, b.txt]``, ``offload={tier: none}`` (a whole section),
    ``offload.directory=null`` (back to the default), ``training.run_name="2024"`` (text). What the file names under
    ``base`` is merged below it (:mod:`hf_offload.settings.layers`). Raises :class:`OffloadConfigError` with every error in
    it; what sections exclude of each other is looked at where each is right by itself.
    """
    path = find_recipe(path_or_name)
    layers = read_layers(path)
    tree = layers.tree
    name = str(path_or_name) if str(path_or_name) in recipe_names() else path.stem
    with collect_errors(f"recipe {name}") as check:
        with check:  # a recipe reads none, but what is misspelt is not what was meant
            check_variables()
        for override in overrides:
            with check:
                apply_override(tree, override)
        drop_nulls(tree)
        for key in tree:
            with check:
                if key not in SECTIONS:
                    where = layers.other_layer(key) or name
                    raise OffloadConfigError(
                        f"{where}: unknown section {shown(key)}.{nearest(key, SECTIONS)} Known: {', '.join(SECTIONS)}."
                    )
        values: dict[str, Any] = {"name": name, "offload": {}}
        values |= {key: tree.get(key, {}) for key in (META, "model", "data", "training", "evaluation")}
        with check, layers.located():
            values["offload"] = _offloading(tree)
        with check, layers.located():
            recipe = build(Recipe, values, f"recipe {name}")
    return recipe


def _offloading(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``offload`` with what the sections ``sampling`` and ``memory`` add. A recipe without it asks for no
    offloading; with it, the default of :class:`OffloadConfig` holds.
    """
    of_settings = mapping("of settings")
    asked: dict[str, Any] = dict(of_settings("offload", tree.get("offload", {"tier": "none"})))
    if "sampling" in tree:
        if "sampled_linear" in asked:
            raise OffloadConfigError("offload.sampled_linear and the section sampling set the same: drop one.")
        given = of_settings("sampling", tree["sampling"])
        asked["sampled_linear"] = from_mapping(SampledLinearConfig, given, "sampling", in_section("sampling"))
    if "memory" in tree:
        if "memory_mode" in asked or "memory_mode_kwargs" in asked:
            raise OffloadConfigError("offload.memory_mode and the section memory set the same: drop one.")
        mode = dict(of_settings("memory", tree["memory"]))
        asked |= {"memory_mode": mode.pop("mode", NONE), "memory_mode_kwargs": mode or None}
    return asked


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """:func:`read_recipe`, and what only the libraries can check: ``model.architecture`` and ``model.config``, the sections
    ``training`` and ``memory``.

    Raises :class:`OffloadConfigError` with every error in it. Libraries, which take seconds to load, are not asked about a
    recipe that is wrong anyway.
    """
    recipe = read_recipe(path_or_name, overrides)
    layers = read_layers(find_recipe(path_or_name))
    with collect_errors(f"recipe {recipe.name}") as check:
        with check, layers.located():
            recipe.model.check_library()
        with check, layers.located():
            check_training(recipe.training)
        with check, layers.located():
            recipe.offload.mode()
    return recipe


# ----------------------------------------------------------------------------------------- changes from the command line


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Apply ``override``, such as ``training.max_steps=3``, to ``tree``; values are YAML, and ``null`` removes a key."""
    key, equals, text = override.partition("=")
    *parents, last = key.strip().split(".")
    if not equals or not last or not all(parents):
        raise OffloadConfigError(
            f"{shown(override)} is not an override: write section.key=value, such as training.max_steps=3."
        )
    value = _value(text, shown(override))
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
    return f"{key}={yaml.safe_dump(text, default_style=QUOTE, width=sys.maxsize).rstrip()}"


def _value(text: str, where: str) -> Any:
    value = parse_yaml(text, where)
    # A word is the whole of the text: a # begins no comment here.
    return text if isinstance(value, str) and text.strip()[0] not in ("'", QUOTE) else value
