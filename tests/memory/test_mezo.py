"""A step of MeZO with weights on a tier has two blocks in memory, a piece of a direction, and one forward's activations."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_offload import OffloadConfig
from hf_offload.session import attach
from tests.helpers.live_bytes import peak_bytes_in_use

WORDS = torch.arange(64).view(2, 32)


def test_a_step_has_the_memory_of_two_blocks_and_of_a_forward(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=12, n_embd=512, n_head=4, vocab_size=64, n_positions=32, use_cache=False)
    )
    total = sum(one.nbytes for one in model.parameters())
    block = sum(one.nbytes for one in model.transformer.h[0].parameters())
    session = attach(
        model, OffloadConfig(tier="none", params="ssd", memory_mode="mezo", directory=str(tmp_path), min_bytes=1024)
    )
    optimizer = session.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    residency = session.residency
    step = lambda: optimizer.step(lambda: model(WORDS, labels=WORDS).loss)  # noqa: E731
    step()
    present = residency.bytes_in_memory
    residency.store.settle()
    peak = peak_bytes_in_use(step)
    if peak is None:
        pytest.skip("the allocator does not tell what is in use")
    assert residency.limit_bytes == 2 * block
    assert residency.most_bytes <= residency.budget_bytes
    forward = 16 << 20  # of activations, of a piece of a direction, and of results
    assert peak <= 2 * block - present + residency.store.window_bytes + forward < total / 2
