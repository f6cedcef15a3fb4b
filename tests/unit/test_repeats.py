"""Counting a stack of equal blocks by a few of them, against counting every block."""

import dataclasses

import pytest
import torch
import transformers

from hf_offload.forecast import repeats
from hf_offload.forecast import workload as workloads
from hf_offload.forecast.counting import count_footprint
from hf_offload.forecast.fake import fake_mode
from hf_offload.forecast.repeats import find_stacks
from hf_offload.forecast.workload import Workload, count_workload
from hf_offload.plan.hardware import describe_hardware
from hf_offload.structure.units import find_blocks

SIZE = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 256,
}  # fmt: skip
KV = {"num_key_value_heads": 2, "head_dim": 16}
T5 = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "vocab_size": 256, "decoder_start_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "gpt2": lambda: transformers.GPT2Config(n_layer=10, n_embd=64, n_head=4, vocab_size=256, n_positions=256),
    "llama": lambda: transformers.LlamaConfig(num_hidden_layers=10, **SIZE, **KV),
    "bert": lambda: transformers.BertConfig(num_hidden_layers=10, **SIZE),
    "t5": lambda: transformers.T5Config(num_layers=12, num_decoder_layers=14, **T5),
    "mixtral": lambda: transformers.MixtralConfig(num_hidden_layers=10, **EXPERTS, **SIZE, **KV),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        num_hidden_layers=20, sliding_window=16, layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 6
        + ["sliding_attention"] * 2, **SIZE, **KV,
    ),
    "deepseek": lambda: transformers.DeepseekV3Config(
        num_hidden_layers=12, first_k_dense_replace=2, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=32, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4, vocab_size=256,
    ),
}  # fmt: skip
TASKS = {"bert": "masked-lm", "t5": "seq2seq-lm"}
WAYS = {
    "all weights": {},
    "lora": {"memory_mode": "lora", "memory_mode_kwargs": {"rank": 4}},
    "lora of attention, with dropout": {
        "memory_mode": "lora", "memory_mode_kwargs": {"rank": 4, "dropout": 0.1, "targets": ["q_proj", "v_proj"]},
    },
    "tiled": {"tiled_loss": "on", "tiled_mlp": "on"},
}  # fmt: skip
HARDWARE = describe_hardware(gpu="24GB", tflops=80, pcie="25GB/s", ssd="5GB/s")


def workload(name, way="all weights", config=None):
    config = MODELS[name]() if config is None else config
    config.use_cache = False
    shape = {"task": TASKS.get(name, "causal-lm"), "batch": 2, "sequence": 64, "dtype": torch.bfloat16}
    return Workload(name=name, config=config, **shape).changed(min_bytes=2048, **WAYS[way])


@pytest.fixture
def counted(monkeypatch):
    """Counts a workload. Returns the footprint, and how many blocks the model had in each of the counts that were made."""
    blocks = []

    def spied(model, **options):
        blocks.append(len(find_blocks(model)))
        return count_footprint(model=model, **options)

    def spied_on_repeats(model, batch, **options):
        return spied(model, batch=batch, **options)

    monkeypatch.setattr(repeats, "count_footprint", spied_on_repeats)
    monkeypatch.setattr(workloads, "count_footprint", spied)

    def count(asked, every_block=False):
        blocks.clear()
        with monkeypatch.context() as patch:
            if every_block:
                patch.setattr(workloads, "count_repeats", lambda **_: None)
            return count_workload(asked, HARDWARE), list(blocks)

    return count


def assert_equal(found, expected):
    for field in dataclasses.fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if field.name in ("segments", "saved", "blocks"):
            assert len(one) == len(other), field.name
            for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
                assert mine == theirs, (field.name, index)
        else:
            assert one == other, field.name
    assert list(found.units) == list(expected.units)  # the order in which plans go through them


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("gpt2", "all weights"), ("t5", "all weights"), ("gemma3", "all weights"), ("deepseek", "all weights"),
        ("bert", "lora"), ("llama", "lora of attention, with dropout"), ("llama", "tiled"),
    ],
)  # fmt: skip
def test_a_count_by_a_few_blocks_is_that_of_all_of_them(name, way, counted):
    asked = workload(name, way)
    expected, (every,) = counted(asked, every_block=True)
    found, blocks = counted(asked)
    assert len(blocks) == 2, "no repetition was found, or it was not the same twice"
    assert sum(blocks) < every
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("asked", "counts"), [({"memory_mode": "lora", "memory_mode_kwargs": {"rank": 4}}, 2), ({}, 3)]
)
def test_what_autocast_keeps_for_forward_alone_goes_when_it_ends(asked, counts, monkeypatch):
    """Its copies of weights that elementwise operations use, which nothing saves. Where more blocks could leave more in the
    segment in which they go, all blocks are counted.
    """
    under_autocast = dataclasses.replace(workload("llama"), autocast=torch.bfloat16, dtype=torch.float32, **asked)
    made = []
    for module in (repeats, workloads):
        monkeypatch.setattr(
            module, "count_footprint", lambda *args, **options: made.append(0) or count_footprint(*args, **options)
        )
    found = workloads.count_choices(under_autocast, HARDWARE).elementwise
    reduced = len(made) - 2
    monkeypatch.setattr(workloads, "count_repeats", lambda **_: None)
    assert_equal(found, workloads.count_choices(under_autocast, HARDWARE).elementwise)
    assert reduced == counts


def test_a_layer_that_differs_is_counted_for_itself():
    """Whatever makes it differ: its class, its sizes, a number that is not its own, what is trained of it."""
    changes = (
        lambda layer: setattr(layer.mlp, "act_fn", torch.nn.Tanh()),
        lambda layer: setattr(layer.self_attn, "attention_dropout", 0.1),
        lambda layer: layer.mlp.requires_grad_(False),
    )
    for change in changes:
        with fake_mode():
            model = workload("llama").build()
        (alike,) = find_stacks(model)
        assert (alike.first, alike.period, alike.times) == (1, 1, 8)
        change(model.model.layers[4])
        assert all(stack.first > 5 for stack in find_stacks(model))


def test_a_loss_over_all_layers_is_counted_in_full(counted):
    """That of the routers concatenates what every layer has given: one operation that grows with the layers."""
    config = transformers.MixtralConfig(num_hidden_layers=10, output_router_logits=True, **EXPERTS, **SIZE, **KV)
    asked = workload("mixtral", config=config)
    expected, _ = counted(asked, every_block=True)
    found, blocks = counted(asked)
    assert blocks[-1] == 10
    assert_equal(found, expected)


def test_blocks_that_share_weights_are_all_counted():
    with fake_mode():
        model = workload("llama").build()
    model.model.layers[3].mlp = model.model.layers[7].mlp
    assert list(find_stacks(model)) == []


def test_a_forward_that_looks_at_the_number_of_a_layer_is_counted_in_full(counted, monkeypatch):
    """Its layers look alike from outside."""
    forward = transformers.models.llama.modeling_llama.LlamaMLP.forward
    calls = []

    def every_third(self, hidden):
        calls.append(self)
        return forward(self, torch.tanh(hidden) if len(calls) % 3 == 0 else hidden)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", every_third)
    _, blocks = counted(workload("llama"))
    assert blocks[-1] == 10


def test_the_model_has_all_its_blocks_afterwards():
    with fake_mode():
        asked = workload("llama")
        model = asked.build()
    layers = list(model.model.layers)
    (stack,) = find_stacks(model)
    with pytest.raises(KeyError), stack.shortened(1):
        assert len(model.model.layers) == 3
        raise KeyError
    assert list(model.model.layers) == layers
    assert [name for name, _ in model.model.layers.named_children()] == [str(index) for index in range(10)]
