"""Changes from the command line: values are YAML."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_offload import OffloadConfigError
from hf_offload.bench.steps import plan_steps
from hf_offload.bench.strategies import parse_strategies
from hf_offload.settings.recipes import apply_override, load_recipe, read_recipe, text_override

TEXTS = [
    "2024",
    "my # data",
    "null",
    "a: b",
    "[a]",
    "{a: b}",
    "010",
    "1:30",
    "true",
    "~",
    "'a",
    '"a"',
    "- a",
    "&a",
    "",
    " a ",
]


def changed(override):
    tree = {}
    apply_override(tree, override)
    return tree


@pytest.mark.parametrize("key", ["data.text_column", "model.name", "training.run_name", "data.files", "data.hub"])
@pytest.mark.parametrize("text", ["2024", "a: b", "010", "true", "1e5"])
def test_text_that_is_something_else_in_yaml_is_refused_or_quoted(tiny_recipe, key, text):
    with pytest.raises(OffloadConfigError, match=key):
        load_recipe(tiny_recipe, [f"{key}={text}"])
    section, name = key.split(".")
    assert changed(f"{key}='{text}'") == {section: {name: text}}


def test_a_word_is_the_whole_of_the_text():
    assert changed("data.data_dir=my # data") == {"data": {"data_dir": "my # data"}}
    assert changed("data.data_dir=/a b/c") == {"data": {"data_dir": "/a b/c"}}


def test_values_are_yaml():
    assert changed("data.files=[a, b]") == {"data": {"files": ["a", "b"]}}
    assert changed("training.max_steps=010") == {"training": {"max_steps": 10}}
    assert changed("training.learning_rate=5e-4") == {"training": {"learning_rate": 5e-4}}
    assert changed("data.streaming=true") == {"data": {"streaming": True}}
    assert changed("model.config.n_layer=2") == {"model": {"config": {"n_layer": 2}}}
    assert changed("offload.tiled_loss=on") == {"offload": {"tiled_loss": "on"}}
    assert changed("data.text_column=null") == {"data": {"text_column": None}}
    assert changed("data.text_column='null'") == {"data": {"text_column": "null"}}
    assert changed("data.text_column=") == {"data": {"text_column": None}}


@settings(suppress_health_check=list(HealthCheck))
@given(st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20))
def test_text_of_an_option_is_that_text_whatever_it_looks_like(text):
    override = text_override("data.data_dir", text)
    assert changed(override) == {"data": {"data_dir": text}}


@pytest.mark.parametrize("name", ["2024", "my # data", "null", "a: b", "[a]", "010", "~", "'a"])
def test_folders_of_a_benchmark_are_text(tiny_recipe, tmp_path, name):
    plan = plan_steps(str(tiny_recipe), (), parse_strategies("baseline"), output=tmp_path / name)
    recipe = read_recipe(tiny_recipe, plan.overrides_for(plan.case))
    assert recipe.output_dir == tmp_path / name / "work"
    assert recipe.cache_dir == tmp_path / name / "data"


def test_a_mistake_in_an_override_repeats_little_of_it():
    with pytest.raises(OffloadConfigError) as refused:
        changed("x" * 10_000)
    assert len(str(refused.value)) < 500
