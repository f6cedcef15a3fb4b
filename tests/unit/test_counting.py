"""Counting on tensors without data, against real steps."""

import itertools
import signal
import types

import pytest
import torch
import transformers

from hf_offload import OffloadConfig, offload_activations
from hf_offload.errors import OffloadPlanError
from hf_offload.forecast.counting import count_footprint
from hf_offload.forecast.fake import fake_mode
from hf_offload.forecast.scaling import Family
from hf_offload.methods.protocol import OptimizerBytes
from hf_offload.structure.units import find_blocks, find_units
from hf_offload.transforms.rematerialization.apply import ElementwiseBlocks, Rematerialization
from hf_offload.transforms.sampling.apply import Sampling
from hf_offload.transforms.tiling.apply import Tiling
from hf_offload.transforms.tiling.cut import Cut
from tests.helpers.activation_heavy_models import CONFIGS, ROWS, TOKENS, batch, build
from tests.helpers.handmade_footprints import footprint_of
from tests.helpers.live_bytes import peak_live_bytes

NOTHING = OptimizerBytes(0, 0, 0)


def count(name, dropout, min_bytes=4096, elementwise=False):
    with fake_mode():
        model, inputs = build(name, dropout), batch()
        ElementwiseBlocks(find_blocks(model)).apply(elementwise)
    return count_footprint(
        model,
        inputs,
        cost=lambda flops, moved, dtype: flops / 1e11 + moved / 1e10,
        optimizer=NOTHING,
        min_bytes=min_bytes,
        as_on_cuda=False,
    )


def kept_curve(footprint):
    """Live bytes with everything kept, at every moment."""
    change = [0] * (len(footprint.segments) + 1)
    for one in footprint.saved:
        if one.gone < one.released:
            change[one.gone] += one.nbytes
            change[one.released] -= one.nbytes
    held = itertools.accumulate(change)
    return [segment.live_bytes + kept for segment, kept in zip(footprint.segments, held, strict=False)]


@pytest.mark.parametrize("name", CONFIGS)
def test_counted_bytes_and_the_counted_peak_are_those_of_a_real_step(name, tmp_path):
    footprint = count(name, 0.1)
    model = build(name, 0.1)
    config = OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=4096)
    with offload_activations(model, config) as session:
        model(**batch()).loss.backward()
        moved = session.stats.total.offloaded_bytes
    assert sum(one.nbytes for one in footprint.saved) == pytest.approx(moved, rel=0.01)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in {*model.parameters(), *model.buffers()})
    assert footprint.base_bytes == weights
    inputs = batch()

    def step():
        model.zero_grad(set_to_none=True)
        model(**inputs).loss.backward()

    step()
    model.zero_grad(set_to_none=True)
    assert max(kept_curve(footprint)) == pytest.approx(peak_live_bytes(step), rel=0.02)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"sampled_linear": {"ratio": 0.25}}),
        ("llama", {"recompute_elementwise": "exact"}),
        ("gpt2", {"sampled_linear": 0.25, "recompute_elementwise": "dropout,derivative-8bit"}),
    ],
)
def test_sampled_and_lean_models_are_counted_as_they_run(name, settings, tmp_path):
    """On tensors without data, which also shows that nothing of a draw is read on the host."""
    config = OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=4096, **settings)
    usual = count(name, 0.1)
    with fake_mode():
        model, inputs = build(name, 0.1), batch()
        Sampling(model, config.sampling).apply()
        Rematerialization(model, config.elementwise).apply()
    footprint = count_footprint(model, inputs, cost=lambda *_: 0.0, optimizer=NOTHING, min_bytes=4096, as_on_cuda=False)
    model = build(name, 0.1)
    with offload_activations(model, config) as session:
        model(**batch()).loss.backward()
        moved = session.stats.total.offloaded_bytes
    saved = sum(one.nbytes for one in footprint.saved)
    assert saved == pytest.approx(moved, rel=0.01)
    assert saved < 0.9 * sum(one.nbytes for one in usual.saved)
    # What was moved is gone from memory when backward begins: nothing else holds it, were it the rows of one layer.
    one_part = ROWS * TOKENS // 4 * 128 * 4
    assert held_over_forward(footprint) < held_over_forward(usual) + one_part // 2


class WithoutRows(torch.nn.Module):
    """A layer, and products of its weight that have no rows."""

    def __init__(self, products):
        super().__init__()
        self.layer, self.products = torch.nn.Linear(64, 64, bias=False), products

    def forward(self, inputs):
        for _ in range(self.products):
            torch.mm(self.layer.weight, inputs.new_zeros((64, 0)))
        return types.SimpleNamespace(loss=self.layer(inputs).sum())


def test_an_operation_of_no_elements_takes_no_time():
    found = []
    for products in (0, 3):
        with fake_mode():
            model, inputs = WithoutRows(products), {"inputs": torch.ones(4, 64)}
        footprint = count_footprint(
            model, inputs, cost=lambda flops, moved, dtype: moved, optimizer=NOTHING, min_bytes=1, as_on_cuda=False
        )
        found.append(footprint.step_s)
    assert found[0] == found[1] > 0


def held_over_forward(footprint):
    return next(segment.live_bytes for segment in footprint.segments if segment.backward)


def test_every_block_and_its_parts_are_units():
    units = find_units(build("gpt2", 0.0))
    assert next(iter(units)) == "GPT2LMHeadModel"
    assert {name for name, unit in units.items() if unit.block == "transformer.h.1"} == {
        "transformer.h.1", "transformer.h.1.attn", "transformer.h.1.mlp",
    }  # fmt: skip
    assert {name for name, unit in units.items() if unit.block is None} == {
        "GPT2LMHeadModel", "transformer.wte", "transformer.wpe", "lm_head",
    }  # fmt: skip
    # T5 keeps its parts in a list
    assert "encoder.block.0.layer.0" in find_units(build("t5", 0.0))


def test_units_share_out_what_is_saved():
    footprint = count("gpt2", 0.1)
    assert sum(footprint.saved_bytes.values()) == sum(one.nbytes for one in footprint.saved)
    assert footprint.saved_bytes["transformer.h.0.mlp"] > footprint.saved_bytes["transformer.h.0"] > 0
    assert footprint.saved_bytes["transformer.wte"] == ROWS * TOKENS * 8  # the tokens
    assert len(footprint.blocks) == 3
    assert all(span.boundary_bytes == ROWS * TOKENS * 128 * 4 for span in footprint.blocks)
    begins = [span.backward for span in footprint.blocks]
    assert begins == sorted(begins, reverse=True)


def test_small_tensors_are_not_counted_as_movable():
    large = count("gpt2", 0.0, min_bytes=100_000)
    assert all(one.nbytes >= 100_000 for one in large.saved)
    assert max(kept_curve(large)) == max(kept_curve(count("gpt2", 0.0)))


def test_cuda_kernels_draw_attentions_dropout_again():
    with fake_mode():
        model, inputs = build("gpt2", 0.1), batch()
    options = {"cost": lambda *_: 0.0, "optimizer": NOTHING, "min_bytes": 4096}
    on_cpu = count_footprint(model, inputs, as_on_cuda=False, **options)
    on_cuda = count_footprint(model, inputs, as_on_cuda=True, **options)
    matrix = ROWS * 4 * TOKENS * TOKENS * 4
    assert matrix in {one.nbytes for one in on_cpu.saved if one.unit.endswith("attn")}
    assert matrix not in {one.nbytes for one in on_cuda.saved if one.unit.endswith("attn")}


def test_cuda_kernels_keep_a_byte_for_what_dropout_does_to_a_number():
    with fake_mode():
        model, inputs = build("gpt2", 0.1), batch()
    options = {"cost": lambda *_: 0.0, "optimizer": NOTHING, "min_bytes": 4096}
    sizes = [
        [one.nbytes for one in count_footprint(model, inputs, as_on_cuda=cuda, **options).saved]
        for cuda in (False, True)
    ]
    numbers = ROWS * TOKENS * 128
    assert sizes[0].count(numbers) == 0
    assert sizes[1].count(numbers) == 1 + 2 * 3  # behind the embeddings, and twice in each block


def test_what_is_recomputed_has_the_dropout_of_cuda_too():
    """In a tiled MLP, dropout runs once more in backward."""
    options = {"cost": lambda *_: 0.0, "optimizer": NOTHING, "min_bytes": 4096, "as_on_cuda": True}
    saved = []
    for tiled in ("off", "on"):
        with fake_mode():
            model, inputs = build("gpt2", 0.1), batch()
            tiling = Tiling(model, OffloadConfig(tiled_mlp=tiled), Cut(exactly=(4, 4)))
            tiling.apply()
        saved.append(count_footprint(model, inputs, **options).saved_bytes["transformer.h.1.mlp"])
    assert 0 < saved[1] < saved[0]


@pytest.mark.parametrize(
    ("hook", "expected"), [("register_forward_hook", [0, 1]), ("register_full_backward_pre_hook", [2, 1, 0])]
)
def test_ctrl_c_ends_a_forward_and_waits_for_backward(hook, expected):
    """The C++ of a backward may not survive an exception that comes at any place."""
    with fake_mode():
        model, inputs = build("gpt2", 0.0), batch()
    reached = []
    for index, block in enumerate(model.transformer.h):
        getattr(block, hook)(lambda *_, index=index: reached.append(index))
    getattr(model.transformer.h[1], hook)(lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        count_footprint(model, inputs, cost=lambda *_: 0.0, optimizer=NOTHING, min_bytes=4096, as_on_cuda=True)
    assert reached == expected


def test_a_forward_that_reads_values_is_refused_with_a_way_out():
    with fake_mode():
        config = transformers.MixtralConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager",
        )  # fmt: skip
        model = transformers.MixtralForCausalLM(config).train()
        inputs = batch()
    with pytest.raises(OffloadPlanError, match=r"MixtralForCausalLM cannot be counted.*offload='auto'"):
        count_footprint(model, inputs, cost=lambda *_: 0.0, optimizer=NOTHING, min_bytes=0, as_on_cuda=False)


def test_a_real_model_is_not_counted():
    model = build("gpt2", 0.0)
    with pytest.raises(OffloadPlanError, match="fake_mode"):
        count_footprint(model, batch(), cost=lambda *_: 0.0, optimizer=NOTHING, min_bytes=0, as_on_cuda=False)


def test_three_lengths_tell_a_constant_from_what_grows_with_the_tokens():
    def counted(tokens):
        return footprint_of([10 * tokens], [1e-3 * tokens], [1000 + 7 * tokens + 2 * tokens**2])

    family = Family(1, 4, counted(4), [(8, counted(8)), (16, counted(16))])
    for many, tokens in ((1, 4), (1, 100), (3, 100)):
        grown = family.at(many, tokens)
        assert grown.segments[0].live_bytes == 1000 + many * (7 * tokens + 2 * tokens**2)
        assert grown.saved[0].nbytes == many * 10 * tokens
