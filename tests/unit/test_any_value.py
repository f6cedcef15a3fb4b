"""Values of every kind for every setting from every source: an error that names the setting and its source, or a setting."""

import contextlib
import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_offload import (
    OffloadConfig,
    OffloadConfigError,
    OffloadPlugin,
    RecomputeElementwiseConfig,
    SampledLinearConfig,
)
from hf_offload.integrations.arguments import OffloadArguments
from hf_offload.integrations.launch import SECTION, take_section
from hf_offload.settings.environment import ALLOCATOR_VARIABLE, PREFIX, SWITCHES, variable
from hf_offload.settings.evaluation import EvaluationRecipe, Generation
from hf_offload.settings.memory_modes import MODES, memory_mode
from hf_offload.settings.recipe_data import DataRecipe, HubData
from hf_offload.settings.recipe_model import ModelRecipe, ModelShape
from hf_offload.settings.recipe_training import training_fields
from hf_offload.settings.recipes import load_recipe
from hf_offload.settings.schema import FIELDS
from hf_offload.settings.yaml_text import dump_yaml, parse_yaml

RECIPE = """
model: {architecture: gpt2, config: {n_layer: 1, n_embd: 8, n_head: 2, n_positions: 16}}
data: {files: [text.txt], tokenizer: {train_bpe: 300}, sequence_length: 8}
training: {output_dir: out, max_steps: 1}
"""
LONG = "x" * 5000
WORDS = [
    "", " ", "ssd", "auto", "off", "on", "none", "null", "true", "010", "1:30", "1e999", "-1", "0", "3", "2024", "nan",
    "20GiB", "1e400GiB", "20 apples", "a: b", "my # data", "[1", "{", "{}", "[]", '"a', "'", "~", "~nouser/x", "~/x", "/",
    "a,b", ",", "a\0b", "\udcff", "\u00e9", "\n", "<<", "*a", "!!int foo", "0.3", '{"ratio": 2}', "exact", "norms",
    "/a,/a", "9" * 400, LONG, "2001-99-99", "[" * 60, "x/" * 3000, "gpt2", "steps", "tensorboard", "mode", "all", "text.txt",
]  # fmt: skip


class Odd:
    """Neither compares nor has a length or a truth value."""

    __hash__ = None

    def __eq__(self, other):
        raise ZeroDivisionError

    def __len__(self):
        raise ZeroDivisionError

    def __repr__(self):
        return "odd" * 1000


# What YAML can say.
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from(
        [2**31, 2**63, -(2**70), 10**400, 0.0, 0.3, -0.5, 1.0, 1e9, 1.5, 1e308, math.inf, -math.inf, math.nan]
    ),
    st.sampled_from(WORDS),
    st.text(max_size=12),
)
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["ratio", "split", "name", "train_bpe", "of", "x", LONG]), inner, max_size=2)
    ),
    max_leaves=4,
)
# And what Python can.
OBJECTS = st.sampled_from(
    [
        b"ssd", bytearray(b"x"), (), ("ssd",), {"ssd"}, frozenset(), range(3), iter([1]), object(), Odd(), OffloadConfig,
        len, 1j, np.int64(3), np.float32(0.3), np.array([1, 2]), np.array("ssd"), Path("a"), Path("a\0b"), Path("~nouser"),
        [["ssd"]], [None], [Odd()], {1: 2}, {"ratio": Odd()}, [float("nan")], OffloadConfig(),
        RecomputeElementwiseConfig("norms"),
    ]
)  # fmt: skip
ANY = NESTED | OBJECTS

SECTIONS = {
    "model": ModelRecipe,
    "model.shape": ModelShape,
    "data": DataRecipe,
    "data.hub": HubData,
    "evaluation": EvaluationRecipe,
    "evaluation.generation": Generation,
    "offload": OffloadConfig,
    "sampling": SampledLinearConfig,
}
KEYS = [f"{name}.{field.name}" for name, kind in SECTIONS.items() for field in dataclasses.fields(kind)]
KEYS += [
    *SECTIONS, "training", "memory", "memory.mode", "memory.rank", "model.config.n_layer", "model.config.n_layre", "nowhere",
]  # fmt: skip
KEYS += [f"training.{name}" for name in training_fields()]
OF_CLASSES = [(kind, field.name) for kind in SECTIONS.values() for field in dataclasses.fields(kind)]
ARGUMENT_NAMES = [field.name for field in dataclasses.fields(OffloadArguments)]
MODE_SETTINGS = [
    "rank", "alpha", "dropout", "targets", "paged", "scale", "order", "seed", "density", "block_size", "inactive_state",
    "state_dtype", "quant_type", "norm_growth_limit", "update_in_backward",
]  # fmt: skip


GIVEN = {
    ModelRecipe: {"architecture": "gpt2"},
    ModelShape: {"of": "owner/name", "architecture": "gpt2"},
    DataRecipe: {"files": "text.txt"},
    HubData: {"name": "owner/name"},
}


def refuses_or_takes(name, make, *sources):
    """Run ``make``; an error is ours, short, and says which setting it is about and where that stands."""
    try:
        make()
    except OffloadConfigError as error:
        refused = error
    else:
        return False
    for problem in refused.problems or (str(refused),):
        assert len(problem) < 1500, problem
    assert any(word in str(refused) for word in (name, *sources)), str(refused)
    return True


def from_python(draw):
    kind, field = draw(st.sampled_from(OF_CLASSES))
    value = draw(ANY)
    return refuses_or_takes(
        field, lambda: kind(**{**GIVEN.get(kind, {}), field: value}), "give exactly one", "give either"
    )


def from_training_arguments(draw):
    name = draw(st.sampled_from(ARGUMENT_NAMES))
    value = draw(ANY)

    def make():
        arguments = object.__new__(OffloadArguments)
        OffloadArguments.__init__(arguments, **{name: value})

    return refuses_or_takes(name, make, "memory_mode")


def from_environment(draw):
    field = draw(st.sampled_from([*FIELDS, "tire"]))
    text = draw(st.sampled_from(WORDS) | st.text(max_size=12)).replace("\0", "")
    given = draw(st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=1))
    with contextlib.suppress(UnicodeEncodeError):
        os.environ[variable(field)] = text
    try:
        return refuses_or_takes(variable(field), lambda: OffloadPlugin(**given), *given)
    finally:
        os.environ.pop(variable(field), None)


def from_variables_beside_a_recipe(draw):
    known = [variable(field) for field in FIELDS]
    name = draw(st.sampled_from([*known, *SWITCHES, ALLOCATOR_VARIABLE]))
    if draw(st.booleans()):
        place = draw(st.integers(len(PREFIX), len(name)))
        name = name[:place] + draw(st.sampled_from("AXZ_")) + name[place + draw(st.integers(0, 1)) :]
    Path("drawn.yaml").write_text(RECIPE)
    text = draw(st.sampled_from(WORDS)).replace("\0", "")
    os.environ[name] = text
    try:
        refused = refuses_or_takes(name, lambda: load_recipe("drawn.yaml"))
    finally:
        os.environ.pop(name)
    assert refused or name in (*known, *SWITCHES, ALLOCATOR_VARIABLE)
    return refused


def from_section(draw):
    field = draw(st.sampled_from([*FIELDS, "tire"]))
    value = parse_yaml(dump_yaml(draw(NESTED.filter(writable))), "c.yaml")
    environ = {
        variable(field): draw(st.sampled_from(WORDS)) for field in draw(st.sets(st.sampled_from(FIELDS), max_size=1))
    }
    make = lambda: take_section({SECTION: {field: value}}, "c.yaml", environ)  # noqa: E731  read in the next line
    return refuses_or_takes(field, make, "c.yaml", *environ)


def from_recipe_file(draw):
    key = draw(st.sampled_from(KEYS))
    value = draw(NESTED.filter(writable))
    tree = parse_yaml(RECIPE, "r.yaml")
    where = tree
    *parents, last = key.split(".")
    for part in parents:
        where = where.setdefault(part, {})
    where[last] = value
    path = Path("drawn.yaml")
    path.write_text(dump_yaml(tree), encoding="utf-8")
    return refuses_or_takes(key, lambda: load_recipe(path), *key.split("."))


def from_override(draw):
    key = draw(st.sampled_from(KEYS))
    text = draw(st.sampled_from(WORDS) | st.text(max_size=12) | NESTED.filter(writable).map(json.dumps))
    Path("drawn.yaml").write_text(RECIPE)
    return refuses_or_takes(key, lambda: load_recipe("drawn.yaml", [f"{key}={text}"]), *key.split("."))


def from_memory_mode(draw):
    mode = draw(st.sampled_from(sorted(MODES)))
    name = draw(st.sampled_from(MODE_SETTINGS))
    value = draw(ANY)
    return refuses_or_takes(name, lambda: memory_mode(mode, {name: value}), "memory_mode")


def writable(value):
    try:
        return parse_yaml(dump_yaml(value), "x") is not None or True
    except (OffloadConfigError, ValueError):
        return False  # characters that YAML has no way to write, numbers of hundreds of digits


SOURCES = [
    from_python, from_training_arguments, from_environment, from_variables_beside_a_recipe, from_section, from_recipe_file,
    from_override, from_memory_mode,
]  # fmt: skip
RELAXED = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n")


@pytest.mark.parametrize("name", ["memory_mode", "recompute_elementwise"])
def test_a_value_that_cannot_be_compared_is_refused(name):
    with pytest.raises(OffloadConfigError, match=name):
        OffloadArguments(**{name: Odd()})


@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=80, **RELAXED)
@given(data=st.data())
def test_a_value_of_any_kind_becomes_a_setting_or_an_error_that_names_it(here, source, data):
    source(data.draw)
