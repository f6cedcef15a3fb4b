"""Weights, gradients and optimizer state through the engine and the simulation: the same bytes move."""

import dataclasses

import pytest
import torch
import transformers

from hf_offload import OffloadConfig, attach
from hf_offload.forecast.counting import count_footprint
from hf_offload.forecast.fake import fake_mode
from hf_offload.methods.protocol import OptimizerBytes
from hf_offload.plan.state_placement import GRADIENTS, STATE, WEIGHTS, StatePlacement, least_weights
from hf_offload.plan.state_transfers import place_state
from hf_offload.planning.state_bytes import unit_weights
from hf_offload.state.optimizer import streaming_of

KB = 1 << 10
STEPS = 5


def moved_bytes(store):
    """Written and read so far, once nothing is on its way."""
    store.settle()
    store.tier.wait_until_done(*store._reading)
    return store.tier.stats.written_bytes, store.tier.stats.read_bytes


SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6, "num_attention_heads": 2}
MODELS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=256, n_embd=64, n_layer=6, n_head=2, n_positions=16, use_cache=False
    ),
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=256, **SIZES, num_key_value_heads=1, max_position_embeddings=16, use_cache=False
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=256, d_model=64, d_ff=192, d_kv=32, num_layers=3, num_heads=2, decoder_start_token_id=0,
        use_cache=False,
    ),
}  # fmt: skip
BUDGET = 4 << 20


def build(name):
    torch.manual_seed(0)
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    return kind.from_config(MODELS[name]()).train()


def batch():
    words = torch.arange(32).view(2, 16)
    return {"input_ids": words, "labels": words.clone()}


def footprint_of(name):
    with fake_mode():
        model, inputs = build(name), batch()
    return count_footprint(
        model,
        inputs,
        cost=lambda flops, moved, dtype: 1e-6,
        optimizer=OptimizerBytes(2 * sum(p.nbytes for p in model.parameters()), 0, 0),
        min_bytes=KB,
        as_on_cuda=False,
    )


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_a_model_moves_the_same_bytes(name, share):
    model = build(name)
    total = sum(p.nbytes for p in model.parameters())
    smallest = 1 + max(p.nbytes for p in model.parameters() if p.dim() == 1)
    footprint = footprint_of(name)
    weights = unit_weights(model, footprint.units, footprint.state_bytes, smallest)
    footprint = dataclasses.replace(footprint, weights=weights)
    placement = StatePlacement(
        "ram", "ram", int(share * total)
    )  # a drive's bytes are fewer: the ends of buffers stay in memory
    planned = place_state(footprint, placement, BUDGET, on_host=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = OffloadConfig(tier="none", params="ram", optimizer="ram", min_bytes=smallest, memory_budget=BUDGET)
    session = attach(model, config)
    session.prepare_optimizer(optimizer)
    session.defer_updates()
    session.residency.limit_bytes = placement.weights_bytes
    streaming = streaming_of(optimizer)
    weights, state = session.residency.store, streaming.state_store
    stores = {WEIGHTS: weights, STATE: state, GRADIENTS: streaming.gradient_store}
    assert {kind: store.window_bytes for kind, store in stores.items()} == planned.transfer_windows
    for store in stores.values():
        store.window_bytes = 0  # each write is waited for: what is written still would not be read
    moved = {}
    for _ in range(STEPS):
        before = {kind: moved_bytes(store) for kind, store in stores.items()}
        model(**batch()).loss.backward()
        session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        for kind, store in stores.items():
            moved[kind] = tuple(now - then for now, then in zip(moved_bytes(store), before[kind], strict=True))
    expected = {
        kind: tuple(
            sum(one.nbytes for one in planned.transfers if one.kind == kind and one.loads is loads)
            for loads in (False, True)
        )
        for kind in stores
    }
    written, read = moved.pop(WEIGHTS)
    expected_written, expected_read = expected.pop(WEIGHTS)
    assert moved == expected
    # The plan lets single weights come and go, and the engine blocks.
    assert abs(written - expected_written) < least_weights(footprint)
    assert read == pytest.approx(expected_read, rel=0.02)
