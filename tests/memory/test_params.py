"""Weights on a tier are not in memory, and what is on the tier goes with them: counted by the allocator and by the tier."""

import gc
import weakref

import peft
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_offload import OffloadConfig
from hf_offload.session import attach
from hf_offload.state.registry import parked_of
from hf_offload.state.weights import weights_at_a_time
from hf_offload.storage.service import storage_of
from tests.helpers.architectures import make_batch, make_model
from tests.helpers.live_bytes import peak_bytes_in_use
from tests.helpers.package_threads import OurThreads, open_files
from tests.helpers.parked import leave_memory, parked

WORDS = torch.arange(16).view(2, 8)


def gpt2(layers=6, width=64):
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=4, vocab_size=64, n_positions=16))


def weight_bytes(model):
    """Bytes of weights that have memory of their own now, and are not mapped where they are stored."""
    return sum(each.nbytes for each in map(parked_of, model.parameters()) if each.is_here)


@pytest.mark.parametrize(("place", "checkpointed"), [("ram", True), ("ssd", False)])
def test_weights_of_two_blocks_are_in_memory_at_most(place, checkpointed, tmp_path):
    model = gpt2()
    files = {"directory": tmp_path} if place == "ssd" else {}
    session = attach(model, OffloadConfig(tier="none", params=place, optimizer=place, min_bytes=1, **files))
    optimizer = session.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    session.defer_updates()
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    block = sum(each.nbytes for each in model.transformer.h[0].parameters())
    assert session.residency.limit_bytes == weights_at_a_time(model, session.config) == 2 * block
    assert session.residency.total_bytes > 5 * block
    seen = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: seen.append(weight_bytes(model)))
        module.register_forward_hook(lambda *_: seen.append(weight_bytes(model)))
    for weight in model.parameters():
        weight.register_hook(lambda _: seen.append(weight_bytes(model)))
    for _ in range(3):
        model(WORDS, labels=WORDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(weight_bytes(model))
    model.generate(WORDS[:, :4], max_new_tokens=3, min_new_tokens=3)
    assert len(seen) > 300
    assert block < max(seen) <= 2 * block
    assert block < session.residency.most_bytes <= 2 * block


def trained_peak(folder=None):
    """Most bytes in use at once, from before a model is made until the biases have been trained, and in training alone; and
    bytes of the model.
    """
    peaks = []

    def train():
        model = gpt2(layers=20, width=512)
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.endswith("bias"))
        if folder is not None:
            session = attach(model, OffloadConfig(tier="none", params="ssd", directory=folder))
            session.residency.store.settle()
        peaks.append(peak_bytes_in_use(lambda: model(WORDS, labels=WORDS).loss.backward()))
        peaks.append(sum(each.nbytes for each in model.parameters()))

    return [peak_bytes_in_use(train), *peaks]


def test_the_allocator_does_not_see_weights_that_have_left(tmp_path):
    plain, plain_training, total = trained_peak()
    if plain is None:
        pytest.skip("the allocator does not tell what is in use")
    assert plain > total > 200 << 20
    streamed, streamed_training, _ = trained_peak(tmp_path)
    # Two blocks, and as much as may be on the way to the drive and back.
    assert streamed_training < plain_training + 2 * total / 20 + (64 << 20)
    assert streamed < 1.25 * total


class Experts(nn.Module):
    """Each expert has weights of its own, and tokens choose among those that ``open`` names."""

    def __init__(self, count=16, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])
        self.open = [3, 7]

    def forward(self, inputs):
        scores = self.gate(inputs)[:, self.open].softmax(-1)
        chosen = scores.argmax(-1)
        result = inputs
        for place, number in enumerate(self.open):
            rows = (chosen == place).nonzero()[:, 0]
            values = self.experts[number](inputs[rows]) * scores[rows, place, None]
            result = result.index_add(0, rows, values)
        return result


def test_experts_that_no_token_chooses_are_not_read(tmp_path):
    model = Experts()
    session = parked(model, tmp_path)
    leave_memory(session)
    stats = session.residency.store.tier.stats
    expert = model.experts[0].weight.nbytes
    brought = set()
    for _ in range(4):
        before = stats.read_bytes
        loss = model(torch.randn(32, 64)).square().mean()
        brought |= {weight.name for weight in session.residency.weights() if weight.is_here}
        loss.backward()
        del loss
        # Both experts in forward and in backward, and a gate and biases that are small.
        assert stats.read_bytes - before < 6 * expert
        brought |= {weight.name for weight in session.residency.weights() if weight.is_here}
    assert not {name.split(".")[1] for name in brought if name.startswith("experts")} - {"3", "7"}
    assert stats.read_bytes > 8 * expert


@pytest.mark.parametrize(("place", "optimizer"), [("ram", "ssd"), ("ssd", "none"), ("ssd", "ssd")])
def test_nothing_is_left_on_the_tier_when_the_model_goes(place, optimizer, tmp_path):
    threads = OurThreads()
    model = gpt2()
    config = OffloadConfig(
        tier="none", params=place, optimizer=optimizer, min_bytes=1,
        directory=tmp_path if "ssd" in (place, optimizer) else None,
    )  # fmt: skip
    session = attach(model, config)
    session.residency.limit_bytes = 1
    trainer = session.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    session.defer_updates()
    for _ in range(2):
        model(WORDS, labels=WORDS).loss.backward()
        trainer.step()
        trainer.zero_grad()
    state = model.state_dict()
    storage, store = storage_of(model), session.residency.store
    store.settle()
    assert store.tier.stats.used_bytes > session.residency.total_bytes / 2
    gone = [weakref.ref(each) for each in (model, session.residency, store, store.tier)]
    del model, trainer, state, session, store
    gc.collect()
    threads.join(60)
    gc.collect()
    assert [each() for each in gone] == [None] * 4
    assert storage.disk.taken_bytes == storage.ram.taken_bytes == 0
    assert open_files(tmp_path) == []


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "whisper"])
def test_frozen_weights_are_written_once(name, tmp_path):
    model = peft.get_peft_model(
        make_model(name), peft.LoraConfig(r=2, target_modules=["q_proj", "query_key_value", "q", "c_attn"])
    )
    trained = [each for each in model.parameters() if each.requires_grad]
    session = attach(
        model,
        OffloadConfig(
            tier="none", params="ssd", min_bytes=1 + max(each.nbytes for each in trained), directory=tmp_path
        ),
    )
    session.residency.limit_bytes = 1
    stats, total = session.residency.store.tier.stats, session.residency.total_bytes
    model.eval()(**make_batch(name, 0))
    leave_memory(session)
    written = stats.written_bytes
    assert 0.9 * total < written < 1.1 * total
    optimizer = torch.optim.AdamW(trained)
    model.train()
    for step in range(3):
        model(**make_batch(name, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.state_dict()
    leave_memory(session)
    assert stats.read_bytes > 3 * total
    assert stats.written_bytes == written
