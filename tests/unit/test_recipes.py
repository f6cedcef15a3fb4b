import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import hf_offload
from hf_offload import OffloadConfig, OffloadConfigError, SampledLinearConfig
from hf_offload.integrations.launch import shipped_configs
from hf_offload.settings.recipe_files import find_recipe, layer_names, recipe_names
from hf_offload.settings.recipes import HubData, load_recipe
from hf_offload.tensors import parameter_count
from hf_offload.training.arguments import build_arguments
from hf_offload.training.model import build_model
from hf_offload.training.report import describe_model
from hf_offload.training.run import run_recipe

REPOSITORY = Path(hf_offload.__file__).parent.parent


def write(tmp_path, text):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return path


def mistakes(path, *overrides):
    with pytest.raises(OffloadConfigError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "parameters", "layers", "dropout"),
    [
        ("gpt2-medium", 354_823_168, "24", "0.1"),
        ("bert-base", 109_514_298, "12", "0.1"),
        ("t5-base", 222_903_552, "12+12", "0.1"),
        ("llama-8b-layers4", 1_923_125_248, "4", "0"),
    ],
)
def test_presets_have_the_published_shapes(name, parameters, layers, dropout):
    recipe = load_recipe(f"bench/{name}")
    model = build_model(recipe, None, torch.device("meta"))
    assert parameter_count(model) == parameters
    built = describe_model(model)
    assert f", {layers} layers of width " in built
    assert f", dropout {dropout}, sdpa attention, {recipe.model.dtype}, " in built
    assert recipe.model.dtype == ("bfloat16" if "llama" in name else "float32")


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(OffloadConfigError, match="Did you mean 'gpt/demo'") as caught:
        find_recipe("gpt/dmeo")
    assert "Shipped: " in str(caught.value)
    with pytest.raises(OffloadConfigError, match="no such file"):
        find_recipe("nowhere/at_all.yaml")


def test_a_path_wins_over_a_shipped_name(tiny_recipe):
    assert find_recipe(tiny_recipe) == tiny_recipe
    assert load_recipe(tiny_recipe).name == "tiny"


def test_overrides_reach_every_section_and_the_later_wins(tiny_recipe):
    recipe = load_recipe(
        tiny_recipe,
        [
            "training.max_steps=3",
            "training.max_steps=5",
            "offload.tier=ssd",
            "offload.min_bytes=1KiB",
            "model.config.n_layer=1",
            "data.sequence_length=16",
        ],
    )
    assert recipe.training["max_steps"] == 5
    assert recipe.offload == OffloadConfig(tier="ssd", min_bytes=1024)
    assert recipe.model.config["n_layer"] == 1
    assert recipe.data.sequence_length == 16


def test_an_override_can_replace_a_section_and_reset_a_key(tiny_recipe):
    with_directory = ["offload.tier=ssd", "offload.directory=/nvme"]
    assert load_recipe(tiny_recipe, [*with_directory, "offload={tier: none}"]).offload == OffloadConfig(tier="none")
    assert load_recipe(tiny_recipe, [*with_directory, "offload.directory=null"]).offload.directories == ()


def test_no_offload_section_means_no_offloading(tiny_recipe):
    assert load_recipe(tiny_recipe).offload.tier == "none"
    assert load_recipe(tiny_recipe, ["offload.verify=checksum"]).offload.tier == OffloadConfig().tier


def test_a_section_of_its_own_for_the_memory_mode(tiny_recipe):
    recipe = load_recipe(tiny_recipe, ["memory={mode: galore, rank: 8}"])
    assert (recipe.offload.memory_mode, recipe.offload.memory_mode_kwargs) == ("galore", {"rank": 8})
    assert load_recipe(tiny_recipe).offload.memory_mode == "none"
    assert recipe.offload.mode().rank == 8
    assert "Did you mean 'galore'" in mistakes(tiny_recipe, "memory.mode=galor")
    assert "it is one of lora" in mistakes(tiny_recipe, "memory={mode: galore, alpha: 8}")
    assert "memory_mode is 'none'" in mistakes(tiny_recipe, "memory.rank=8")


def test_a_setting_of_offloading_in_the_section_training_says_where_it_belongs(tiny_recipe):
    for name, place in {
        "memory_mode": "offload (or a memory mode into memory): write offload.memory_mode.",
        "tiled_loss": "offload: write offload.tiled_loss.",
        "offload_directory": "offload: write offload.directory.",
        "offload": "offload: write offload.tier.",
    }.items():
        assert f"training.{name}: settings of offloading go into the section {place}" in mistakes(
            tiny_recipe, f"training.{name}=on"
        )


def test_a_section_of_its_own_for_sampling(tiny_recipe):
    recipe = load_recipe(tiny_recipe, ["sampling={ratio: 0.2, estimator: crs}"])
    assert (recipe.offload.tier, recipe.offload.sampling) == ("none", SampledLinearConfig(ratio=0.2, estimator="crs"))
    assert load_recipe(tiny_recipe, ["offload.tier=ssd", "sampling={}"]).offload.sampling == SampledLinearConfig()
    assert "Did you mean 'ratio'" in mistakes(tiny_recipe, "sampling.ration=0.2")
    assert "set the same" in mistakes(tiny_recipe, "sampling.ratio=0.2", "offload.sampled_linear=0.3")


def test_all_mistakes_come_at_once(tiny_recipe):
    message = mistakes(
        tiny_recipe,
        "training.do_train=true",
        "offload.teir=ssd",
        "model.task=translation",
        "data.sequence_lenght=3",
        "data.hub=owner/name",
        "trainning.max_steps=3",
        "no_equals_sign",
    )
    for part in (
        "training.do_train: a recipe always trains",
        "unknown key 'teir'. Did you mean 'tier'?",
        "model.task='translation' is unknown: choose one of causal-lm",
        "unknown key 'sequence_lenght'. Did you mean 'sequence_length'?",
        "exactly one of source, files and hub, not files and hub",
        "unknown section 'trainning'. Did you mean 'training'?",
        "'no_equals_sign' is not an override",
    ):
        assert part in message


def test_all_mistakes_that_the_libraries_know_of_come_at_once(tiny_recipe):
    message = mistakes(
        tiny_recipe,
        "training.max_step=3",
        "training.learning_rate=fast",
        "training.save_total_limit=two",
        "training.bf16=1",
        "model.config.n_layers_=2",
        "memory={mode: galore, rnk: 3}",
    )
    for part in (
        "TrainingArguments has no field 'max_step'. Did you mean 'max_steps'?",
        "training.learning_rate='fast' is not of type float",
        "training.save_total_limit='two' is not of type int or null",
        "training.bf16=1 is not of type bool",
        "gpt2 has no field 'n_layers_'",
        "has no setting 'rnk'",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["model.architecture=gpt22"], "'gpt22' is unknown to transformers. Did you mean 'gpt2'?"),
        (["model.architecture=t5"], "'t5' has no causal language model"),
        (["model.config.n_layer=six"], "n_layer"),
        (["model.config.n_layers_=2"], "gpt2 has no field 'n_layers_'. Did you mean 'n_layer'?"),
        (["model.name=gpt2"], "not both"),
        (["model.architecture=null"], "not neither"),
        (["model.task=masked-lm"], "'gpt2' has no masked language model"),
        (
            ["model={architecture: bert, task: seq2seq-lm}", "data.source_column=a", "data.target_column=b"],
            "'bert' has no sequence-to-sequence language model",
        ),
        (["data={source: random-tokens, tokenizer: gpt2}"], "data.tokenizer: random-tokens are not text"),
        (["data={source: random-tokens, max_bytes: 1MB}"], "is for data.source=python-stdlib only"),
        (["data={source: random-tokens}", "training.max_steps=-1"], "random-tokens have no end"),
        (["model.dtype=float8"], "model.dtype='float8' is unknown"),
        (["data.tokenizer=null"], "data.tokenizer is missing"),
        (["data.tokenizer={train_bpe: 10}"], "too small: give 257 or more"),
        (["data.tokenizer={train_unigram: 300}"], "unknown key 'train_unigram'"),
        (["data.max_bytes=1MB"], "is for data.source=python-stdlib only"),
        (["data.files=null"], "not none"),
        (["data.files=null", "data.source=wikipedia"], "data.source='wikipedia' is unknown"),
        (["data.files=null", "data.hub={split: train}"], "data.hub.name is missing"),
        (["data.streaming=true", "training.max_steps=-1"], "no known end"),
        (["training.offload=ssd"], "go into the section offload"),
        (["training.eval_strategy=steps"], "training.eval_strategy needs data.validation"),
        (["training.max_steps.more=1"], "training.max_steps is not a mapping"),
        (["training.max_steps=[1"], "not valid YAML"),
    ],
)
def test_each_mistake_says_what_and_where(tiny_recipe, overrides, part):
    assert part in mistakes(tiny_recipe, *overrides)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("learning_rate=.nan", "learning_rate=nan is not a number"),
        ("learning_rate=.inf", "learning_rate=inf is not a number"),
        ("output_dir=~nouser/x", "write the path out"),
    ],
)
def test_values_of_the_training_section_that_mean_nothing(tiny_recipe, override, part):
    message = mistakes(tiny_recipe, f"training.{override}")
    assert message.startswith("training.")
    assert part in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("warmup_steps=-1", "warmup_steps >= 0"),
        ("report_to=tensorbord", "report_to='tensorbord' is unknown"),
        ("report_to=[none, wandbb]", "Did you mean 'wandb'"),
        ("optim=adamw_troch", "adamw_troch is not a valid OptimizerNames"),
    ],
)
def test_what_transformers_refuses_of_the_training_section_is_an_error_of_the_recipe(tiny_recipe, override, part):
    with pytest.raises(OffloadConfigError, match="training") as refused:
        build_arguments(load_recipe(tiny_recipe, [f"training.{override}"]))
    assert part in str(refused.value)


@pytest.mark.parametrize(
    "settings", [{"n_embd": -1}, {"n_head": 0}, {"activation_function": "none such"}, {"n_embd": 65}], ids=str
)
def test_what_the_library_refuses_of_a_configuration_is_an_error_of_the_recipe(tiny_recipe, settings):
    with pytest.raises(OffloadConfigError, match=r"section model|model\.config"):
        recipe = load_recipe(tiny_recipe, [f"model.config={json.dumps({'n_layer': 1, 'n_positions': 32} | settings)}"])
        build_model(recipe, None, torch.device("meta"))


def test_a_reporter_that_is_not_installed_is_refused_before_the_training(tiny_recipe):
    with pytest.raises(OffloadConfigError, match=r"training\.report_to: swanlab is not installed"):
        build_arguments(load_recipe(tiny_recipe, ["training.report_to=swanlab"]))


@pytest.mark.parametrize(
    ("setting", "place"),
    [("training.output_dir", "file"), ("training.output_dir", "ring/below"), ("data.cache_dir", "file/below")],
)
def test_a_folder_that_cannot_be_one_is_blamed_itself(tiny_recipe, tmp_path, setting, place):
    (tmp_path / "file").write_text("x")
    (tmp_path / "ring").symlink_to("ring")
    with pytest.raises(OffloadConfigError, match=rf"{setting}=") as refused:
        run_recipe(load_recipe(tiny_recipe, [f"{setting}={tmp_path / place}"]))
    assert "data.files" not in str(refused.value)
    assert len(str(refused.value)) < 800


def test_names_that_are_listed_are_few(tmp_path):
    with pytest.raises(OffloadConfigError) as refused:
        find_recipe("no/such_thing")
    assert len(str(refused.value)) < 400
    for name in ("x" * 300, "~nouser/x", "a\0b", "x/" * 3000):
        with pytest.raises(OffloadConfigError) as refused:
            find_recipe(name)
        assert len(str(refused.value)) < 600


def test_hub_data_has_three_parts(tiny_recipe):
    recipe = load_recipe(tiny_recipe, ["data.files=null", "data.hub=owner/name"])
    assert recipe.data.hub == HubData(name="owner/name", split="train")
    recipe = load_recipe(tiny_recipe, ["data.files=null", "data.hub={name: a/b, config: en, split: validation}"])
    assert recipe.data.hub == HubData(name="a/b", config="en", split="validation")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("model: [", "not valid YAML"),
        ("just words", "is not a recipe"),
        ("", "is not a recipe"),
        ("model: {name: a, name: b}", "the key 'name' is given twice"),
        ("model: {1: a}", "the key 1 is not text"),
    ],
)
def test_files_that_are_no_recipes(tmp_path, text, part):
    message = mistakes(write(tmp_path, text))
    assert part in message
    assert "r.yaml" in message


def test_output_and_cache_directories(tiny_recipe):
    recipe = load_recipe(tiny_recipe)
    assert (recipe.output_dir, recipe.cache_dir) == (Path("out"), Path("out/data"))
    assert load_recipe(tiny_recipe, ["data.cache_dir=elsewhere"]).cache_dir == Path("elsewhere")
    assert load_recipe(tiny_recipe, ["training.output_dir=null"]).output_dir == Path("runs/tiny")


@pytest.mark.skipif(not (REPOSITORY / "pyproject.toml").is_file(), reason="builds the wheel from a checkout")
def test_the_wheel_holds_the_recipes(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling builds the wheel without a network")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert layer_names()
    for name in [*recipe_names(), *layer_names()]:
        assert f"hf_offload/_recipes/{name}.yaml" in names
    assert "hf_offload/cli/main.py" in names
    for path in shipped_configs().values():
        assert f"hf_offload/launch_configs/{path.name}" in names
    assert not [name for name in names if name.startswith(("tests/", "recipes/", "benchmarks/"))]


def test_an_installed_package_finds_its_recipes(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "hf_offload"
    (package / "_recipes" / "gpt").mkdir(parents=True)
    shipped = package / "_recipes" / "gpt" / "other.yaml"
    shipped.write_text("")
    # A folder of the same name that belongs to someone else.
    (package.parent / "recipes").mkdir()
    (package.parent / "recipes" / "soup.yaml").write_text("")
    monkeypatch.setattr(hf_offload, "__file__", str(package / "__init__.py"))
    assert recipe_names() == ["gpt/other"]
    assert find_recipe("gpt/other") == shipped
