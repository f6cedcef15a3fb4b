"""Published configurations in recipes: they are those of the models, and plans need nothing else."""

import pytest
import torch

from hf_offload import OffloadConfigError
from hf_offload.forecast.workload_sources import find_workload
from hf_offload.settings.models import known_model, model_names
from hf_offload.settings.recipe_files import PRESETS, recipe_names
from hf_offload.settings.recipes import load_recipe
from hf_offload.training.model import build_model
from tests.helpers.tables import rows

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
        ("gpt/pythia_1b_full_ssd", "causal-lm", 1_011_781_632),
        ("gpt/pythia_6_9b_qlora_auto", "causal-lm", 6_857_302_016),
        ("bert/base_full_ssd", "masked-lm", 109_514_298),
        ("t5/base_full_ssd", "seq2seq-lm", 222_903_552),
        ("t5/large_full_ssd", "seq2seq-lm", 737_668_096),
        # Without the head of its own, as transformers makes new ones.
        ("t5/flan_xl_lora_ssd", "seq2seq-lm", 2_783_959_040),
        ("llama/1b_full_ssd", "causal-lm", 1_235_814_400),
        ("llama/mistral_7b_qlora_auto", "causal-lm", 7_248_023_552),
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
    assert (found.memory_mode, found.settings.tiled_loss, found.settings.tiled_mlp) == ("qlora", "auto", "off")
    long = find_workload("llama/1b_long_context", ["offload.tile_bytes=1MiB"])
    assert (long.settings.tiled_loss, long.settings.tiled_mlp, long.settings.tile_bytes) == ("on", "on", 1 << 20)
    pairs = find_workload("t5/base_full_ssd")
    assert (pairs.sequence, pairs.target_sequence) == (512, 128)
    assert find_workload("gpt/pythia_6_9b_qlora_auto", ["offload.memory_budget=10GiB"]).budget_bytes == 10 << 30


def test_another_model_does_without_the_shape(tmp_path):
    recipe = load_recipe("llama/1b_lora_ssd", [f"model.name={tmp_path}"])
    assert recipe.model.published is None
    with pytest.raises(OffloadConfigError, match=r"a folder with a config\.json"):
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


PUBLISHED = {
    "bert-large": 335e6, "distilbert-base": 66.4e6, "roberta-base": 125e6, "roberta-large": 355e6,
    "gemma-2b": 2.51e9, "gemma-7b": 8.54e9, "gemma2-2b": 2.61e9, "gemma2-9b": 9.24e9, "gemma2-27b": 27.2e9,
    "gemma3-1b": 1.00e9, "gpt2": 124e6, "gpt2-large": 774e6, "gpt2-xl": 1.56e9, "llama-3b": 3.21e9, "llama-8b": 8.03e9,
    "llama-13b": 13.0e9, "llama-70b": 70.6e9, "mistral-7b": 7.25e9, "mistral-nemo-12b": 12.2e9,
    "mistral-small-24b": 23.6e9, "phi-1.5": 1.42e9, "phi-2": 2.78e9, "phi-3-mini": 3.82e9, "phi-4": 14.7e9,
    "qwen2.5-0.5b": 494e6, "qwen2.5-1.5b": 1.54e9, "qwen2.5-3b": 3.09e9, "qwen2.5-7b": 7.62e9, "qwen2.5-14b": 14.8e9,
    "qwen2.5-32b": 32.8e9, "qwen2.5-72b": 72.7e9, "qwen3-0.6b": 596e6, "qwen3-1.7b": 1.72e9, "qwen3-4b": 4.02e9,
    "qwen3-8b": 8.19e9, "qwen3-14b": 14.8e9, "qwen3-32b": 32.8e9, "t5-small": 60.5e6, "t5-3b": 2.85e9, "t5-11b": 11.3e9,
}  # fmt: skip
"""Parameters, as the models' pages on the hub give them."""


@pytest.mark.parametrize(
    "name",
    rows(
        model_names(),
        quick=[
            "bert-large", "distilbert-base", "roberta-base", "gemma-2b", "gemma2-2b", "gemma3-1b", "gpt2-xl", "llama-8b",
            "mistral-7b", "phi-2", "phi-3-mini", "qwen2.5-0.5b", "qwen3-0.6b", "t5-3b",
        ],
    ),
)  # fmt: skip
def test_a_short_name_stands_for_the_published_model(name):
    found = find_workload(name)
    with torch.device("meta"):
        model = found.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(PUBLISHED[name], rel=0.02)
    shape = known_model(name).shape
    assert {field for field in shape.config if not hasattr(found.config, field)} == set()
    assert found.task != "seq2seq-lm" or found.config.decoder_start_token_id == found.config.pad_token_id
    assert [known_model(one).shape for one in shape.of] == [shape] * len(shape.of)


def test_a_short_name_is_not_that_of_a_recipe():
    taken = {name.removeprefix(PRESETS) for name in recipe_names()}
    assert not taken & set(model_names())


def test_a_name_of_the_hub_that_is_known_needs_no_hub():
    found = find_workload("Qwen/Qwen3-8B", sequence=512)
    assert (found.name, found.config.num_hidden_layers, found.dtype) == ("Qwen/Qwen3-8B", 36, torch.bfloat16)
    assert find_workload("roberta-base").task == "masked-lm"
    assert find_workload("t5-small").task == "seq2seq-lm"


@pytest.mark.parametrize("spelling", ["bfloat16", "bf16", "torch.bfloat16"])
def test_a_dtype_is_taken_in_every_usual_spelling(spelling):
    found = find_workload("gpt2-small", [f"model.dtype={spelling}"], autocast=spelling)
    assert (found.dtype, found.autocast) == (torch.bfloat16, torch.bfloat16)
    assert find_workload("gpt2-small", dtype="fp32", autocast="no").autocast is None


def test_a_model_is_called_what_the_user_calls_it():
    assert [find_workload(name).name for name in ("llama-1b", "bench/llama-1b")] == ["llama-1b", "bench/llama-1b"]
