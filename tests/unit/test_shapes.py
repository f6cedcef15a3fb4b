"""Published configurations in recipes: they are those of the models, and plans need nothing else."""

import pytest
import torch

from hf_offload import OffloadConfigError
from hf_offload.forecast.workload_sources import find_workload
from hf_offload.settings.recipes import load_recipe
from hf_offload.training.model import build_model

RANDOM = [
    "model.name=null",
    "data={source: random-tokens}",
    "training={max_steps: 1}",
    "evaluation=null",
    "memory=null",
]


@pytest.mark.parametrize(
    ("name", "task", "parameters"),
    [
        ("gpt/gpt2_full_ssd", "causal-lm", 124_439_808),
        ("gpt/gpt2_xl_full_ssd", "causal-lm", 1_557_611_200),
        ("gpt/pythia_1b_full_ssd", "causal-lm", 1_011_781_632),
        ("gpt/pythia_6_9b_qlora_auto", "causal-lm", 6_857_302_016),
        ("bert/base_full_ssd", "masked-lm", 109_514_298),
        ("bert/large_full_ssd", "masked-lm", 335_174_458),
        ("bert/roberta_base_full_ssd", "masked-lm", 124_697_433),
        ("t5/base_full_ssd", "seq2seq-lm", 222_903_552),
        ("t5/large_full_ssd", "seq2seq-lm", 737_668_096),
        (
            "t5/flan_xl_lora_ssd",
            "seq2seq-lm",
            2_783_959_040,
        ),  # without the head of its own, as transformers makes new ones
        ("llama/1b_full_ssd", "causal-lm", 1_235_814_400),
        ("llama/3b_full_ssd", "causal-lm", 3_212_749_824),
        ("llama/8b_full_ssd", "causal-lm", 8_030_261_248),
        ("llama/mistral_7b_qlora_auto", "causal-lm", 7_248_023_552),
        ("llama/qwen3_8b_lora_ssd", "causal-lm", 8_190_735_360),
    ],
)
def test_a_shape_has_as_many_parameters_as_the_published_model(name, task, parameters):
    recipe = load_recipe(name, [*RANDOM, f"model.task={task}"])
    model = build_model(recipe, None, torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_a_recipe_of_the_hub_is_planned_without_the_hub():
    found = find_workload("llama/8b_qlora_auto", ["data.sequence_length=1024"])
    assert (found.config.hidden_size, found.config.num_hidden_layers, found.sequence) == (4096, 32, 1024)
    assert found.config.use_cache is False
    assert (found.memory_mode, found.tiled_loss, found.tiled_mlp) == ("qlora", "auto", "off")
    long = find_workload("llama/1b_long_context", ["offload.tile_bytes=1MiB"])
    assert (long.tiled_loss, long.tiled_mlp, long.cut.tile_bytes) == ("on", "on", 1 << 20)
    pairs = find_workload("t5/base_full_ssd")
    assert (pairs.sequence, pairs.target_sequence) == (512, 128)
    assert find_workload("gpt/pythia_6_9b_qlora_auto", ["offload.memory_budget=10GiB"]).budget_bytes == 10 << 30


def test_another_model_does_without_the_shape(tmp_path):
    recipe = load_recipe("llama/1b_lora_ssd", [f"model.name={tmp_path}"])
    assert recipe.model.published is None
    with pytest.raises(OffloadConfigError, match=r"not a shipped recipe, a folder with a config\.json"):
        find_workload("llama/1b_lora_ssd", ["model.name=owner/another"])
    base = load_recipe("llama/1b_lora_ssd", ["model.name=meta-llama/Llama-3.2-1B"])
    assert base.model.published is not None


def test_without_a_name_the_shape_is_that_of_random_weights():
    recipe = load_recipe("gpt/gpt2_full_ssd", [*RANDOM, "model.config.n_layer=1"])
    assert recipe.model.architecture == "gpt2"
    assert (recipe.model.config["n_layer"], recipe.model.config["n_embd"]) == (1, 768)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model.shape=7", "is not a mapping with of, architecture and config"),
        ("model.shape.of=null", "of"),
        ("model.shape.of=[]", "is not a list of names of the hub"),
        ("model.shape.architecture=gpt22", "Did you mean 'gpt2'?"),
        ("model.shape.config=7", "is not a mapping of configuration fields"),
        ("model.shape.config.n_layers=2", "gpt2 has no field 'n_layers'. Did you mean 'n_layer'?"),
        ("model.shape.confg={}", "Did you mean 'config'?"),
        ("model.config.n_layer=2", "model.config is for models from random weights"),
    ],
)
def test_what_is_no_shape(override, part):
    with pytest.raises(OffloadConfigError) as caught:
        load_recipe("gpt/gpt2_full_ssd", [override])
    assert part in str(caught.value)
