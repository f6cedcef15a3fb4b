"""Recipes: a training run in one YAML file, and its checks.

Sections: ``meta`` (:mod:`hf_offload.settings.recipe_meta`), ``model``, ``data``, ``training`` (the fields of
``transformers.TrainingArguments``; the precision is what they say, whatever a launcher's config file says), ``evaluation``,
``offload`` (those of :class:`~hf_offload.settings.schema.OffloadConfig`), ``sampling`` (those of
:class:`~hf_offload.settings.sampling.SampledLinearConfig`) and ``memory`` (``mode`` and its settings). A key that nothing
reads is an error, and all errors of a recipe are reported at once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.environment import check_variables
from hf_offload.settings.evaluation import EvaluationRecipe
from hf_offload.settings.layers import drop_nulls, read_layers
from hf_offload.settings.load import collect_errors, from_mapping, nearest
from hf_offload.settings.memory_modes import NONE
from hf_offload.settings.overrides import apply_override
from hf_offload.settings.recipe_data import RANDOM_TOKENS, DataRecipe, HubData
from hf_offload.settings.recipe_files import find_recipe, recipe_names
from hf_offload.settings.recipe_meta import META, MetaRecipe
from hf_offload.settings.recipe_model import DTYPE_ALIASES, DTYPES, TASKS, ModelRecipe
from hf_offload.settings.recipe_training import training_value
from hf_offload.settings.sampling import SampledLinearConfig
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.shown import shown

__all__ = [
    "DTYPES",
    "DTYPE_ALIASES",
    "RANDOM_TOKENS",
    "TASKS",
    "DataRecipe",
    "HubData",
    "ModelRecipe",
    "Recipe",
    "load_recipe",
    "read_recipe",
]

SECTIONS = (META, "model", "data", "training", "evaluation", "offload", "sampling", "memory")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole training run. Built by :func:`load_recipe`."""

    name: str
    model: ModelRecipe
    data: DataRecipe
    training: Mapping[str, Any]
    offload: OffloadConfig
    evaluation: EvaluationRecipe = dataclasses.field(default_factory=EvaluationRecipe)
    meta: MetaRecipe = dataclasses.field(default_factory=MetaRecipe)
    """What changes nothing about the run."""

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
    ``offload.directory=null`` (back to the default); text and paths are taken as they are written. What the file names under
    ``base`` is merged below it (:mod:`hf_offload.settings.layers`). Raises :class:`OffloadConfigError` with every error in
    it.
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
        for key in list(tree):
            with check:
                if key not in SECTIONS:
                    where = layers.other_layer(key) or name
                    raise OffloadConfigError(
                        f"{where}: unknown section {shown(key)}.{nearest(key, SECTIONS)} Known: {', '.join(SECTIONS)}."
                    )
        sections: dict[str, Mapping[str, Any]] = {}
        for key in SECTIONS:
            sections[key] = {}
            with check:
                section = tree.get(key)
                if section is not None and not isinstance(section, Mapping):
                    raise OffloadConfigError(f"{name}: section {key} is {shown(section)}, not a mapping of settings.")
                sections[key] = section or {}
        data: Any = None
        evaluation: Any = None
        with check:
            meta = from_mapping(MetaRecipe, sections[META], META)
        with check, layers.naming("model"):
            model = from_mapping(ModelRecipe, sections["model"], "model")
        with check, layers.naming("data"):
            data = from_mapping(DataRecipe, sections["data"], "data")
        training: dict[str, Any] = {}
        for key, value in sections["training"].items():
            with check, layers.naming("training"):
                training[key] = training_value(key, value)
        with check, layers.naming("offload"):
            # A recipe without the section asks for no offloading; with it, OffloadConfig's own default holds.
            asked: dict[str, Any] = dict(sections["offload"]) if "offload" in tree else {"tier": "none"}
            if "sampling" in tree:
                if "sampled_linear" in asked:
                    raise OffloadConfigError("offload.sampled_linear and the section sampling set the same: drop one.")
                with check:
                    asked["sampled_linear"] = from_mapping(SampledLinearConfig, sections["sampling"], "sampling")
            if "memory" in tree:
                if "memory_mode" in asked or "memory_mode_kwargs" in asked:
                    raise OffloadConfigError("offload.memory_mode and the section memory set the same: drop one.")
                settings = dict(sections["memory"])
                asked |= {"memory_mode": settings.pop("mode", NONE), "memory_mode_kwargs": settings or None}
            offload = from_mapping(OffloadConfig, asked, "offload")
        with check:
            if sections["data"].get("streaming") is True and int(training.get("max_steps") or 0) <= 0:
                raise OffloadConfigError("data.streaming has no known end: set training.max_steps.")
        random_tokens = sections["data"].get("source") == RANDOM_TOKENS
        with check:
            if random_tokens and int(training.get("max_steps") or 0) <= 0:
                raise OffloadConfigError(f"data.source: {RANDOM_TOKENS} have no end: set training.max_steps.")
        with check, layers.naming("evaluation"):
            evaluation = from_mapping(EvaluationRecipe, sections["evaluation"], "evaluation")
        task = sections["model"].get("task", "causal-lm")
        # A section with errors of its own is missing here: those are reported first.
        if isinstance(task, str) and task in TASKS:
            with check, layers.naming("data"):
                if data is not None:
                    data.check_task(task)
            with check:
                if evaluation is not None:
                    has_validation = sections["data"].get("validation") is not None
                    evaluation.check_run(task, training, has_validation=has_validation)
        with check:
            if not sections["model"].get("name") and not sections["data"].get("tokenizer") and not random_tokens:
                raise OffloadConfigError(
                    "data.tokenizer is missing: a model from random weights brings none. Name one, or give "
                    "tokenizer: {train_bpe: 8192}."
                )
    return Recipe(
        name=name, model=model, data=data, training=training, offload=offload, evaluation=evaluation, meta=meta
    )


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """:func:`read_recipe`, and what only the libraries can check: values of ``model.config``, the section ``memory``.

    Raises :class:`OffloadConfigError` with every error in it. Libraries, which take seconds to load, are not asked about a
    recipe that is wrong anyway.
    """
    recipe = read_recipe(path_or_name, overrides)
    layers = read_layers(find_recipe(path_or_name))
    with collect_errors(f"recipe {recipe.name}") as check:
        with check, layers.naming("model"):
            recipe.model.check_library()
        with check, layers.naming("memory"):
            recipe.offload.mode()
    return recipe
