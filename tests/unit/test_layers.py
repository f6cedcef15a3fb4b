import dataclasses

import pytest

from hf_offload import OffloadConfig, OffloadConfigError
from hf_offload.settings.layers import read_layers
from hf_offload.settings.recipe_files import find_recipe, layer_names, recipe_names
from hf_offload.settings.recipes import apply_override, load_recipe
from hf_offload.settings.shown import listed

OFFLOAD_FIELDS = [field.name for field in dataclasses.fields(OffloadConfig)]
RECIPE = """
base: [_size, _method]
data: {source: random-tokens, sequence_length: 16}
training: {max_steps: 1}
"""
SIZE = """
model:
  architecture: gpt2
  config: {n_layer: 2, n_embd: 32, n_head: 2, attn_pdrop: 0.2}
training: {learning_rate: 1e-3, seed: 7}
"""
METHOD = """
training: {learning_rate: 1e-4, warmup_steps: 5}
offload: {tier: ssd, verify: checksum}
"""


def write(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / "mine.yaml"


@pytest.fixture
def mine(tmp_path):
    return write(tmp_path, mine=RECIPE, _size=SIZE, _method=METHOD)


def mistakes(path, *overrides):
    with pytest.raises(OffloadConfigError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_layers_are_merged_in_order_and_the_files_own_keys_last(mine):
    found = read_layers(mine)
    assert [file.stem for file in found.files] == ["_size", "_method", "mine"]
    assert found.tree["training"] == {"learning_rate": 1e-4, "seed": 7, "warmup_steps": 5, "max_steps": 1}
    assert found.tree["model"]["config"]["n_layer"] == 2
    assert "base" not in found.tree
    recipe = load_recipe(mine)
    assert (recipe.name, recipe.offload.tier, recipe.offload.verify) == ("mine", "ssd", "checksum")


def test_the_command_line_is_above_all_layers(mine):
    recipe = load_recipe(mine, ["training.learning_rate=1e-2", "model.config.n_layer=1"])
    assert recipe.training["learning_rate"] == 1e-2
    assert recipe.model.config == {"n_layer": 1, "n_embd": 32, "n_head": 2, "attn_pdrop": 0.2}


def test_null_goes_back_to_the_default_at_every_depth(mine):
    text = RECIPE + "offload: {verify: null}\nmodel: {config: {attn_pdrop: null}}\n"
    recipe = load_recipe(write(mine.parent, mine=text))
    assert (recipe.offload.tier, recipe.offload.verify) == ("ssd", "off")
    assert "attn_pdrop" not in recipe.model.config
    whole = load_recipe(write(mine.parent, mine=RECIPE + "offload: null\n"))
    assert whole.offload.tier == "none"
    assert load_recipe(mine, ["offload.verify=null"]).offload.verify == "off"


def test_null_with_nothing_below_is_a_value_of_a_configuration(mine):
    text = RECIPE + "model: {config: {bos_token_id: null}}\n"
    assert load_recipe(write(mine.parent, mine=text)).model.config["bos_token_id"] is None


def test_lists_are_replaced_and_not_joined(mine):
    below = "offload: {recompute_elementwise: [norms, dropout]}\n"
    path = write(mine.parent, _method=below, mine=RECIPE + "offload: {recompute_elementwise: [norms]}\n")
    assert read_layers(path).tree["offload"]["recompute_elementwise"] == ["norms"]


def test_a_shape_is_replaced_as_a_whole(mine):
    shape = "model: {{name: {0}, shape: {{of: {0}, architecture: {1}, config: {{{2}}}}}}}\n"
    path = write(
        mine.parent,
        _size=shape.format("a", "gpt2", "n_layer: 2"),
        _method=shape.format("b", "llama", "num_hidden_layers: 3"),
    )
    assert read_layers(path).tree["model"]["shape"]["config"] == {"num_hidden_layers": 3}


def test_a_layer_has_layers_and_a_whole_recipe_is_one(mine):
    path = write(mine.parent, other="base: mine\ntraining: {max_steps: 2}\n")
    found = read_layers(path.with_name("other.yaml"))
    assert [file.stem for file in found.files] == ["_size", "_method", "mine", "other"]
    assert found.tree["training"]["max_steps"] == 2


def test_a_layer_that_is_merged_twice_is_not_changed_by_what_lies_above(mine):
    write(mine.parent, _above="base: [_size]\nmodel: {config: {n_layer: 9}}\n")
    path = write(mine.parent, mine=RECIPE.replace("[_size, _method]", "[_above, _size, _method]"))
    assert load_recipe(path).model.config["n_layer"] == 2


def test_shipped_layers_are_found_from_any_folder_and_neighbours_first(tmp_path):
    text = "base: [gpt/_gpt2]\nmodel: {name: null, config: {n_layer: 1}}\ndata: {source: random-tokens}\n"
    path = write(tmp_path, mine=text + "training: {max_steps: 1}\n")
    assert load_recipe(path).model.config["n_embd"] == 768
    (tmp_path / "gpt").mkdir()
    write(tmp_path / "gpt", _gpt2="model: {architecture: gpt2, config: {n_embd: 24, n_head: 2}}\n")
    assert load_recipe(path, ["data.tokenizer=null"]).model.config == {"n_embd": 24, "n_head": 2, "n_layer": 1}


def test_a_neighbour_may_have_the_name_of_the_shipped_recipe_it_is_based_on(tmp_path):
    (tmp_path / "gpt").mkdir()
    path = write(tmp_path / "gpt", demo="base: gpt/demo\n")
    assert load_recipe(path.with_name("demo.yaml"), ["training.max_steps=3"]).training["max_steps"] == 3


@pytest.mark.parametrize(
    ("texts", "part"),
    [
        ({"mine": "base: [mine]"}, "there is no layer 'mine'"),
        ({"mine": "base: [_a]", "_a": "base: [_b]", "_b": "base: [_a]"}, "in a circle"),
        ({"mine": "base: [_siez]", "_size": ""}, "there is no layer '_siez'"),
        ({"mine": "base: [_siez]", "_size": ""}, "Did you mean '_size'?"),
        ({"mine": "base: [gpt/_gpt3]"}, "Did you mean 'gpt/_gpt2'?"),
        ({"mine": "base: [_a]", "_a": "just words"}, "is no layer of a recipe"),
        ({"mine": "base: [_a]", "_a": ""}, "is no layer of a recipe"),
        ({"mine": "base: [_a]", "_a": "model: ["}, "_a.yaml, line 1"),
        ({"mine": "base: {a: b}"}, "is not a list of layers"),
        ({"mine": "base: [1]"}, "is not a list of layers"),
    ],
)
def test_what_is_no_layer(tmp_path, texts, part):
    assert part in mistakes(write(tmp_path, **texts))


def test_mistakes_of_all_layers_come_at_once_and_say_where(mine):
    write(mine.parent, _method=METHOD.replace("checksum", "checksum, teir: ram, keep_last_count: many") + "dta: {}")
    path = write(
        mine.parent, mine=RECIPE.replace("max_steps: 1", "max_steps: 1, do_train: true") + "offload: {verfy: on}"
    )
    message = mistakes(path)
    method = mine.parent / "_method.yaml"
    for part in (
        f"'teir'. Did you mean 'tier'? Known: {listed(OFFLOAD_FIELDS, 'teir')}. (teir is set in the layer {method}.)",
        f"keep_last_count='many' is not a whole number of blocks. (keep_last_count is set in the layer {method}.)",
        f"{method}: unknown section 'dta'",
        "training.do_train: a recipe always trains: drop it.\n",
        f"unknown key 'verfy'. Did you mean 'verify'? Known: {listed(OFFLOAD_FIELDS, 'verfy')}.\n",
    ):
        assert part in f"{message}\n"


def test_a_key_that_the_recipe_itself_has_set_is_not_blamed_on_a_layer(mine):
    path = write(mine.parent, mine=RECIPE + "offload: {tier: floppy}\n")
    assert "is set in" not in mistakes(path)
    assert "tier='floppy'" in mistakes(path)


def test_layers_are_no_recipes():
    assert not set(layer_names()) & set(recipe_names())
    assert {"llama/_8b", "_methods/lora"} <= set(layer_names())
    for name in ("llama/_8b", "_methods/lora"):
        with pytest.raises(OffloadConfigError, match="is a layer, not a recipe"):
            find_recipe(name)


def test_a_file_with_an_underscore_is_no_recipe(mine):
    with pytest.raises(OffloadConfigError, match="is a layer"):
        find_recipe(mine.with_name("_size.yaml"))


def test_a_folder_with_an_underscore_holds_recipes_all_the_same(tmp_path):
    (tmp_path / "_x").mkdir()
    path = write(tmp_path / "_x", mine="model: {}\n")
    assert find_recipe(path) == path


def test_an_override_resets_only_what_is_there():
    tree = {"offload": {"tier": "ssd"}}
    apply_override(tree, "offload.tier=null")
    apply_override(tree, "model.config.bos_token_id=null")
    assert tree == {"offload": {}, "model": {"config": {"bos_token_id": None}}}
