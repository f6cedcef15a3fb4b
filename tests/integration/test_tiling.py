"""Tiled loss and tiled MLP in whole models: the usual results, and never logits of all tokens."""

import copy
import logging

import pytest
import torch
import transformers
from torch import nn

from hf_offload import OffloadCallback, OffloadConfig, OffloadConfigError, OffloadTrainingArguments, offload_activations
from hf_offload.transforms.tiling.logits import TiledLogits
from hf_offload.transforms.tiling.mlp import position_wise, why_not
from tests.helpers.tiny_models import VOCABULARY, gradients, tiny_batch, tiny_model
from tests.helpers.trainers import make_trainer

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
NO_TOKENS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
OTHERS = {
    # caps its logits
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, **HEADS, **NO_TOKENS, final_logit_softcapping=3.0),
    # scales them
    "cohere": lambda: transformers.CohereConfig(**SMALL, **HEADS, **NO_TOKENS, logit_scale=0.5),
    "granite": lambda: transformers.GraniteConfig(**SMALL, num_attention_heads=4, **NO_TOKENS, logits_scaling=3.0),
    # a bias in the head
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, **NO_TOKENS
    ),
    # no head of its own: the embedding's weight
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **NO_TOKENS
    ),
}
TILE = 4 * VOCABULARY * 10
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def model_of(name, dropout=0.0):
    if name in OTHERS:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(OTHERS[name]()).train()
    return tiny_model(name, dropout=dropout)


def batch_of(name):
    return tiny_batch("gpt2" if name in OTHERS else name)


def tiles(**options):
    return OffloadConfig(**{"tier": "none", "tiled_loss": "on", "tile_bytes": TILE} | options)


def step(model, batch, config=None, **extra):
    """Loss, gradients, and what the model gave out."""
    with offload_activations(model, config or OffloadConfig(tier="none")):
        outputs = model(**batch, **extra)
        outputs.loss.backward()
    return outputs.loss.detach(), gradients(model), outputs


def assert_close(found, expected):
    """Of losses and gradients."""
    torch.testing.assert_close(found[0], expected[0], **CLOSE)
    torch.testing.assert_close(found[1], expected[1], **CLOSE)


@pytest.fixture
def no_logits(monkeypatch):
    """Nobody computes logits of all tokens."""

    def refuse(logits):
        raise AssertionError("all logits were computed")

    monkeypatch.setattr("hf_offload.transforms.tiling.logits.true_logits", refuse)


@pytest.mark.parametrize("name", ["bert", "t5", "llama", "mixtral", *OTHERS])
def test_models_give_what_they_gave(name, no_logits):
    model = model_of(name)
    plain, tiled = copy.deepcopy(model), copy.deepcopy(model)
    found = step(tiled, batch_of(name), tiles())
    assert isinstance(found[2].logits, TiledLogits)
    assert_close(found, step(plain, batch_of(name)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision(dtype, no_logits):
    model = model_of("llama")
    found = []
    for config in (None, tiles()):
        one = copy.deepcopy(model)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype is torch.float16)
        with offload_activations(one, config or OffloadConfig(tier="none")):
            with torch.autocast("cpu", dtype=dtype):
                outputs = one(**batch_of("llama"))
            scaler.scale(outputs.loss).backward()
            scaler.unscale_(optimizer)
        found.append((outputs.loss.detach(), gradients(one)))
    (expected_loss, expected), (loss, got) = found
    torch.testing.assert_close(loss, expected_loss, rtol=1e-2, atol=1e-3)
    for key, gradient in expected.items():
        assert (got[key] - gradient).norm() <= 0.02 * gradient.norm() + 1e-6, key


def test_a_loss_outside_of_autocast_meets_the_head_inside(no_logits):
    model = model_of("llama")
    batch = batch_of("llama")
    labels = batch.pop("labels")
    found = []
    for config in (OffloadConfig(tier="none"), tiles()):
        one = copy.deepcopy(model)
        with offload_activations(one, config):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = one(**batch).logits
            assert logits.dtype is torch.bfloat16
            nn.functional.cross_entropy(logits.float().view(-1, VOCABULARY), labels.view(-1)).backward()
        found.append(gradients(one)["lm_head.weight"])
    assert (found[1] - found[0]).norm() <= 0.02 * found[0].norm()


def test_evaluation_and_generation_are_untouched():
    model = model_of("llama")
    batch = batch_of("llama")
    reference = copy.deepcopy(model).eval()
    with offload_activations(model, tiles()):
        model(**batch).loss.backward()
        with torch.no_grad():
            assert type(model(**batch).logits) is torch.Tensor
        model.eval()
        assert type(model(**batch).logits) is torch.Tensor
        assert torch.equal(model(**batch).logits, reference(**batch).logits)
        options = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(
            model.generate(batch["input_ids"], **options), reference.generate(batch["input_ids"], **options)
        )


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails):
    model = model_of("llama")
    head = model.lm_head
    own = head.forward = head.forward if fails else type(head).forward.__get__(head)
    try:
        with offload_activations(model, tiles(tiled_mlp="on")):
            assert head.forward is not own
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert head.forward is own
    assert not any("forward" in layer.mlp.__dict__ for layer in model.model.layers)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")
def test_compiled_models_give_the_same(no_logits):
    model = model_of("llama")
    expected = step(copy.deepcopy(model), batch_of("llama"))
    with offload_activations(model, tiles()):
        compiled = torch.compile(model, backend="aot_eager")
        loss = compiled(**batch_of("llama")).loss
        loss.backward()
    assert_close((loss.detach(), gradients(model)), expected)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"]], ids=["elsewhere", "on the head"])
def test_adapters(targets, no_logits):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(model_of("llama"), settings).train()
    expected = step(copy.deepcopy(model), batch_of("llama"))
    assert_close(step(model, batch_of("llama"), tiles()), expected)


# -- the Trainer -------------------------------------------------------------------------------------------------------


def trained(tmp_path, **options):
    trainer = make_trainer(tmp_path, model_of("llama"), **{"logging_steps": 1, "learning_rate": 1e-2, **options})
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "options",
    [{"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}, {"bf16": True}],
    ids=str,
)
def test_the_trainers_flag(tmp_path, options, no_logits):
    _, expected = trained(tmp_path, **options)
    trainer, found = trained(tmp_path, tiled_loss="on", **options)
    assert found == pytest.approx(expected, rel=2e-3 if options.get("bf16") else 1e-4)
    assert "forward" not in trainer.model.lm_head.__dict__


def test_liger_and_a_tiled_loss_are_one_too_many(tmp_path, caplog):
    arguments = OffloadTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", tiled_loss="on")
    arguments.use_liger_kernel = True
    with pytest.raises(OffloadConfigError, match="use_liger_kernel"):
        OffloadCallback().on_train_begin(arguments, None, None, model=model_of("llama"))
    arguments.tiled_loss = "auto"
    with caplog.at_level(logging.INFO, "hf_offload"):
        callback = OffloadCallback()
        callback.on_train_begin(arguments, None, None, model=model_of("llama"))
    assert not callback.session.tiled
    assert "Liger" in caplog.text


# -- what is refused ---------------------------------------------------------------------------------------------------


def own_loss(logits, labels, **kwargs):
    return (logits.float().logsumexp(-1) * labels.ge(0)).sum()


def test_a_loss_of_the_users_own_is_left_alone(caplog):
    model = model_of("llama")
    model.loss_function = own_loss
    with pytest.raises(OffloadConfigError, match="own_loss"), offload_activations(model, tiles()):
        pass
    with offload_activations(model, tiles(tiled_loss="auto", tile_bytes=None)) as session:
        assert not session.tiled
    assert "own_loss" in caplog.text


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (lambda: tiny_model("llama").model, "no output head"),
        (lambda: tiny_model("vit"), "no output head"),
        (lambda: nn.Linear(4, 4), "no output head"),
    ],
)
def test_a_model_without_a_head_is_refused(build, part):
    model = build()
    with pytest.raises(OffloadConfigError, match=part), offload_activations(model, tiles()):
        pass


def test_a_piece_that_holds_everything_is_an_error():
    model = model_of("llama")
    with (
        offload_activations(model, tiles(tile_bytes="1MiB")),
        pytest.raises(OffloadConfigError, match="nothing would be cut"),
    ):
        model(**batch_of("llama"))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"tile_bytes": "1MiB"}, "nothing is tiled"),
        ({"tiled_mlp": ""}, "is not a list of module names"),
        ({"tiled_mlp": "auto"}, "where nothing else fits the memory budget"),
    ],
)
def test_wrong_settings(options, part):
    with pytest.raises(OffloadConfigError, match=part):
        OffloadConfig(tier="none", **options)


# -- tiled MLP ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "t5", "llama"])
def test_tiled_mlps_give_what_they_gave(name, monkeypatch):
    monkeypatch.setattr("hf_offload.transforms.tiling.cut._LEAST_MODULE_ROWS", 4)
    model = model_of(name)
    expected = step(copy.deepcopy(model), batch_of(name))
    most = []
    for module in position_wise(model).values():
        module.register_forward_hook(lambda *_: None)
        for child in module.modules():
            if isinstance(child, nn.Linear):
                child.register_forward_pre_hook(lambda _, args: most.append(args[0].numel() // args[0].shape[-1]))
    found = step(model, batch_of(name), tiles(tiled_loss="off", tile_bytes=None, tiled_mlp="on"))
    assert all(rows <= 8 for rows in most)
    assert_close(found, expected)


def test_which_modules_are_cut_is_found_by_trying():
    assert list(position_wise(model_of("llama"))) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert list(position_wise(model_of("gpt2"))) == ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    assert all("attention" not in name for name in position_wise(model_of("t5")))
    assert not position_wise(model_of("bert"))  # its two halves are separate modules, with a residual in between


class Mixing(nn.Linear):
    """Every token sees those before it."""

    def forward(self, hidden):
        return super().forward(hidden.cumsum(1))


def test_a_module_that_mixes_tokens_is_found_out():
    assert "depends on others" in why_not(Mixing(16, 16))
    assert why_not(nn.Linear(16, 16)) is None


@pytest.mark.parametrize(
    ("names", "part"),
    [
        ("mpl", "name. Did you mean 'mlp'"),
        ("self_attn", "cannot be cut"),
        ("input_layernorm", "no matrix"),
    ],
)
def test_modules_that_cannot_be_cut_are_named(names, part):
    with pytest.raises(OffloadConfigError, match=part):
        offload_activations(model_of("llama"), tiles(tiled_loss="off", tile_bytes=None, tiled_mlp=names)).__enter__()


def test_a_refusal_leaves_the_head_as_it_was():
    model = model_of("bert")
    with pytest.raises(OffloadConfigError, match="no MLP can be cut"):
        offload_activations(model, tiles(tiled_mlp="on")).__enter__()
    assert "forward" not in model.cls.predictions.decoder.__dict__


def test_named_modules_and_no_others():
    with offload_activations(
        model_of("llama"), tiles(tiled_loss="off", tile_bytes=None, tiled_mlp="layers.1.mlp")
    ) as session:
        assert session.tiled == ["model.layers.1.mlp"]
