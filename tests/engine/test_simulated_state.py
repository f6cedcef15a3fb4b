"""Weights, gradients and optimizer state through the engine and the simulation: the same bytes move, and are in memory."""

import dataclasses
import random

import pytest
import torch
import transformers
from torch import nn

from hf_offload import OffloadConfig, attach
from hf_offload.forecast.counting import OptimizerNeeds, count_footprint
from hf_offload.forecast.fake import fake_mode
from hf_offload.plan.holding import GRADIENTS, STATE, WEIGHTS, Held, hold, staying_weights
from hf_offload.plan.passing import Use, passing
from hf_offload.planning.unit_weights import unit_weights
from hf_offload.state.optimizer import streaming_of
from tests.helpers.parked import parked

KB = 1 << 10
STEPS = 4


def moved_bytes(store):
    """Written and read so far, once nothing is on its way."""
    store.settle()
    for stored in list(store._reading):
        store.tier.wait_until_done(stored._read[1])
    return store.tier.stats.written_bytes, store.tier.stats.read_bytes


def random_uses(draw, count):
    """Of a step: forward and backward, some weights more often, some in one of them alone."""
    forward = [number for number in range(count) if draw.random() < 0.95]
    forward += [draw.randrange(count)] * (draw.random() < 0.5)  # tied
    backward = [number for number in reversed(forward) if draw.random() < 0.95]
    trained = {number for number in range(count) if draw.random() < 0.7}
    seen: set[int] = set()
    uses = []
    for at, number in enumerate([*forward, *backward]):
        uses.append(Use(number, at, changes=number in trained and number not in seen))
        seen.add(number)
    return uses


@pytest.mark.parametrize("seed", range(8))
def test_random_uses_of_weights_move_the_same_bytes(seed):
    draw = random.Random(seed)
    sizes = [draw.randint(1, 40) * KB for _ in range(draw.randint(5, 12))]
    uses = random_uses(draw, len(sizes))
    limit = max(max(sizes), int(draw.uniform(0.2, 1.0) * sum(sizes)))
    model = nn.ParameterList([nn.Parameter(torch.zeros(nbytes // 4)) for nbytes in sizes])
    residency = parked(model, None, params="ram").residency
    residency.limit_bytes = limit
    residency.store.window_bytes = (
        0  # each write is waited for: what is written still would come back without being read
    )
    weights = residency.weights()
    expected = passing(tuple(uses), tuple(sizes), limit)
    for _ in range(STEPS):  # the engine learns the order
        before, held = moved_bytes(residency.store), []
        for use in uses:
            weights[use.weight].enter()
            held.append(residency.bytes_in_memory)
            weights[use.weight].leave(changed=use.changes)
    moved = tuple(now - then for now, then in zip(moved_bytes(residency.store), before, strict=True))
    assert moved == tuple(sum(sizes[number] for _, number in each) for each in (expected.written, expected.read))
    assert held == list(expected.held_bytes)


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
        optimizer=OptimizerNeeds(2 * sum(p.nbytes for p in model.parameters()), 0, 0.0),
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
    held = Held("ram", "ram", int(share * total))  # a drive's bytes are fewer: the ends of buffers stay in memory
    planned = hold(footprint, held, BUDGET, on_host=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = OffloadConfig(tier="none", params="ram", optimizer="ram", min_bytes=smallest, memory_budget=BUDGET)
    session = attach(model, config)
    session.prepare_optimizer(optimizer)
    session.residency.limit_bytes = held.weights_bytes
    streaming = streaming_of(optimizer)
    stores = {WEIGHTS: session.residency.store, STATE: streaming.state_store, GRADIENTS: streaming.gradient_store}
    assert {kind: store.window_bytes for kind, store in stores.items()} == planned.transfer_windows
    for store in stores.values():
        store.window_bytes = 0  # each write is waited for: what is written still would not be read
    moved = {}
    for _ in range(STEPS):
        before = {kind: moved_bytes(store) for kind, store in stores.items()}
        session.residency.most_bytes = 0
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
    assert moved == expected
    assert session.residency.most_bytes <= staying_weights(footprint, held)
