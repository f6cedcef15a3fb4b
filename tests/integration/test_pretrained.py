"""Models made with their weights on a tier: the bits of ``from_pretrained`` and ``from_config``, one weight at a time."""

import copy
import hashlib
import shutil
import threading

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    TrainerCallback,
    Wav2Vec2Config,
    Wav2Vec2Model,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from hf_offload import (
    OffloadConfig,
    OffloadConfigError,
    StorageError,
    attach,
    create_from_config,
    load_pretrained,
)
from hf_offload.settings.recipes import load_recipe
from hf_offload.state.registry import parked_of
from hf_offload.state.weights import weights_of
from hf_offload.storage.store import whole_pages
from hf_offload.training.run import run_recipe
from tests.helpers import tiny_models
from tests.helpers.train import take_steps
from tests.helpers.trainers import make_trainer

_OTHERS = {
    # Experts are merged, weights are tied between encoder and decoder, a weight is computed from two parameters.
    "mixtral": (
        AutoModelForCausalLM,
        MixtralConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4,
        ),
    ),
    "whisper": (
        WhisperForConditionalGeneration,
        WhisperConfig(
            vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0, bos_token_id=1,
            eos_token_id=1, decoder_start_token_id=1,
        ),
    ),
    "wav2vec2": (
        Wav2Vec2Model,
        Wav2Vec2Config(
            vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
            conv_dim=(32, 32), conv_stride=(2, 2), conv_kernel=(3, 3), num_feat_extract_layers=2,
            num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
        ),
    ),
}  # fmt: skip
NAMES = [*tiny_models.NAMES, *_OTHERS]


def model_of(name):
    """A class and a configuration."""
    if name in _OTHERS:
        return _OTHERS[name]
    made = tiny_models._ARCHITECTURES[name]
    return made.model, made.config(0.0)


def gpt2(**values):
    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 96, "n_positions": 32}
    return GPT2Config(**{"bos_token_id": 0, "eos_token_id": 0, **sizes, **values})


def from_config(kind, config):
    return (getattr(kind, "from_config", None) or kind._from_config)(copy.deepcopy(config))


def on_tier(folder, **values):
    """Settings that let as little as possible stay in memory."""
    return OffloadConfig(
        **{"tier": "none", "params": "ssd", "directory": folder, "memory_budget": 4096, "min_bytes": 1} | values
    )


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def described(model):
    """Everything of a model that a user may look at."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        "parameters": {
            name: (p.dtype, p.shape, p.stride(), p.requires_grad, p.is_leaf, hashlib.sha256(bits(p)).hexdigest())
            for name, p in parameters.items()
        },
        "buffers": {name: (b.dtype, bits(b)) for name, b in model.named_buffers()},
        "tied": [[other for other in parameters if parameters[other] is p] for p in parameters.values()],
        "training": model.training,
        "class": type(model),
        "config": {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"},
        "random": torch.get_rng_state().tolist(),
    }


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def checkpoint(tmp_path):
    """Of a GPT-2, in several files."""
    torch.manual_seed(0)
    GPT2LMHeadModel(gpt2()).save_pretrained(tmp_path / "checkpoint", max_shard_size="100KB")
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 3
    return tmp_path / "checkpoint"


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in NAMES), ("llama", "bfloat16"), ("mixtral", "bfloat16")]
)
def test_a_loaded_model_is_that_of_from_pretrained(name, dtype, tmp_path):
    kind, config = model_of(name)
    torch.manual_seed(0)
    from_config(kind, config).save_pretrained(tmp_path / "checkpoint")
    torch.manual_seed(1)
    expected = described(kind.from_pretrained(tmp_path / "checkpoint", dtype=dtype))
    torch.manual_seed(1)
    found = load_pretrained(kind, tmp_path / "checkpoint", config=on_tier(tmp_path), dtype=dtype)
    assert described(found) == expected
    residency = weights_of(found)
    assert residency.most_bytes < residency.total_bytes
    assert residency.bytes_in_memory <= residency.limit_bytes


@pytest.mark.parametrize("name", ["gpt2", "t5", *_OTHERS])
def test_a_created_model_is_that_of_from_config(name, tmp_path):
    kind, config = model_of(name)
    torch.manual_seed(3)
    expected = described(from_config(kind, config))
    torch.manual_seed(3)
    found = create_from_config(kind, copy.deepcopy(config), config=on_tier(tmp_path))
    assert described(found) == expected
    assert weights_of(found).most_bytes < weights_of(found).total_bytes


@pytest.mark.parametrize("name", ["gpt2", *_OTHERS])
def test_saved_files_are_those_of_the_model_in_memory(name, tmp_path):
    kind, config = model_of(name)
    torch.manual_seed(0)
    from_config(kind, config).save_pretrained(tmp_path / "checkpoint")
    sizes = {"max_shard_size": "40KB"}
    kind.from_pretrained(tmp_path / "checkpoint").save_pretrained(tmp_path / "memory", **sizes)
    model = load_pretrained(kind, tmp_path / "checkpoint", config=on_tier(tmp_path))
    model.save_pretrained(tmp_path / "tier", **sizes)
    assert files(tmp_path / "tier") == files(tmp_path / "memory")
    assert len(list((tmp_path / "tier").glob("*.safetensors"))) > 1


def test_what_a_checkpoint_lacks_is_drawn_as_from_pretrained_does(checkpoint, tmp_path):
    options = {"num_labels": 3, "pad_token_id": 0}
    torch.manual_seed(5)
    expected = described(AutoModelForSequenceClassification.from_pretrained(checkpoint, **options))
    torch.manual_seed(5)
    config = on_tier(tmp_path)
    found = load_pretrained(AutoModelForSequenceClassification, checkpoint, config=config, **options)
    assert described(found) == expected


def test_a_configuration_and_information_go_to_from_pretrained(checkpoint, tmp_path):
    config = gpt2(attn_pdrop=0.25)
    expected, _ = GPT2LMHeadModel.from_pretrained(checkpoint, config=config, output_loading_info=True)
    found, information = load_pretrained(
        GPT2LMHeadModel, checkpoint, config=on_tier(tmp_path), model_config=config, output_loading_info=True
    )
    assert found.config.attn_pdrop == expected.config.attn_pdrop == 0.25
    assert not information["mismatched_keys"]
    assert weights_of(found) is not None


def test_without_params_it_is_from_pretrained(checkpoint):
    model = load_pretrained(GPT2LMHeadModel, checkpoint, config=OffloadConfig(tier="none"))
    assert weights_of(model) is None
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize(("budget", "leaves"), [("1GiB", False), ("100KiB", True)])
def test_auto_leaves_in_memory_what_fits(budget, leaves, checkpoint, tmp_path):
    config = on_tier(tmp_path, params="auto", memory_budget=budget)
    model = load_pretrained(GPT2LMHeadModel, checkpoint, config=config)
    assert (weights_of(model) is not None) is leaves


def test_weights_stay_on_the_tier_whatever_a_run_asks_for(checkpoint, tmp_path):
    model = load_pretrained(GPT2LMHeadModel, checkpoint, config=on_tier(tmp_path))
    residency = weights_of(model)
    limit = residency.limit_bytes
    session = attach(model, OffloadConfig(tier="none"))
    assert weights_of(model) is residency
    assert residency.limit_bytes == limit
    assert "weights" in session.stats.accounts
    session.detach()
    assert weights_of(model) is residency


def test_modules_of_other_threads_are_left_alone(checkpoint, tmp_path, monkeypatch):
    made = []
    whole = GPT2LMHeadModel.tie_weights

    def meanwhile(*args, **kwargs):
        thread = threading.Thread(target=lambda: made.append(nn.Linear(64, 64)))
        thread.start()
        thread.join()
        return whole(*args, **kwargs)

    monkeypatch.setattr(GPT2LMHeadModel, "tie_weights", meanwhile)
    model = load_pretrained(GPT2LMHeadModel, checkpoint, config=on_tier(tmp_path))
    assert made
    assert all(type(p) is nn.Parameter for each in made for p in each.parameters())
    assert all(parked_of(p) is None for each in made for p in each.parameters())
    assert all(parked_of(p) is not None for p in model.parameters())
    assert type(nn.Linear(64, 64).weight) is nn.Parameter  # afterwards


# -- what goes wrong ------------------------------------------------------------------------------------------------------


def remove(path):
    path.unlink()


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-100])


def remove_all(path):
    shutil.rmtree(path.parent)


@pytest.mark.parametrize(
    ("damage", "said"),
    [(remove, "A file of it is missing"), (cut_off, "cannot be loaded"), (remove_all, "cannot be loaded")],
)
def test_a_checkpoint_that_is_not_whole(damage, said, checkpoint, tmp_path):
    damage(sorted(checkpoint.glob("*.safetensors"))[1])
    with pytest.raises(OffloadConfigError, match=said):
        load_pretrained(GPT2LMHeadModel, checkpoint, config=on_tier(tmp_path))


@pytest.mark.parametrize("config", [None, OffloadConfig(tier="auto", memory_budget="1KiB")])
def test_of_several_processes_each_has_its_weights(config, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as launchers do
    expected = GPT2LMHeadModel.from_pretrained(checkpoint).state_dict()
    model = load_pretrained(GPT2LMHeadModel, checkpoint, config=config or on_tier(tmp_path))
    assert (weights_of(model) is None) == (config is not None)  # params has to be asked for
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        ({"model_config": gpt2(n_embd=32)}, {}, "other shapes"),
        ({"device_map": "auto"}, {}, "device_map"),
        ({}, {"disk_budget": "100KiB"}, "free some space there"),  # before anything is written
    ],
)
def test_what_cannot_be_loaded_is_refused(options, settings, said, checkpoint, tmp_path):
    with pytest.raises(OffloadConfigError, match=said):
        load_pretrained(GPT2LMHeadModel, checkpoint, config=on_tier(tmp_path, **settings), **options)
    assert type(nn.Linear(64, 64).weight) is nn.Parameter


def test_a_limit_that_is_met_on_the_way_ends_the_loading_and_loses_nothing(checkpoint, tmp_path):
    before = files(checkpoint)
    with pytest.raises(StorageError, match="cannot take all of its weights"):
        load_pretrained(GPT2LMHeadModel, checkpoint, config=on_tier(tmp_path, max_disk_write_bytes="100KiB"))
    assert files(checkpoint) == before
    assert weights_of(load_pretrained(GPT2LMHeadModel, checkpoint, config=on_tier(tmp_path))) is not None


# -- what is done with it -------------------------------------------------------------------------------------------------


def rows():
    random = torch.Generator().manual_seed(1)
    return [{"input_ids": row, "labels": row} for row in torch.randint(0, 96, (32, 16), generator=random)]


def trained(model, folder, resume=None, **arguments):
    often = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    often |= {"max_steps": 4, "learning_rate": 1e-2, "load_best_model_at_end": True}
    trainer = make_trainer(folder, model, data=rows(), **often, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(folder / "end")
    losses = [(entry.get("loss"), entry.get("eval_loss")) for entry in trainer.state.log_history]
    return losses, {k: hashlib.sha256(bits(p)).hexdigest() for k, p in model.named_parameters()}


def test_a_trainer_trains_saves_resumes_and_loads_the_best(checkpoint, tmp_path):
    expected = trained(GPT2LMHeadModel.from_pretrained(checkpoint), tmp_path / "memory")
    values = {"offload_optimizer": "ssd", "offload_directory": str(tmp_path), "offload_min_bytes": 1}
    model = load_pretrained(GPT2LMHeadModel, checkpoint, config=on_tier(tmp_path))
    assert trained(model, tmp_path / "tier", **values) == expected
    residency = weights_of(model)
    assert residency.bytes_in_memory < residency.total_bytes
    for name in ("end", "checkpoint-2", "checkpoint-4"):
        weights = {each: content for each, content in files(tmp_path / "tier" / name).items() if "safetensors" in each}
        assert weights
        assert weights == {each: files(tmp_path / "memory" / name)[each] for each in weights}
    shutil.rmtree(tmp_path / "tier" / "checkpoint-4")
    again = load_pretrained(GPT2LMHeadModel, checkpoint, config=on_tier(tmp_path))
    assert trained(again, tmp_path / "tier", resume=True, **values)[1] == expected[1]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_around_it_are_trained_and_merged(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(2)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True
        )
        model = peft.get_peft_model(model, config)
        session = attach(model, OffloadConfig(tier="none", min_bytes=1))
        assert weights_of(model) is weights_of(model.base_model.model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        ids = torch.arange(32).reshape(2, 16)
        losses = take_steps(model, optimizer, 3 * [{"input_ids": ids, "labels": ids}])
        session.detach()
        model.save_pretrained(tmp_path / "adapter")
        merged = model.merge_and_unload()
        return losses, files(tmp_path / "adapter"), {k: bits(p) for k, p in merged.named_parameters()}

    expected = adapted(GPT2LMHeadModel.from_pretrained(checkpoint))
    assert adapted(load_pretrained(GPT2LMHeadModel, checkpoint, config=on_tier(tmp_path))) == expected


def test_what_fits_stays_in_memory_while_tokens_are_generated(checkpoint, tmp_path):
    model = load_pretrained(GPT2LMHeadModel, checkpoint, config=on_tier(tmp_path, memory_budget="1100KiB"))
    residency = weights_of(model)
    ids = torch.arange(8).reshape(1, 8)
    model.generate(ids, max_new_tokens=4, do_sample=False)
    before = residency.store.tier.stats.read_bytes
    tokens = 10
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    expected = GPT2LMHeadModel.from_pretrained(checkpoint).generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    read = (residency.store.tier.stats.read_bytes - before) / tokens
    in_pages = sum(whole_pages(weight.nbytes) for weight in residency.weights())
    block = sum(weight.nbytes for weight in model.transformer.h[0].parameters())
    assert read < in_pages - residency.limit_bytes + block  # where those that come next leave, it is nearly all of them
    assert 0 < read < 0.6 * in_pages


class _Model(TrainerCallback):
    """Whether the weights of the model that is trained were on the tier before the training began."""

    def on_init_end(self, args, state, control, model=None, **kwargs):
        self.residency = weights_of(model)


@pytest.mark.parametrize(("source", "mode"), [("random", "lora"), ("checkpoint", "none")])
def test_a_recipe_makes_its_model_on_the_tier(source, mode, tiny_recipe, tmp_path):
    overrides = [f"offload.memory_mode={mode}"]
    if source == "checkpoint":
        run_recipe(load_recipe(tiny_recipe, ["training.output_dir=first"]))
        text = tiny_recipe.read_text()
        start, end = text.index("model:\n"), text.index("data:\n")
        tiny_recipe.write_text(f"{text[:start]}model:\n  name: {tmp_path / 'first'}\n{text[end:]}")
    expected = run_recipe(load_recipe(tiny_recipe, overrides), save=False)
    overrides += ["offload.params=ssd", "offload.directory=tier", "offload.min_bytes=1KiB", "offload.tier=none"]
    seen = _Model()
    report = run_recipe(load_recipe(tiny_recipe, overrides), save=False, callbacks=[seen])
    assert (report.losses_hex, report.parameters_sha256) == (expected.losses_hex, expected.parameters_sha256)
    assert seen.residency.is_home


@pytest.mark.parametrize("make", [load_pretrained, create_from_config])
def test_arguments_of_other_kinds_are_named(make, tmp_path):
    offload = OffloadConfig(tier="none", params="ssd", directory=tmp_path)
    with pytest.raises(OffloadConfigError, match="'GPT2LMHeadModel' has no from_"):
        make("GPT2LMHeadModel", tmp_path, config=offload)
    with pytest.raises(OffloadConfigError, match="is not an OffloadConfig"):
        make(GPT2LMHeadModel, tmp_path, config={"params": "ssd"})
