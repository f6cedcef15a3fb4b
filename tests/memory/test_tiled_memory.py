"""What tiling is for: less memory at the loss and in MLPs."""

import copy

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.loss import SHAPES, TILED, UNTILED, bench_loss
from hf_offload import OffloadConfig, offload_activations
from hf_offload.transforms.tiling.cut import Cut
from hf_offload.transforms.tiling.head import TiledHead
from tests.helpers.live_bytes import peak_live_bytes


def llama(*, vocabulary=64, width=64, intermediate=128):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=intermediate, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, use_cache=False, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def step_peak(model, config, tokens=1024):
    batch = torch.ones(1, tokens, dtype=torch.int64)

    def step():
        model.zero_grad()
        model(input_ids=batch, labels=batch.clone()).loss.backward()

    with offload_activations(model, config):
        step()
        return peak_live_bytes(step)


def test_logits_of_all_tokens_never_exist():
    """Three tensors of logits, one of them saved, are the peak of the usual way; a sixteenth of one is left."""
    hidden, vocabulary, width = 1024, 8192, 32
    labels = torch.randint(0, vocabulary, (hidden,))
    rows = torch.randn(hidden, width, requires_grad=True)
    head = nn.Linear(width, vocabulary, bias=False)

    def step(one):
        rows.grad = one.weight.grad = None
        nn.functional.cross_entropy(one(rows).float(), labels).backward()

    tiled = copy.deepcopy(head)
    TiledHead("head", tiled, Cut()).install()
    usual, found = (peak_live_bytes(lambda one=one: step(one)) for one in (head, tiled))
    logits = 4 * hidden * vocabulary
    gradients = 4 * (rows.numel() + head.weight.numel())
    assert usual > 2 * logits
    assert found - gradients < 0.15 * logits


def test_a_whole_step_needs_less_with_a_tiled_loss():
    model = llama(vocabulary=8192)
    logits = 4 * 1024 * 8192
    plain = step_peak(model, OffloadConfig(tier="none"))
    tiled = step_peak(model, OffloadConfig(tier="none", tiled_loss="on"))
    assert plain - tiled > 1.5 * logits


def test_a_whole_step_needs_less_with_tiled_mlps():
    model = llama(intermediate=4096)
    between = 4 * 1024 * 4096
    plain = step_peak(model, OffloadConfig(tier="none"))
    tiled = step_peak(model, OffloadConfig(tier="none", tiled_mlp="on", tile_bytes="1MiB"))
    assert plain - tiled > 2 * between


def test_the_bench_of_the_loss(monkeypatch):
    monkeypatch.setitem(SHAPES, "small", (4096, 32, 512))
    plain, tiled = bench_loss("small", torch.float32, 2, None)
    assert (plain.way, tiled.way) == (UNTILED, TILED)
    assert len(plain.seconds) == len(tiled.seconds) == 2
    assert abs(plain.loss - tiled.loss) < 1e-5
    assert plain.extra_bytes > 2 * 4 * 4096 * 512
    assert tiled.extra_bytes < 0.2 * plain.extra_bytes
