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
from hf_offload.optimizers.mezo import MeZO
from hf_offload.storage.store import whole_pages
from hf_offload.structure.units import find_blocks
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights
from tests.numerics.test_mezo import ReferenceMeZO

STEPS = 4
SETTINGS = {"eps": 1e-2, "lr": 1e-2, "weight_decay": 0.1}
LOGGER = "hf_offload.optimizers.mezo.blocks"
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


def attached(model, tmp_path, tier="ssd", **others):
    others = {"min_bytes": 1024} | others
    if tier == "ssd":
        others["directory"] = str(tmp_path)
    return attach(model, OffloadConfig(tier="none", memory_mode="mezo", params=tier, **others))


def loss_of(model, step):
    return model(**tiny_batch(model.config.model_type, seed=step)).loss


def trained(model, loss_of=loss_of, restore="reference"):
    """The weights, the log, and the losses, after some steps."""
    optimizer = MeZO(model.parameters(), model, restore=restore, **SETTINGS)
    losses = [float(optimizer.step(lambda step=step: loss_of(model, step))) for step in range(STEPS)]
    return weights(model), optimizer.log, losses


def assert_same(found, expected):
    assert found[1:] == expected[1:]
    assert all(torch.equal(one, expected[0][name]) for name, one in found[0].items())


@pytest.fixture
def said(caplog):
    """What was said of the passes."""
    caplog.set_level(logging.INFO, logger=LOGGER)
    records = lambda: [record.getMessage() for record in caplog.records if record.name == LOGGER]  # noqa: E731
    return lambda: [ONCE if ONCE in each else TWICE for each in records()]


@pytest.mark.parametrize("restore", ["reference", "pristine"])
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
def test_one_visit_has_the_bits_of_two_passes_and_of_a_second_implementation(name, tier, how, restore, tmp_path, said):
    expected = trained(deep(name), restore=restore)
    assert said() == []
    model = deep(name)
    session = attached(model, tmp_path, tier)
    found = trained(model, restore=restore)
    assert_same(found, expected)
    assert said() == how
    assert session.residency.most_bytes <= session.residency.budget_bytes
    theirs = deep(name)
    groups = [{"params": list(theirs.parameters()), "lr": SETTINGS["lr"], "weight_decay": SETTINGS["weight_decay"]}]
    reference = ReferenceMeZO(theirs, groups, SETTINGS["eps"], restore)
    for row, step in zip(found[1].rows, range(STEPS), strict=True):
        reference.step(row.seed, lambda model, step=step: loss_of(model, step))
    assert all(torch.equal(one, found[0][key]) for key, one in weights(theirs).items())


@pytest.mark.parametrize("ties", [False, True])
def test_one_visit_reads_each_weight_once_and_writes_it_once(ties, tmp_path, said):
    """4 bytes of a parameter in fp32 each way. A tied embedding, which the passes use twice, is read once more."""
    config = GPT2Config(
        n_layer=12, n_embd=64, n_head=2, vocab_size=128, n_positions=32, tie_word_embeddings=ties, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    session = attached(model, tmp_path)
    residency = session.residency
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


# ----------------------------------------------------------------------------------------------------------- two passes


def hooked(model, first, last=None):
    """``model``, with hooks in front of its first block and in front of its last one."""
    blocks = list(find_blocks(model).values())
    blocks[0].register_forward_pre_hook(first)
    if last is not None:
        blocks[-1].register_forward_pre_hook(last)
    return model


def draws(model):
    """As a ViTMAE does its mask."""
    return hooked(model, lambda block, args: (args[0] * torch.rand(()), *args[1:]))


def uses_a_block_twice(model):
    """As an ALBERT does."""
    model.transformer.h[3] = model.transformer.h[2]
    return model


def counts_in_a_buffer(model):
    model.register_buffer("count", torch.zeros(()))

    def count(block, args):
        model.count += 1
        return (args[0] * model.count, *args[1:])

    return hooked(model, count)


def has_an_embedding_with_a_largest_norm(model):
    model.transformer.wpe.max_norm = 0.1
    return model


def computes_in_a_thread(model):
    forward = model.transformer.forward

    def in_a_thread(*args, **kwargs):
        with concurrent.futures.ThreadPoolExecutor(1, initializer=torch.set_grad_enabled, initargs=(False,)) as pool:
            return pool.submit(forward, *args, **kwargs).result()

    model.transformer.forward = in_a_thread
    return model


UNFIT = [
    (draws, [TWICE]),
    (uses_a_block_twice, []),
    (counts_in_a_buffer, [TWICE]),
    (has_an_embedding_with_a_largest_norm, [TWICE]),
    (computes_in_a_thread, [ONCE, TWICE]),
]


@pytest.mark.parametrize(("way", "how"), UNFIT)
def test_a_model_that_does_not_fit_has_the_bits_of_two_passes(way, how, tmp_path, said):
    expected = []
    for model in (way(deep()), way(deep())):
        if expected:
            attached(model, tmp_path)
        torch.manual_seed(5)
        found = trained(model), torch.get_rng_state()
        expected = expected or found
    assert_same(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert said() == how


def draws_later(model, step):
    return loss_of(model, step) * (torch.rand(()) if step == 2 else 1.0)


def runs_twice_later(model, step):
    """As an accumulated step with another number of micro-batches."""
    return loss_of(model, step) + (loss_of(model, step + 10) if step == 2 else 0.0)


def runs_less_later(model, step):
    """As a model that ends early."""
    blocks = model.transformer.h
    if step == 2:
        model.transformer.h = blocks[:-1]
    try:
        return loss_of(model, step)
    finally:
        model.transformer.h = blocks


def runs_in_another_order_later(model, step):
    if step != 2:
        return loss_of(model, step)
    blocks = model.transformer.h
    model.transformer.h = nn.ModuleList([*blocks[:2], blocks[3], blocks[2], *blocks[4:]])
    try:
        return loss_of(model, step)
    finally:
        model.transformer.h = blocks


def changes_a_weight_later(model, step):
    if step == 2:
        model.transformer.wpe.max_norm = 0.1
    return loss_of(model, step)


def keeps_a_view_later(model, step):
    kept = []
    handle = model.transformer.h[0].register_forward_hook(
        lambda block, args, output: kept.append(block.mlp.c_fc.weight.view(-1)[:1])
    )
    try:
        loss = loss_of(model, step)
    finally:
        handle.remove()
    return loss + kept[0].sum() if step >= 2 else loss


def computes_in_a_thread_later(model, step):
    if step != 2:
        return loss_of(model, step)
    found = []

    def compute():
        with torch.no_grad():
            found.append(loss_of(model, step))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return found[0]


LATER = [
    (draws_later, [ONCE, TWICE]),
    (runs_twice_later, [ONCE, TWICE]),
    (runs_less_later, [ONCE, TWICE]),
    (runs_in_another_order_later, [ONCE, TWICE]),
    (changes_a_weight_later, [ONCE, TWICE]),
    (computes_in_a_thread_later, [ONCE, TWICE]),
]


@pytest.mark.parametrize(("loss", "how"), LATER)
def test_a_later_step_that_does_something_else_has_the_bits_of_two_passes(loss, how, tmp_path, said):
    expected = []
    for model in (deep(), deep()):
        if expected:
            attached(model, tmp_path)
        torch.manual_seed(5)
        found = trained(model, loss), torch.rand(())
        expected = expected or found
    assert_same(found[0], expected[0])
    assert found[1] == expected[1]
    assert said() == how


def test_a_view_that_a_pass_keeps_of_a_weight_has_the_value_of_its_pass(said, tmp_path):
    expected = trained(deep(), keeps_a_view_later)
    model = deep()
    attached(model, tmp_path)
    assert_same(trained(model, keeps_a_view_later), expected)
    assert said() == [ONCE, TWICE]


def test_a_buffer_that_a_later_step_changes_is_an_error_and_weights_go_back(tmp_path):
    """In memory there is none. What both passes have read of it is not known."""
    results = []
    for attaches in (False, True):
        model = deep()
        model.register_buffer("count", torch.zeros(()))
        if attaches:
            attached(model, tmp_path)
        optimizer = MeZO(model.parameters(), model, **SETTINGS)
        for step in range(2):
            optimizer.step(lambda model=model, step=step: loss_of(model, step))
        handle = model.transformer.h[3].register_forward_pre_hook(lambda *_, model=model: model.count.add_(1) and None)
        if attaches:
            with pytest.raises(
                OffloadError, match="has changed a buffer in a forward pass, as it did not in its first"
            ):
                optimizer.step(lambda model=model: loss_of(model, 2))
        else:
            with pytest.raises(OffloadError, match="not finite"):
                optimizer.step(lambda model=model: loss_of(model, 2) * float("nan"))
        handle.remove()
        loss = float(optimizer.step(lambda model=model: loss_of(model, 3)))
        results.append((weights(model), str(optimizer.log), loss))
    assert_same(results[1], results[0])


class Lost(Exception):
    pass


@pytest.mark.parametrize("restore", ["reference", "pristine"])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("error", [Lost, KeyboardInterrupt])
def test_an_error_in_either_pass_leaves_weights_as_two_passes_would(which, error, restore, tmp_path):
    results = []
    for model in (deep(), deep()):
        is_attached = bool(results)
        if is_attached:
            attached(model, tmp_path)
        optimizer = MeZO(model.parameters(), model, restore=restore, **SETTINGS)
        for step in range(2):
            optimizer.step(lambda model=model, step=step: loss_of(model, step))
        calls = []

        def fail(block, args, calls=calls):
            calls.append(threading.get_ident())
            if len(calls) > which:
                raise error("in a block")

        threads = threading.active_count()
        handle = list(find_blocks(model).values())[3].register_forward_pre_hook(fail)
        with pytest.raises(error, match="in a block"):
            optimizer.step(lambda model=model: loss_of(model, 2))
        handle.remove()
        assert len(set(calls)) == (1 + which if is_attached else 1)
        assert threading.active_count() <= threads  # those of other models may end meanwhile
        loss = float(optimizer.step(lambda model=model: loss_of(model, 3)))
        results.append((weights(model), str(optimizer.log), loss))
    assert_same(results[1], results[0])


def test_a_second_pass_that_cannot_put_a_weight_back_is_not_forgotten(tmp_path, monkeypatch):
    """It has another value than the first pass reads."""
    model = deep()
    attached(model, tmp_path)
    optimizer = MeZO(model.parameters(), model, **SETTINGS)
    for step in range(2):
        optimizer.step(lambda step=step: loss_of(model, step))
    copy, seen = torch.Tensor.copy_, []

    def fail(tensor, other, *args):
        if threading.current_thread() is not threading.main_thread() and not seen:
            seen.append(tensor)
            raise Lost
        return copy(tensor, other, *args)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", fail)
        with pytest.raises(OffloadError, match="An earlier error came while MeZO changed the weight"):
            optimizer.step(lambda: loss_of(model, 2))
    assert seen
    with pytest.raises(OffloadError, match="An earlier error came while MeZO changed the weight"):
        optimizer.step(lambda: loss_of(model, 2))


# -------------------------------------------------------------------------------------- forwards that change their weights


def clamp(weight):
    weight.clamp_(-0.01, 0.01)


def write_out(weight):
    torch.mul(weight, 0.5, out=weight)


def scale_each(weight):
    torch._foreach_mul_([weight], 0.5)


def renormalize(weight):
    nn.functional.embedding(torch.arange(4), weight, max_norm=0.01)


def replace_data(weight):
    weight.data = weight.data * 0.5


def fill_from_vector(weight):
    nn.utils.vector_to_parameters(torch.full((weight.numel(),), 0.01), [weight])


@pytest.mark.parametrize("restore", ["reference", "pristine"])
@pytest.mark.parametrize("change", [clamp, write_out, scale_each, renormalize, replace_data, fill_from_vector])
@pytest.mark.parametrize("begin", [0, 2])
def test_a_forward_that_changes_a_weight_has_the_bits_of_a_run_in_memory(change, restore, begin, tmp_path):
    results = []
    for attaches in (False, True):
        model = deep()
        if attaches:
            attached(model, tmp_path)
        layer, now = model.transformer.h[3].mlp.c_fc, [0]

        def change_from(layer, args, now=now):
            if now[0] >= begin:
                change(layer.weight)

        layer.register_forward_pre_hook(change_from)

        def loss(model, step, now=now):
            now[0] = step
            return loss_of(model, step)

        results.append(trained(model, loss, restore))
    assert_same(results[1], results[0])


def test_a_model_without_blocks_is_trained_in_two_passes(tmp_path, said):
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    attached(model, tmp_path)
    optimizer = MeZO(model.parameters(), model)
    for _ in range(2):
        optimizer.step(lambda: model(torch.ones(1, 32)).sum())
    assert said() == []
