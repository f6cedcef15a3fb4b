"""Sampled linear layers in real models: what is converted, what is saved, and what they live with."""

import copy
import logging
import pickle
import weakref

import peft
import pytest
import torch
from torch import nn

from hf_offload import (
    OffloadConfig,
    OffloadConfigError,
    SampledLinearConfig,
    attach,
    measure_errors,
    offload_activations,
)
from hf_offload.transforms.sampling.apply import convert_linears
from hf_offload.transforms.sampling.linear import PADDING_WEIGHT, SampledConv1D, SampledLinear
from tests.helpers import live_bytes
from tests.helpers.tiny_models import gradients, switch_on_checkpointing, tiny_batch, tiny_model, weights
from tests.helpers.trainers import make_trainer

CONFIG = SampledLinearConfig(ratio=0.25, min_rows=1)


@pytest.mark.parametrize(
    ("name", "converted", "left"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}, {"o_proj", "lm_head"}),
        ("gpt2", {"c_attn", "c_fc", "mlp.c_proj"}, {"attn.c_proj", "lm_head"}),
        (
            "bert",
            {"query", "key", "value", "intermediate.dense", "output.dense"},
            {"attention.output.dense", "decoder"},
        ),
        ("t5", {"q", "k", "v", "wi", "wo"}, {"SelfAttention.o", "EncDecAttention.o", "lm_head"}),
        ("gpt_neox", {"query_key_value", "dense_h_to_4h", "dense_4h_to_h"}, {"attention.dense"}),
    ],
)
def test_auto_takes_what_is_worth_it(name, converted, left):
    model = tiny_model(name)
    report = convert_linears(model, CONFIG)
    for end in converted:
        assert any(one.endswith(f".{end}") for one in report.changes), end
    for end in left:
        assert not any(one.endswith(end) and "mlp" not in one and "attention" in end for one in report.changes), end
        assert any(one.endswith(end) for one in report.left), end
    assert all(report.left.values())
    usual = weights(tiny_model(name))
    assert weights(model).keys() == usual.keys()
    assert model.state_dict().keys() == tiny_model(name).state_dict().keys()
    report.restore()
    assert not any(isinstance(module, (SampledLinear, SampledConv1D)) for module in model.modules())
    assert not any("draws" in vars(module) for module in model.modules())


def saved_bytes(model):
    return live_bytes.saved_bytes(lambda: model(**tiny_batch("llama", size=4)), model)


def test_layers_of_one_input_keep_one_part():
    plain, shared, apart = tiny_model("llama"), tiny_model("llama"), tiny_model("llama")
    targets = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    convert_linears(shared, SampledLinearConfig(ratio=0.25, targets=targets))
    convert_linears(apart, SampledLinearConfig(ratio=0.25, targets=targets, share_inputs=False))
    sizes = [saved_bytes(model) for model in (plain, shared, apart)]
    assert sizes[1] < sizes[2] < sizes[0]
    rows, width = 4 * 24, 32
    part = rows // 4 * (4 * width + 8)  # the rows, and where they were
    assert sizes[2] - sizes[1] == 2 * 3 * part  # of five parts, two are enough; in each of two blocks


def test_what_is_saved_can_leave():
    """Whoever moves saved tensors away frees their memory: nothing else holds the rows."""
    model = tiny_model("llama")
    seen = []

    def pack(tensor):
        seen.append(weakref.ref(tensor.untyped_storage()))
        return tensor.clone()

    for estimator in ("wta-crs", "rad", "features"):
        conversion = convert_linears(
            model, SampledLinearConfig(ratio=0.25, min_rows=1, estimator=estimator, targets="all")
        )
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(**tiny_batch("llama")).loss
        own = {id(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}
        alive = [storage for reference in seen if (storage := reference()) is not None and id(storage) not in own]
        assert len(alive) <= 2  # the labels, and what the batch itself holds
        loss.backward()
        conversion.restore()


def quantised(model):
    """The base of QLoRA: the linear layers of the blocks in 4 bits."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            layer = bitsandbytes.nn.Linear4bit(module.in_features, module.out_features, bias=False, quant_type="nf4")
            layer.weight = bitsandbytes.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            model.set_submodule(name, layer)
    model.is_loaded_in_4bit = True  # as transformers says it to peft
    return model.to("cpu")  # this is what quantises


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft still uses the older name
def test_adapters_of_a_quantised_base():
    settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(quantised(tiny_model("llama", dropout=0.0)), settings)
    assert type(model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")).__name__ == "Linear4bit"
    model(**tiny_batch("llama")).loss.backward()
    exact = gradients(model)
    before = saved_bytes(model)
    report = convert_linears(model, CONFIG)
    assert len(report.changes) == 2 * 6
    assert all(".lora_A." in name for name in report.changes)
    assert saved_bytes(model) < before
    model.zero_grad()
    model(**tiny_batch("llama")).loss.backward()
    found = gradients(model)
    for name, gradient in exact.items():
        sampled = name.removesuffix(".weight") in report.changes
        assert torch.equal(found[name], gradient) != sampled, name


def seeded_gradients(model, name="llama", steps=1):
    torch.manual_seed(5)
    for step in range(steps):
        model(**tiny_batch(name, seed=step)).loss.backward()
    return gradients(model)


@pytest.mark.parametrize(("reentrant", "estimator"), [(False, "wta-crs"), (True, "rad")])
def test_a_recompute_draws_the_same(reentrant, estimator, caplog):
    """Recomputing draws again, from the same random state: gradients are those of a run that recomputes nothing."""
    config = SampledLinearConfig(ratio=0.25, min_rows=1, estimator=estimator)
    plain, recomputed = (tiny_model("llama", dropout=0.1) for _ in range(2))
    for model in (plain, recomputed):
        convert_linears(model, config)
    switch_on_checkpointing(recomputed, {"use_reentrant": reentrant})
    expected, found = seeded_gradients(plain), seeded_gradients(recomputed)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft still uses the older name
@pytest.mark.parametrize("first", ["lora", "sampling"])
def test_lora_before_and_after(first):
    model = tiny_model("llama")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    if first == "sampling":
        before = convert_linears(model, CONFIG)
        model = peft.get_peft_model(model, settings)
        before.restore()  # frozen now
        report = convert_linears(model, CONFIG)
    else:
        model = peft.get_peft_model(model, settings)
        report = convert_linears(model, CONFIG)
    assert all(".lora_A." in name for name in report.changes)
    assert len(report.changes) == 2 * 3
    assert report.left["base_model.model.model.layers.0.self_attn.q_proj.base_layer"].startswith("its weight is frozen")
    model(**tiny_batch("llama")).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    report.restore()
    merged = model.merge_and_unload()
    assert merged.state_dict().keys() == tiny_model("llama").state_dict().keys()


def test_evaluation_and_copies():
    model = tiny_model("llama").eval()
    expected = model(**tiny_batch("llama")).logits
    convert_linears(model, CONFIG)
    assert torch.equal(model(**tiny_batch("llama")).logits, expected)
    twin = copy.deepcopy(model)
    assert twin.model.layers[0].self_attn.q_proj.draws is twin.model.layers[1].mlp.up_proj.draws
    assert twin.model.layers[0].self_attn.q_proj.draws is not model.model.layers[0].self_attn.q_proj.draws


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile's own
def test_compiled():
    model = tiny_model("llama", dropout=0.0)
    convert_linears(model, CONFIG)
    expected = seeded_gradients(model)
    model.zero_grad()
    compiled = torch.compile(model, backend="eager")
    torch.manual_seed(5)
    compiled(**tiny_batch("llama", seed=0)).loss.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


# ------------------------------------------------------------------------------------------------------------ diagnostics


def test_errors_are_those_of_the_estimates():
    """The diagnostic says what many sampled backwards of one layer show."""
    model = tiny_model("llama", dropout=0.0)
    target = "layers.1.mlp.down_proj"
    config = SampledLinearConfig(ratio=0.25, min_rows=1, targets=target)
    inputs = tiny_batch("llama", size=4)
    (error,) = measure_errors(model, inputs, config, ratios=[0.25], draws=300)
    assert error.name == f"model.{target}"
    weight = model.get_submodule(error.name).weight
    model(**inputs).loss.backward()
    exact = weight.grad.clone()
    convert_linears(model, config)
    squares = []
    for _ in range(300):
        model.zero_grad()
        model(**inputs).loss.backward()
        squares.append((weight.grad - exact).square().sum())
    expected = float(torch.stack(squares).mean().sqrt() / exact.norm())
    assert error.errors[0.25] == pytest.approx(expected, rel=0.15)


def test_more_rows_are_nearer_and_the_smallest_that_do_are_suggested():
    model = tiny_model("llama", dropout=0.0)

    def measured(tolerated):
        torch.manual_seed(0)
        return measure_errors(
            model, tiny_batch("llama", size=8), SampledLinearConfig(min_rows=1), draws=30, tolerated=tolerated
        )

    found = measured(1e9)
    assert len(found) == 2 * 6
    assert all(layer.errors[0.05] > layer.errors[0.2] > layer.errors[0.5] > 0 for layer in found)
    assert {layer.suggested_ratio for layer in found} == {0.05}
    assert measured(found[3].errors[0.2])[3].suggested_ratio == 0.2
    assert {layer.suggested_ratio for layer in measured(0.0)} == {None}


def test_measuring_leaves_the_training_as_it_was():
    model = tiny_model("llama")
    model(**tiny_batch("llama")).loss.backward()
    before, state = gradients(model), torch.get_rng_state()
    measure_errors(model, tiny_batch("llama", seed=1))
    assert all(torch.equal(gradients(model)[name], gradient) for name, gradient in before.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_pre_hooks or module._backward_hooks for module in model.modules())


def test_a_model_without_a_loss_cannot_be_measured():
    inputs = {"input_ids": tiny_batch("llama")["input_ids"]}
    with pytest.raises(OffloadConfigError, match="give labels among the inputs"):
        measure_errors(tiny_model("llama"), inputs)


# --------------------------------------------------------------------------------------------------- by a flag, mistakes


@pytest.mark.parametrize("value", ["0.25", '{"ratio": 0.25, "min_rows": 1, "estimator": "crs"}'])
def test_one_argument_of_the_trainer_is_enough(value, tmp_path, caplog):
    model = tiny_model("llama")
    trainer = make_trainer(tmp_path, model, sampled_linear=value)
    with caplog.at_level(logging.INFO, "hf_offload"):
        trainer.train()
    assert "linear layers estimate the gradient of their weight" in caplog.text
    assert not any(isinstance(module, SampledLinear) for module in model.modules())  # given back


def test_layers_that_were_sampled_before_stay_so():
    model = tiny_model("llama")
    before = convert_linears(model, SampledLinearConfig(ratio=0.25, targets="q_proj")).changes
    session = attach(model, OffloadConfig(tier="none", sampled_linear=0.25))
    assert session.sampled
    session.detach()
    left = [name for name, module in model.named_modules() if isinstance(module, SampledLinear)]
    assert left == list(before)


@pytest.mark.parametrize(
    ("make", "targets", "part"),
    [
        (lambda: tiny_model("llama"), "qproj", r"Did you mean 'q_proj'\?.*model.layers.N.self_attn.q_proj"),
        (lambda: tiny_model("llama").requires_grad_(False), "all", "its weight is frozen"),
        (lambda: nn.Sequential(nn.GELU()), "all", "Linear layers of this model: none"),
    ],
)
def test_targets_that_match_nothing(make, targets, part):
    model = make()
    with pytest.raises(OffloadConfigError, match=part):
        convert_linears(model, SampledLinearConfig(targets=targets))
    assert not any(isinstance(module, SampledLinear) for module in model.modules())


def test_the_models_own_mask_says_what_is_padding():
    """BERT's padded row; T5's decoder has rows of its own; what is changed is taken off again."""
    config = OffloadConfig(tier="none", sampled_linear={"ratio": 0.25, "min_rows": 1})
    model = tiny_model("bert")
    with offload_activations(model, config):
        draws = model.bert.encoder.layer[0].intermediate.dense.draws
        batch = tiny_batch("bert", size=2)
        model(**batch)
        weights = draws._weights(torch.zeros(2, 24, 32)).reshape(2, 24)
        assert torch.equal(weights == 1, batch["attention_mask"] == 1)
        assert (weights[batch["attention_mask"] == 0] == PADDING_WEIGHT).all()
        assert draws._weights(torch.zeros(2, 12, 32)) is None
        copy.deepcopy(model)(**batch)
        pickle.loads(pickle.dumps(model))(**batch)
        model(batch["input_ids"], labels=batch["labels"])
        assert draws._weights(torch.zeros(2, 24, 32)) is None
    assert not model._forward_pre_hooks
