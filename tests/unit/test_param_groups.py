"""Which weights of a model are projected, which decay, which are stored transposed."""

import pytest
import torch
from torch import nn
from transformers import Trainer
from transformers.pytorch_utils import Conv1D

from hf_offload.errors import OffloadConfigError
from hf_offload.methods.param_groups import param_groups
from hf_offload.methods.projected import GaLoreConfig, ProjectedAdamW
from hf_offload.structure.linears import chosen_linears
from tests.helpers.tiny_models import NAMES, tiny_batch, tiny_model

LINEARS = {
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "gpt_neox": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    "bert": {"query", "key", "value", "dense"},
    "t5": {"q", "k", "v", "o", "wi", "wo"},
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
}


def names_of(groups, **wanted):
    return {
        name
        for group in groups
        if all(group[key] == value for key, value in wanted.items())
        for name, _ in group["params"]
    }


@pytest.mark.parametrize("architecture", LINEARS)
def test_linear_weights_of_the_blocks_are_projected_and_nothing_else(architecture):
    model = tiny_model(architecture)
    chosen = chosen_linears(model)
    assert {name.rpartition(".")[2] for name in chosen} == LINEARS[architecture]
    assert names_of(param_groups(model), projected=True) == {f"{name}.weight" for name in chosen}
    others = names_of(param_groups(model), projected=False)
    assert all(parameter.dim() == 2 for name, parameter in model.named_parameters() if name not in others)
    assert not any("emb" in name or "head" in name or "wte" in name or "bias" in name for name in chosen)


@pytest.mark.parametrize("architecture", NAMES)
def test_every_trainable_parameter_is_in_one_group(architecture):
    model = tiny_model(architecture)
    found = [name for group in param_groups(model, weight_decay=0.1) for name, _ in group["params"]]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("architecture", NAMES)
def test_decay_is_that_of_the_trainer(architecture):
    model = tiny_model(architecture)
    theirs = set(Trainer.get_decay_parameter_names(None, model))
    groups = param_groups(model, weight_decay=0.1)
    assert names_of(groups, weight_decay=0.1) == {name for name, _ in model.named_parameters() if name in theirs}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}


def test_weights_of_gpt2_are_stored_transposed_and_those_of_llama_are_not():
    model = tiny_model("gpt2")
    turned = names_of(param_groups(model), transposed=True)
    assert turned == {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    assert not names_of(param_groups(tiny_model("llama")), transposed=True)


def test_left_means_the_outputs_of_gpt2():
    model = tiny_model("gpt2")
    optimizer = ProjectedAdamW(param_groups(model), GaLoreConfig(rank=4, proj_type="left"))
    model(**tiny_batch("gpt2")).loss.backward()
    optimizer.step()
    weight = model.transformer.h[0].mlp.c_fc.weight
    assert tuple(weight.shape) == (32, 128)  # [in, out]
    assert tuple(optimizer.state[weight]["left"].shape) == (128, 4)
    assert tuple(optimizer.state[weight]["exp_avg"].shape) == (4, 32)


def test_all_takes_what_lies_outside_of_the_blocks_but_never_the_head():
    model = tiny_model("bert")
    more = set(chosen_linears(model, "all")) - set(chosen_linears(model))
    assert more == {"cls.predictions.transform.dense"}
    assert "lm_head" not in chosen_linears(tiny_model("llama"), "all")
    assert "lm_head" not in chosen_linears(tiny_model("gpt2"), "all")
    assert "classifier" in chosen_linears(tiny_model("vit"), "all")


def test_targets_are_ends_of_names():
    model = tiny_model("llama")
    assert set(chosen_linears(model, ["self_attn.q_proj", "layers.1.mlp.up_proj"])) == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }
    assert set(chosen_linears(model, "q_proj, up_proj")) == set(chosen_linears(model, ["q_proj", "up_proj"]))
    assert set(chosen_linears(model, ["lm_head"])) == {"lm_head"}  # not by accident


def test_a_tied_head_is_never_projected():
    model = tiny_model("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    with pytest.raises(OffloadConfigError, match="its weight is an embedding too"):
        chosen_linears(model, ["lm_head"])


def test_frozen_weights_are_left_out():
    model = tiny_model("llama")
    model.model.layers[0].requires_grad_(False)
    assert all(name.startswith("model.layers.1.") for name in chosen_linears(model))
    assert all(one.requires_grad for group in param_groups(model) for _, one in group["params"])
    model.requires_grad_(False)
    with pytest.raises(OffloadConfigError, match="its weight is frozen"):
        param_groups(model)


def test_a_target_that_matches_nothing_lists_what_exists():
    model = tiny_model("llama")
    with pytest.raises(OffloadConfigError, match="Did you mean 'q_proj'") as caught:
        param_groups(model, targets=["k_proj", "q_pro"])
    assert "targets='q_pro' matches no linear layer" in str(caught.value)
    assert "model.layers.N.self_attn.q_proj" in str(caught.value)
    with pytest.raises(OffloadConfigError, match="Linear layers of this model: none"):
        param_groups(nn.Sequential(nn.Embedding(4, 4)))
    with pytest.raises(OffloadConfigError, match="outside of the repeated blocks"):
        param_groups(nn.Sequential(nn.Linear(4, 4)))
    assert len(param_groups(nn.Sequential(nn.Linear(4, 4)), targets="all")) == 2


def test_groups_fit_a_model_without_weights():
    with torch.device("meta"):
        model = tiny_model("llama")
    assert len(names_of(param_groups(model), projected=True)) == 14
