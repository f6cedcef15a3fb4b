"""Blocks whose forward cannot run twice are not recomputed, however much a budget asks for it."""

import collections
import functools
import itertools
import random
import types

import numpy
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_offload import OffloadConfig, offload_activations
from hf_offload.engine.recompute import Recompute
from hf_offload.errors import OffloadPlanError, RecomputeError
from hf_offload.structure.units import find_blocks
from hf_offload.transforms.rematerialization.apply import ElementwiseBlocks
from tests.helpers import other_module_noise as noise
from tests.helpers.live_bytes import peak_live_bytes
from tests.helpers.other_module_noise import draw
from tests.helpers.training_steps import training_steps

WIDTH, ROWS = 32, 256
STEPS = 4
CALLS = []
COUNTS = collections.Counter()
HIDDEN = types.SimpleNamespace(total=torch.zeros(1))


@pytest.fixture(autouse=True)
def machine_that_recomputes(machine_with_drive, short_search):
    """A drive so slow that recomputing is always the better way."""
    machine_with_drive(1e6)


class Plain(GradientCheckpointingLayer):
    """A block without side effects, and the base of those with one."""

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


class CumulativeBatchNorm(Plain):
    def prepare(self):
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)


class SpectralNorm(Plain):
    def prepare(self):
        parametrizations.spectral_norm(self.up)


@pytest.mark.filterwarnings("ignore::FutureWarning")
class OldSpectralNorm(Plain):
    def prepare(self):
        nn.utils.spectral_norm(self.up)


class AttributeCounter(Plain):
    def prepare(self):
        self.calls = 0

    def effect(self, hidden):
        self.calls += 1
        return hidden * (1 + 1 / self.calls)


class BufferThroughData(Plain):
    def prepare(self):
        self.register_buffer("amax", torch.zeros(1))

    def effect(self, hidden):
        self.amax.data.copy_(torch.maximum(self.amax * 0.9, hidden.detach().abs().max()))
        return hidden / self.amax


class TensorAttribute(Plain):
    def prepare(self):
        self.history = torch.zeros(4)

    def effect(self, hidden):
        self.history.data.copy_(torch.cat([self.history[1:], hidden.detach().mean()[None]]))
        return hidden - self.history.mean()


class ReplacedAttribute(Plain):
    def prepare(self):
        self.average = torch.zeros(WIDTH)

    def effect(self, hidden):
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        return hidden - self.average


class ListOfStatistics(Plain):
    def prepare(self):
        self.seen = []

    def effect(self, hidden):
        self.seen.append(round(float(hidden.detach().mean()), 4))
        return hidden + len(self.seen)


class Statistics:
    __slots__ = ("loads",)

    def __init__(self):
        self.loads = {}


class NestedObject(Plain):
    """As load-balancing statistics of a mixture of experts."""

    def prepare(self):
        self.statistics = {"router": [Statistics()]}

    def effect(self, hidden):
        loads = self.statistics["router"][0].loads
        chosen = int(hidden.detach().sum(0).argmax())
        loads[chosen] = loads.get(chosen, 0) + 1
        return hidden + sum(loads.values())


class GlobalList(Plain):
    def effect(self, hidden):
        CALLS.append(len(CALLS))
        return hidden + len(CALLS)


def count_globally():
    COUNTS["calls"] += 1
    return COUNTS["calls"]


class GlobalThroughAFunction(Plain):
    def effect(self, hidden):
        return hidden + count_globally()


class HiddenWrite(Plain):
    """Into what no attribute leads to, past the version counter."""

    def effect(self, hidden):
        HIDDEN.total.data.add_(1)
        return hidden + HIDDEN.total


class ClassCounter(Plain):
    calls = 0

    def effect(self, hidden):
        type(self).calls += 1
        return hidden + type(self).calls


class Iterator(Plain):
    def prepare(self):
        self.numbers = itertools.count()

    def effect(self, hidden):
        return hidden + next(self.numbers)


class PythonsRandomNumbers(Plain):
    def effect(self, hidden):
        return hidden * random.uniform(0.9, 1.1)


class NumPysRandomNumbers(Plain):
    def effect(self, hidden):
        return hidden * float(numpy.random.uniform(0.9, 1.1))  # noqa: NPY002  the generator that all share


class NumPysOwnGenerator(Plain):
    def prepare(self):
        self.generator = numpy.random.RandomState(0)

    def effect(self, hidden):
        return hidden * float(self.generator.uniform(0.9, 1.1))


class OwnGenerator(Plain):
    def prepare(self):
        self.generator = torch.Generator().manual_seed(0)

    def effect(self, hidden):
        return hidden * torch.rand(hidden.shape, generator=self.generator)


class HookOfAChild(Plain):
    def prepare(self):
        calls = []
        self.down.register_forward_hook(lambda module, args, output: calls.append(0) or output * (1 + 1 / len(calls)))


class WeightChanged(Plain):
    def effect(self, hidden):
        with torch.no_grad():
            self.norm.weight.mul_(0.99)
        return hidden


class InputChanged(Plain):
    def effect(self, hidden):
        return hidden.mul_(1.01) if not hidden.is_leaf else hidden


BLOCKS = Plain.__subclasses__()
# One of each way of noticing.
QUICK = (BatchNorm, SpectralNorm, NestedObject, HiddenWrite, OwnGenerator, HookOfAChild, InputChanged)


class Model(nn.Module):
    def __init__(self, block, layers=4):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(layers)])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, inputs, **options):
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = layer(hidden, **options)
        return self.last(hidden).square().mean()


def reset():
    CALLS.clear()
    COUNTS.clear()
    HIDDEN.total = torch.zeros(1)
    ClassCounter.calls = 0
    random.seed(0)
    noise.reset()
    numpy.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


def run(make, config, steps=STEPS, options=lambda step: {}, before=lambda model, step: None):
    """Losses, everything there is of the model's state in the end, and which blocks were ever recomputed."""
    reset()
    model = make().train()

    def loss_of(step):
        before(model, step)
        return model(torch.randn(ROWS, WIDTH), **options(step))

    losses, recomputed = [], set()
    torch.manual_seed(1)
    for session, of_step in training_steps(model, config, steps, loss_of, learning_rate=1e-2):
        losses += of_step
        recomputed |= {name for name, one in session.plan.placements.items() if one.recomputes}
    return losses, state(model), recomputed


def state(model):
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    others = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Plain):
            for key in ("calls", "history", "average", "seen", "numbers"):
                if hasattr(layer, key):
                    others[f"{name}.{key}"] = repr(getattr(layer, key))
            if hasattr(layer, "statistics"):
                others[name] = repr(layer.statistics["router"][0].loads)
    random_state = random.getstate(), repr(numpy.random.get_state())  # noqa: NPY002
    return tensors, others, (list(CALLS), dict(COUNTS), float(HIDDEN.total), ClassCounter.calls, random_state)


def same(found, expected):
    tensors = found[1][0].keys() == expected[1][0].keys() and all(
        torch.equal(one, expected[1][0][name]) for name, one in found[1][0].items()
    )
    return found[0] == expected[0] and tensors and found[1][1:] == expected[1][1:]


@functools.cache
def budget_for(block):
    """Weights and state, and a part of the activations."""
    reset()
    model = Model(block).train()
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    inputs = torch.randn(ROWS, WIDTH)
    activations = peak_live_bytes(lambda: model(inputs).backward())
    return int(3 * weights + 0.75 * activations)


def auto(tmp_path, block=Plain):
    return OffloadConfig(
        tier="auto",
        memory_budget=budget_for(block),
        directory=tmp_path,
        min_bytes=1024,
        recompute_elementwise="off",  # it takes steps of its own to be measured
    )


NONE = OffloadConfig(tier="none")


def test_a_block_without_side_effects_is_recomputed_exactly(tmp_path):
    found = run(lambda: Model(Plain), auto(tmp_path))
    assert any(name.startswith("layers.") for name in found[2])
    assert same(found, run(lambda: Model(Plain), NONE))


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "block",
    [pytest.param(one, id=one.__name__, marks=() if one in QUICK else pytest.mark.full) for one in BLOCKS],
)
def test_a_block_that_changes_something_is_not_recomputed(block, tmp_path):
    expected = run(lambda: Model(block), NONE)
    found = run(lambda: Model(block), auto(tmp_path, block))
    assert not found[2]
    assert same(found, expected)


def scaled_by_noise(module, args, output):
    return output * noise.GENERATOR.uniform(0.9, 1.1)


def scaled_by_a_draw(module, args, output):
    return output * draw()


@pytest.mark.parametrize("hook", [scaled_by_noise, scaled_by_a_draw])
def test_a_block_with_a_hook_that_draws_from_another_modules_generator_is_not_recomputed(hook, tmp_path):
    def make():
        model = Model(Plain)
        for layer in model.layers:
            layer.down.register_forward_hook(hook)
        return model

    expected = run(make, NONE)
    found = run(make, auto(tmp_path))
    assert not found[2]
    assert same(found, expected)


def test_blocks_of_other_kinds_in_the_same_model_are_recomputed(tmp_path):
    def make():
        model = Model(Plain, layers=6)
        model.layers[2] = BatchNorm()
        return model

    found = run(make, auto(tmp_path))
    assert "layers.2" not in found[2]
    assert {"layers.0", "layers.1", "layers.3"} & found[2]
    assert same(found, run(make, NONE))


# -- what changes in a later step ---------------------------------------------------------------------------------------


def freeze_until(step_of_thaw):
    def before(model, step):
        for layer in model.layers:
            layer.norm.train(step >= step_of_thaw)

    return before


def test_statistics_that_a_later_step_begins_to_update_are_updated_once(tmp_path):
    """A batch norm that is frozen when the step is measured lets its block be recomputed, and no longer once it trains."""
    expected = run(lambda: Model(BatchNorm), NONE, steps=6, before=freeze_until(3))
    found = run(lambda: Model(BatchNorm), auto(tmp_path, BatchNorm), steps=6, before=freeze_until(3))
    assert found[2]
    assert same(found, expected)
    assert int(found[1][0]["layers.0.norm.num_batches_tracked"]) == 3


class CountsLater(Plain):
    def prepare(self):
        self.steps, self.calls = 0, 0

    def effect(self, hidden):
        if STEP[0] >= 3:
            self.calls += 1
        return hidden


STEP = [0]


def test_what_a_recompute_changes_in_a_later_step_is_an_error_before_any_weight_changes(tmp_path):
    weights = []

    def before(model, step):
        STEP[0] = step
        weights[:] = [model, [parameter.detach().clone() for parameter in model.parameters()]]

    with pytest.raises(RecomputeError, match=r"calls of layers\.\d has been changed since its forward began"):
        run(lambda: Model(CountsLater), auto(tmp_path), before=before)
    assert STEP[0] == 3
    model, kept = weights
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), kept, strict=True))
    assert not any(hook for layer in model.layers for hook in (layer._forward_hooks, layer._forward_pre_hooks))


class DrawsLater(Plain):
    draw = None

    def effect(self, hidden):
        return hidden if self.draw is None else hidden * (1 + self.draw())


DRAWS = [
    random.random,
    lambda: random.gauss(0, 1),
    numpy.random.rand,
    lambda: numpy.random.standard_normal(),  # noqa: NPY002
]


@pytest.mark.parametrize("walks", [1, 2])
def test_what_a_later_step_begins_to_draw_is_drawn_again_in_its_recompute(walks):
    def steps(model):
        random.seed(0)
        numpy.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        found = []
        for step in range(2):
            for layer, own in zip(model.layers, DRAWS, strict=True):
                layer.draw = own if step else None
            loss = model(torch.ones(ROWS, WIDTH))
            drawn = [one() for one in DRAWS]  # as for the next batch, in front of backward
            for walk in range(walks):
                loss.backward(retain_graph=walk + 1 < walks)
                drawn += [one() for one in DRAWS]
            found.append((loss.item(), drawn, [parameter.grad.clone() for parameter in model.parameters()]))
        return found

    def make():
        torch.manual_seed(0)
        return Model(DrawsLater, layers=len(DRAWS)).train()

    model = make()
    Recompute(dict(model.layers.named_children())).apply(map(str, range(len(DRAWS))))
    for one, other in zip(steps(model), steps(make()), strict=True):
        assert one[:2] == other[:2]
        assert all(map(torch.equal, one[2], other[2]))


class Outer(nn.Module):
    """A module around an activation function, with blocks."""

    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()
        self.blocks = Model(Plain)

    def forward(self, inputs):
        return self.blocks(self.act(inputs) * inputs)


def test_blocks_are_recomputed_inside_of_a_module_whose_products_are():
    def run(is_planned):
        torch.manual_seed(0)
        outer = Outer()
        if is_planned:
            Recompute(dict(outer.blocks.layers.named_children())).apply(map(str, range(4)))
            elementwise = ElementwiseBlocks({"outer": outer})
            elementwise.apply(["outer"])
            assert elementwise.names
        torch.manual_seed(1)
        loss = outer(torch.ones(ROWS, WIDTH))
        loss.backward()
        return [loss, *(parameter.grad for parameter in outer.parameters())]

    assert all(map(torch.equal, run(True), run(False)))


# -- what a call receives -----------------------------------------------------------------------------------------------


class Anything:
    """An object of a class that no rule knows."""

    def __init__(self):
        self.count = 0


class TakesAnything(Plain):
    def forward(self, hidden, scale=None, thing=None):
        if thing is not None:
            thing.count += 1
            scale = 1 + 1 / thing.count
        return super().forward(hidden, scale)


def test_a_call_with_an_unknown_object_is_not_recomputed_whenever_it_comes(tmp_path):
    def runs(config):
        thing = Anything()
        return *run(
            lambda: Model(TakesAnything), config, steps=5, options=lambda step: {"thing": thing if step > 2 else None}
        ), thing.count

    expected, found = runs(NONE), runs(auto(tmp_path))
    assert found[2]
    assert same(found, expected)
    assert found[3] == expected[3]


def test_tensors_among_the_arguments_are_no_hindrance(tmp_path):
    found = run(lambda: Model(Plain), auto(tmp_path), options=lambda step: {"scale": torch.full((WIDTH,), 1.5)})
    assert found[2]
    assert same(found, run(lambda: Model(Plain), NONE, options=lambda step: {"scale": torch.full((WIDTH,), 1.5)}))


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
            optimizer.step()
            optimizer.zero_grad()
            session.end_step()
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


def equal_runs(found, expected):
    return found[0] == expected[0] and all(
        torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True)
    )


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft still uses the older name
def test_prefix_tuning_keeps_its_prefix(tmp_path):
    config = llama_auto(tmp_path, prefix_tuned(llama()), 0.7)
    expected = train_llama(prefix_tuned(llama()), NONE)
    found = train_llama(prefix_tuned(llama()), config)
    assert not found[2]
    assert equal_runs(found, expected)


@pytest.mark.parametrize("first", [0, 3])
def test_a_cache_that_is_given_is_used_whenever_it_comes(first, tmp_path):
    def caches(step):
        return cache_by_hand(step) if step >= first else None

    config = llama_auto(tmp_path, llama())
    expected = train_llama(llama(), NONE, caches)
    found = train_llama(llama(), config, caches)
    assert found[2] == (first > 0)
    assert equal_runs(found, expected)


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
    assert equal_runs(step(model), step(llama()))


def test_a_refusal_says_which_blocks_cannot_be_recomputed(tmp_path):
    config = OffloadConfig(tier="auto", memory_budget="2MiB", directory=tmp_path, min_bytes=1024)
    with pytest.raises(OffloadPlanError, match=r"recomputing model\.layers\.0 and 5 other blocks.*past_key_values"):
        train_llama(llama(), config, cache_by_hand)
