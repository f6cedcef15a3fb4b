"""MeZO with weights on a tier visits each block once for both losses, where a model's blocks are one stack; else twice."""

import concurrent.futures
import logging
import threading

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_offload import OffloadConfig, attach
from hf_offload.errors import OffloadError
from hf_offload.methods.mezo import MeZO, trajectory
from hf_offload.storage.store import whole_pages
from hf_offload.structure.units import find_blocks
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights
from tests.helpers.train import assert_same
from tests.numerics.test_mezo import ReferenceMeZO

STEPS = 4
SETTINGS = {"eps": 1e-2, "lr": 1e-2, "weight_decay": 0.1}
LOGGER = "hf_offload.methods.mezo.blocks"
ONCE, TWICE = "with one visit to each block", "in two passes"


def deep(name="gpt2"):
    """Six blocks, of which two may be in memory."""
    config = tiny_model(name).config
    config.num_hidden_layers = 6
    if name == "t5":
        config.num_decoder_layers = 6
    if name == "mixtral":
        config.output_router_logits = True  # which transformers collects in context variables
    torch.manual_seed(0)
    return type(tiny_model(name))(config)


def attached(model, tmp_path, tier="ssd"):
    directory = {"directory": str(tmp_path)} if tier == "ssd" else {}
    config = OffloadConfig(tier="none", memory_mode="mezo", params=tier, min_bytes=1024, **directory)
    return attach(model, config)


def loss_of(model, step):
    return model(**tiny_batch(model.config.model_type, seed=step)).loss


def trained(model, loss_of=loss_of):
    """The weights, the log, and the losses, after some steps."""
    optimizer = MeZO(model.parameters(), model, **SETTINGS)
    losses = [float(optimizer.step(lambda step=step: loss_of(model, step))) for step in range(STEPS)]
    return weights(model), optimizer.log, losses


def in_memory_and_on_a_tier(tmp_path, make, train=trained):
    """What ``train`` returns of two models, with the next random number."""
    results = []
    for is_attached in (False, True):
        model = make()
        if is_attached:
            attached(model, tmp_path)
        torch.manual_seed(5)
        results.append((train(model), torch.rand(())))
    assert_same(results[1], results[0])


@pytest.fixture
def said(caplog):
    """What was said of the passes."""
    caplog.set_level(logging.INFO, logger=LOGGER)
    records = lambda: [record.getMessage() for record in caplog.records if record.name == LOGGER]  # noqa: E731
    return lambda: [ONCE if ONCE in each else TWICE for each in records()]


@pytest.mark.parametrize(
    ("name", "tier", "how"),
    [
        ("gpt2", "ssd", [ONCE]),
        ("bert", "ssd", [ONCE]),
        ("llama", "ram", [ONCE]),
        ("mixtral", "ssd", [ONCE]),
        ("t5", "ram", []),  # two stacks
    ],
)
def test_one_visit_has_the_bits_of_two_passes_and_of_a_second_implementation(name, tier, how, tmp_path, said):
    expected = trained(deep(name))
    assert said() == []
    model = deep(name)
    session = attached(model, tmp_path, tier)
    found = trained(model)
    assert_same(found, expected)
    assert said() == how
    assert session.residency.most_bytes <= session.residency.budget_bytes
    theirs = deep(name)
    groups = [{"params": list(theirs.parameters()), "lr": SETTINGS["lr"], "weight_decay": SETTINGS["weight_decay"]}]
    reference = ReferenceMeZO(theirs, groups, SETTINGS["eps"])
    for row, step in zip(found[1].rows, range(STEPS), strict=True):
        reference.step(row.seed, lambda model, step=step: loss_of(model, step))
    assert_same(found[0], weights(theirs))


@pytest.mark.parametrize("ties", [False, True])
def test_one_visit_reads_each_weight_once_and_writes_it_once(ties, tmp_path, said):
    """4 bytes of a parameter in fp32 each way. A tied embedding, which the passes use twice, is read once more."""
    config = GPT2Config(
        n_layer=12, n_embd=64, n_head=2, vocab_size=128, n_positions=32, tie_word_embeddings=ties, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    residency = attached(model, tmp_path).residency
    optimizer = MeZO(model.parameters(), model, lr=1e-3)
    words = torch.arange(32)[None]
    moved = []
    for _ in range(5):
        optimizer.step(lambda: model(words, labels=words).loss)
        residency.store.settle()
        moved.append(residency.moved_bytes)
    assert said() == [ONCE]
    (written, read), (written_later, read_later) = moved[3:5]
    again = model.transformer.wte.weight.nbytes if ties else 0
    assert residency.limit_bytes < residency.total_bytes / 4
    in_pages = sum(whole_pages(one.nbytes) for one in residency.weights())
    assert 0 < written_later - written <= in_pages
    largest = max(one.nbytes for one in residency.weights() if "attn" in one.name)  # where the passes meet the head
    assert 0 < read_later - read <= in_pages + again + largest
    assert residency.most_bytes <= residency.budget_bytes


# -- two passes ---------------------------------------------------------------------------------------------------------


def draws(model):
    """As a ViTMAE does its mask."""
    model.transformer.h[0].register_forward_pre_hook(lambda block, args: (args[0] * torch.rand(()), *args[1:]))
    return model


def uses_a_block_twice(model):
    """As an ALBERT does."""
    model.transformer.h[3] = model.transformer.h[2]
    return model


def changing(model, change):
    """``change`` a tensor in each forward."""
    model.register_buffer("count", torch.zeros(()))
    model.transformer.h[3].register_forward_pre_hook(lambda block, args: change(model, block))
    return model


def counts_in_a_buffer(model):
    return changing(model, lambda model, block: model.count.add_(1) and None)


def has_an_embedding_with_a_largest_norm(model):
    model.transformer.wpe.max_norm = 0.1
    return model


def replaces_data(model):
    def replace(model, block):
        block.mlp.c_fc.weight.data = block.mlp.c_fc.weight.data * 0.5

    return changing(model, replace)


@pytest.mark.parametrize(
    ("way", "how"),
    [
        (draws, [TWICE]),
        (uses_a_block_twice, []),
        (counts_in_a_buffer, [TWICE]),
        (has_an_embedding_with_a_largest_norm, [TWICE]),
        (replaces_data, [TWICE]),
    ],
)
def test_a_model_that_does_not_fit_has_the_bits_of_two_passes(way, how, tmp_path, said):
    in_memory_and_on_a_tier(tmp_path, lambda: way(deep()))
    assert said() == how


def draws_later(model):
    return loss_of(model, 2) * torch.rand(())


def runs_twice_later(model):
    """As an accumulated step with another number of micro-batches."""
    return loss_of(model, 2) + loss_of(model, 12)


def uses_other_blocks_later(model, order):
    blocks = vars(model).setdefault("all_blocks", model.transformer.h)  # both passes may be here at once
    model.transformer.h = nn.ModuleList([blocks[place] for place in order])
    try:
        return loss_of(model, 2)
    finally:
        model.transformer.h = blocks


def runs_less_later(model):
    """As a model that ends early."""
    return uses_other_blocks_later(model, range(5))


def runs_in_another_order_later(model):
    return uses_other_blocks_later(model, [0, 1, 3, 2, 4, 5])


def keeps_a_view_later(model):
    kept = []
    handle = model.transformer.h[0].register_forward_hook(
        lambda block, args, output: kept.append(block.mlp.c_fc.weight.view(-1)[:1])
    )
    try:
        return loss_of(model, 2) + kept[0].sum()
    finally:
        handle.remove()


def computes_in_a_thread_later(model):
    with concurrent.futures.ThreadPoolExecutor(1, initializer=torch.set_grad_enabled, initargs=(False,)) as pool:
        return pool.submit(loss_of, model, 2).result()


@pytest.mark.parametrize(
    "loss",
    [
        draws_later,
        runs_twice_later,
        runs_less_later,
        runs_in_another_order_later,
        keeps_a_view_later,
        computes_in_a_thread_later,
    ],
)
def test_a_later_step_that_does_something_else_has_the_bits_of_two_passes(loss, tmp_path, said):
    third = lambda model, step: loss(model) if step == 2 else loss_of(model, step)  # noqa: E731
    in_memory_and_on_a_tier(tmp_path, deep, lambda model: trained(model, third))
    assert said() == [ONCE, TWICE]


# -- errors -------------------------------------------------------------------------------------------------------------


class Lost(Exception):
    pass


def steps_around(model, fail):
    """Two steps, one that ``fail`` breaks off, and a last one: weights, log and its loss."""
    optimizer = MeZO(model.parameters(), model, **SETTINGS)
    for step in range(2):
        optimizer.step(lambda step=step: loss_of(model, step))
    fail(model, optimizer)
    loss = float(optimizer.step(lambda: loss_of(model, 3)))
    return weights(model), str(optimizer.log), loss  # NaN is not NaN


@pytest.mark.parametrize("way", [counts_in_a_buffer, has_an_embedding_with_a_largest_norm, replaces_data])
def test_a_tensor_that_a_later_step_changes_for_the_first_time_is_an_error(way, tmp_path):
    """What both passes have read of it is not known."""
    model = deep()
    attached(model, tmp_path)

    def fail(model, optimizer):
        way(model)
        with pytest.raises(
            OffloadError, match=r"has changed a weight or a buffer in a forward pass.*no update was made"
        ):
            optimizer.step(lambda: loss_of(model, 2))

    _, log, loss = steps_around(model, fail)
    assert log.count("gradient=nan") == 1
    assert 0 < loss < 10


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("error", [Lost, KeyboardInterrupt])
def test_an_error_in_either_pass_leaves_weights_as_two_passes_would(which, error, tmp_path):
    threads_of_calls = []

    def fail(model, optimizer):
        calls = []

        def raise_in_a_block(block, args):
            calls.append(threading.get_ident())
            if len(calls) > which:
                raise error("in a block")

        threads = threading.active_count()
        handle = list(find_blocks(model).values())[3].register_forward_pre_hook(raise_in_a_block)
        with pytest.raises(error, match="in a block"):
            optimizer.step(lambda: loss_of(model, 2))
        handle.remove()
        threads_of_calls.append(len(set(calls)))
        assert threading.active_count() <= threads  # those of other models may end meanwhile

    in_memory_and_on_a_tier(tmp_path, deep, lambda model: steps_around(model, fail))
    assert threads_of_calls == [1, 1 + which]


def test_a_weight_that_cannot_be_put_back_is_not_forgotten(tmp_path, monkeypatch):
    """It has another value than the first pass reads."""
    model = deep()
    attached(model, tmp_path)
    optimizer = MeZO(model.parameters(), model, **SETTINGS)
    for step in range(2):
        optimizer.step(lambda step=step: loss_of(model, step))

    def fail(weight, before):
        raise Lost

    with monkeypatch.context() as patched:
        patched.setattr(trajectory._Weight, "put_back", fail)
        with pytest.raises(Lost):
            optimizer.step(lambda: loss_of(model, 2))
    with pytest.raises(OffloadError, match="An earlier error came while MeZO changed the weight"):
        optimizer.step(lambda: loss_of(model, 2))
