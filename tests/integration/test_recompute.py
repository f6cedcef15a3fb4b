"""Which blocks a plan may recompute, that they then keep every bit, and what is refused."""

import copy
import pickle
import random

import numpy
import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_offload import OffloadConfig, offload_activations
from hf_offload.engine.recompute import Recompute
from hf_offload.errors import OffloadConfigError, OffloadPlanError, RecomputeError
from hf_offload.structure.units import find_blocks
from tests.helpers.activation_heavy_models import batch, build
from tests.helpers.live_bytes import live_bytes_of_steps, peak_live_bytes
from tests.helpers.train import same
from tests.helpers.training_steps import end_step, training_steps

WIDTH, ROWS = 32, 256
STEPS = 4


@pytest.fixture(autouse=True)
def machine_that_recomputes(machine_with_drive):
    """A drive so slow that recomputing is always the better way."""
    machine_with_drive(1e6)


class Plain(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.prepare()

    def prepare(self):
        pass

    def effect(self, hidden):
        return hidden

    def forward(self, hidden, scale=None):
        hidden = self.effect(hidden)
        if scale is not None:
            hidden = hidden * scale
        return hidden + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(hidden)))), 0.1)


class BatchNorm(Plain):
    def prepare(self):
        self.norm = nn.BatchNorm1d(WIDTH)


class ReplacedBuffer(Plain):
    def prepare(self):
        self.register_buffer("average", torch.zeros(WIDTH))

    def effect(self, hidden):
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        return hidden - self.average


class Model(nn.Module):
    def __init__(self, block=Plain, layers=4):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(layers)])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, inputs, **options):
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = layer(hidden, **options)
        return self.last(hidden).square().mean()


def run(make, config, steps=STEPS, options=lambda step: {}, before=lambda model, step: None):
    """Losses, the model's state in the end, and which blocks were ever recomputed."""
    torch.manual_seed(0)
    model = make().train()

    def loss_of(step):
        before(model, step)
        return model(torch.randn(ROWS, WIDTH), **options(step))

    losses, recomputed = [], set()
    torch.manual_seed(1)
    for session, of_step in training_steps(model, config, steps, loss_of, learning_rate=1e-2):
        losses += of_step
        recomputed |= {name for name, one in session.plan.placements.items() if one.recomputes}
    return losses, [tensor.clone() for tensor in model.state_dict().values()], recomputed


def auto(tmp_path, make=Model, **settings):
    """A budget for weights and state, and a part of the activations."""
    torch.manual_seed(0)
    model = make().train()
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    inputs = torch.randn(ROWS, WIDTH)
    activations = peak_live_bytes(lambda: model(inputs).backward())
    return OffloadConfig(
        tier="auto",
        memory_budget=int(3 * weights + 0.75 * activations),
        directory=tmp_path,
        min_bytes=1024,
        recompute_elementwise="off",  # it takes steps of its own to be measured
        **settings,
    )


NONE = OffloadConfig(tier="none")


# -- which blocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_blocks_of_transformers_are_recomputed_exactly(name, tmp_path):
    def train(config):
        torch.manual_seed(0)
        model = build(name, 0.1, layers=4)
        losses, recomputed = [], False
        for session, of_step in training_steps(model, config, STEPS, lambda step: model(**batch()).loss):
            losses += of_step
            recomputed |= any(one.recomputes for one in session.plan.placements.values())
        return losses, [parameter.detach() for parameter in model.parameters()], recomputed

    fixed, activations = live_bytes_of_steps(build(name, 0.1, layers=4), batch())
    budget = int(fixed + 0.7 * activations)
    config = OffloadConfig(
        tier="auto", memory_budget=budget, directory=tmp_path, min_bytes=4096, recompute_elementwise="off"
    )
    found = train(config)
    assert found[2]
    assert same(found[:2], train(NONE)[:2])


@pytest.mark.parametrize("block", [BatchNorm, ReplacedBuffer])
def test_a_block_that_writes_to_its_buffers_is_not_recomputed(block, tmp_path):
    expected = run(lambda: Model(block), NONE)
    found = run(lambda: Model(block), auto(tmp_path, lambda: Model(block)))
    assert not found[2]
    assert same(found[:2], expected[:2])


def test_other_blocks_of_the_same_model_are_recomputed(tmp_path):
    def make():
        model = Model(layers=6)
        model.layers[2] = BatchNorm()
        return model

    found = run(make, auto(tmp_path))
    assert "layers.2" not in found[2]
    assert {"layers.0", "layers.1", "layers.3"} & found[2]
    assert same(found[:2], run(make, NONE)[:2])


# -- blocks that the user names -----------------------------------------------------------------------------------------


class EncoderLayer(nn.TransformerEncoderLayer):
    """One of a class of PyTorch's, that takes rows without a sequence."""

    def __init__(self):
        super().__init__(WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=True)


def encoder():
    return Model(EncoderLayer)


@pytest.mark.parametrize("named", ["TransformerEncoderLayer", ["EncoderLayer", "LayerNorm"], None])
def test_blocks_of_a_class_that_is_named_are_recomputed_exactly(named, tmp_path):
    found = run(encoder, auto(tmp_path, encoder, recompute_blocks=named))
    assert bool(found[2]) == (named is not None)
    assert all(name.startswith("layers.") for name in found[2])
    assert same(found[:2], run(encoder, NONE)[:2])


def test_named_blocks_are_of_their_own_class_in_copies_and_once_detached(tmp_path):
    model = encoder()
    with offload_activations(model, auto(tmp_path, encoder, recompute_blocks="EncoderLayer")):
        assert all(isinstance(block, EncoderLayer) for block in model.layers)
        assert list(find_blocks(model)) == [f"layers.{index}" for index in range(4)]
        copies = [copy.deepcopy(model.layers[0]), pickle.loads(pickle.dumps(model.layers[0]))]
    assert {type(block) for block in (*model.layers, *copies)} == {EncoderLayer}


def test_a_class_that_the_model_does_not_have_is_refused(tmp_path):
    with pytest.raises(
        OffloadConfigError, match=r"no module of Model is of a class 'EncodrLayer'.*mean 'EncoderLayer'"
    ):
        run(encoder, auto(tmp_path, encoder, recompute_blocks=["TransformerEncoderLayer", "EncodrLayer"]))
    with pytest.raises(OffloadConfigError, match="recompute_blocks is given, but tier='ram' recomputes nothing"):
        OffloadConfig(tier="ram", recompute_blocks="EncoderLayer")


# -- what a recompute reads ---------------------------------------------------------------------------------------------


def test_statistics_that_a_later_step_begins_to_update_are_an_error_before_any_weight_changes(tmp_path):
    kept = []

    def before(model, step):
        kept[:] = [step, model, [parameter.detach().clone() for parameter in model.parameters()]]
        for layer in model.layers:
            layer.norm.train(step >= 3)

    with pytest.raises(
        RecomputeError, match=r"norm\.num_batches_tracked of layers\.\d has been changed since its forward"
    ):
        run(lambda: Model(BatchNorm), auto(tmp_path, lambda: Model(BatchNorm)), steps=6, before=before)
    step, model, weights = kept
    assert step == 3
    assert all(map(torch.equal, model.parameters(), weights))
    assert not any(hook for layer in model.layers for hook in (layer._forward_hooks, layer._forward_pre_hooks))


def rewritten(tensor):
    tensor.detach().mul_(2)


CHANGES = {
    "a parameter": (lambda block, scale: rewritten(block.up.bias), r"up\.bias of layers\.1 has been changed"),
    "a buffer": (lambda block, scale: rewritten(block.average), r"average of layers\.1 has been changed"),
    "an input": (lambda block, scale: rewritten(scale), r"the input scale of layers\.\d has been changed"),
}


class WithBuffer(Plain):
    def prepare(self):
        self.register_buffer("average", torch.zeros(WIDTH))


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_forward_and_recompute_is_an_error(change):
    model, scale = Model(WithBuffer).train(), torch.full((WIDTH,), 1.5)
    blocks = find_blocks(model)
    Recompute(blocks).apply(blocks)
    loss = model(torch.ones(ROWS, WIDTH), scale=scale)
    act, message = CHANGES[change]
    act(model.layers[1], scale)
    with pytest.raises(RecomputeError, match=message):
        loss.backward()


def test_a_forward_that_does_something_else_the_second_time_is_an_error():
    class Forgetful(Plain):
        is_first = True

        def effect(self, hidden):
            was_first, self.is_first = self.is_first, False
            return hidden.sin() if was_first else hidden

    block = Forgetful().train()
    Recompute({"block": block}).apply(["block"])
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        block(torch.ones(ROWS, WIDTH, requires_grad=True)).sum().backward()


class Drawing(Plain):
    draw = staticmethod(float)

    def effect(self, hidden):
        return hidden * (1 + self.draw())


DRAWS = [
    random.random,
    numpy.random.rand,
    lambda: torch.rand(()).item(),
]


def test_a_recompute_draws_what_its_forward_drew_and_leaves_generators_as_they_were():
    walks = 2

    def steps(is_planned):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)  # noqa: NPY002
        model = Model(Drawing, layers=len(DRAWS)).train()
        for layer, draw in zip(model.layers, DRAWS, strict=True):
            layer.draw = draw
        if is_planned:
            Recompute(find_blocks(model)).apply(find_blocks(model))
        found = []
        for _ in range(2):
            loss = model(torch.ones(ROWS, WIDTH))
            drawn = [one() for one in DRAWS]  # as for the next batch, in front of backward
            for walk in range(walks):
                loss.backward(retain_graph=walk + 1 < walks)
                drawn += [one() for one in DRAWS]
            found += [loss.item(), *drawn, *(parameter.grad.tolist() for parameter in model.parameters())]
        return found

    assert steps(True) == steps(False)


# -- what a call receives -----------------------------------------------------------------------------------------------


TOKENS, PREFIX = 64, 8


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, attention_dropout=0.1, use_cache=False, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def prefix_tuned(model):
    import peft

    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=PREFIX)
    torch.manual_seed(2)
    return peft.get_peft_model(model, config).train()


def cache_by_hand(step):
    torch.manual_seed(step)
    layers = [(torch.randn(4, 2, PREFIX, 16), torch.randn(4, 2, PREFIX, 16)) for _ in range(6)]
    return transformers.DynamicCache(layers)


def train_llama(model, config, caches=lambda step: None, steps=5):
    """Losses, weights, and whether a block was ever recomputed."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    tokens = torch.arange(4 * TOKENS).reshape(4, TOKENS) % 64
    losses, recomputed = [], False
    torch.manual_seed(1)
    with offload_activations(model, config) as session:
        for step in range(steps):
            cache = caches(step)
            torch.manual_seed(step)
            options = {} if cache is None else {"past_key_values": cache}
            loss = model(input_ids=tokens, labels=tokens, **options).loss
            loss.backward()
            losses.append(loss.item())
            if cache is not None:
                losses.append(cache.get_seq_length())
            del loss, cache, options
            end_step(optimizer, session)
            recomputed |= any(one.recomputes for one in session.plan.placements.values())
    return losses, [parameter.detach().clone() for parameter in model.parameters()], recomputed


def budget_of(model, share):
    optimized = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    weights = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    tokens = torch.zeros(4, TOKENS, dtype=torch.int64)
    peak = peak_live_bytes(lambda: model(input_ids=tokens, labels=tokens).loss.backward())
    return int(weights + 2 * optimized + share * peak)


def llama_auto(tmp_path, model, share=0.6):
    return OffloadConfig(tier="auto", memory_budget=budget_of(model, share), directory=tmp_path, min_bytes=1024)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft still uses the older name
def test_prefix_tuning_keeps_its_prefix(tmp_path):
    config = llama_auto(tmp_path, prefix_tuned(llama()), 0.7)
    expected = train_llama(prefix_tuned(llama()), NONE)
    found = train_llama(prefix_tuned(llama()), config)
    assert not found[2]
    assert same(found[:2], expected[:2])


def test_a_cache_that_is_given_is_used_whenever_it_comes(tmp_path):
    def caches(step):
        return cache_by_hand(step) if step >= 3 else None

    config = llama_auto(tmp_path, llama())
    expected = train_llama(llama(), NONE, caches)
    found = train_llama(llama(), config, caches)
    assert found[2]
    assert same(found[:2], expected[:2])


def test_a_cache_is_used_by_blocks_that_are_to_be_recomputed():
    def step(model):
        cache, tokens = cache_by_hand(0), torch.arange(4 * TOKENS).reshape(4, TOKENS) % 64
        torch.manual_seed(0)
        loss = model(input_ids=tokens, labels=tokens, past_key_values=cache).loss
        loss.backward()
        return [loss.item(), cache.get_seq_length()], [parameter.grad for parameter in model.parameters()]

    model = llama()
    blocks = find_blocks(model)
    Recompute(blocks).apply(blocks)
    assert same(step(model), step(llama()))


def test_a_refusal_says_which_blocks_cannot_be_recomputed(tmp_path):
    config = OffloadConfig(tier="auto", memory_budget="2MiB", directory=tmp_path, min_bytes=1024)
    with pytest.raises(OffloadPlanError, match=r"recomputing model\.layers\.0 and 5 other blocks.*past_key_values"):
        train_llama(llama(), config, cache_by_hand)
