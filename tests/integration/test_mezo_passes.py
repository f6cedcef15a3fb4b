"""MeZO with weights on a tier computes both losses in one pass over the weights, in turns, where a model allows that."""

import logging
import threading

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_offload import OffloadConfig, attach
from hf_offload.optimizers.mezo import MeZO
from hf_offload.structure.units import find_blocks
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights
from tests.numerics.test_mezo import ReferenceMeZO

STEPS = 4
SETTINGS = {"eps": 1e-2, "lr": 1e-2, "weight_decay": 0.1}
LOGGER = "hf_offload.optimizers.mezo.passes"


def deep(name="gpt2"):
    """Six blocks, of which two may be in memory."""
    config = tiny_model(name).config
    config.num_hidden_layers = 6
    if name == "t5":
        config.num_decoder_layers = 6
    torch.manual_seed(0)
    return type(tiny_model(name))(config)


def attached(model, tmp_path, tier="ssd", **others):
    others = {"min_bytes": 1024} | others
    if tier == "ssd":
        others["directory"] = str(tmp_path)
    return attach(model, OffloadConfig(tier="none", memory_mode="mezo", params=tier, **others))


def loss_of(model, step):
    return model(**tiny_batch(model.config.model_type, seed=step)).loss


def trained(model, loss_of=loss_of):
    """The weights, the log, and the losses, after some steps."""
    optimizer = MeZO(model.parameters(), model, **SETTINGS)
    losses = [float(optimizer.step(lambda step=step: loss_of(model, step))) for step in range(STEPS)]
    return weights(model), optimizer.log, losses


def assert_same(found, expected):
    assert found[1:] == expected[1:]
    assert all(torch.equal(one, expected[0][name]) for name, one in found[0].items())


@pytest.fixture
def said(caplog):
    """What was said of the passes."""
    caplog.set_level(logging.INFO, logger=LOGGER)
    return lambda: [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.parametrize(("name", "tier"), [("gpt2", "ssd"), ("bert", "ssd"), ("t5", "ram"), ("llama", "ssd")])
def test_one_pass_has_the_bits_of_two_and_of_a_second_implementation(name, tier, tmp_path, said):
    expected = trained(deep(name))
    assert said() == []
    model = deep(name)
    attached(model, tmp_path, tier)
    found = trained(model)
    assert_same(found, expected)
    assert said() == ["MeZO computes both losses of a step in one pass over the weights."]
    theirs = deep(name)
    groups = [{"params": list(theirs.parameters()), "lr": SETTINGS["lr"], "weight_decay": SETTINGS["weight_decay"]}]
    reference = ReferenceMeZO(theirs, groups, SETTINGS["eps"], "reference")
    for row, step in zip(found[1].rows, range(STEPS), strict=True):
        reference.step(row.seed, lambda model, step=step: loss_of(model, step))
    assert all(torch.equal(one, found[0][key]) for key, one in weights(theirs).items())


@pytest.mark.parametrize("ties", [False, True])
def test_one_pass_reads_each_weight_once_and_writes_it_once(ties, tmp_path, said):
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
    assert said() == ["MeZO computes both losses of a step in one pass over the weights."]
    (written, read), (written_later, read_later) = moved[1:3]
    again = model.transformer.wte.weight.nbytes if ties else 0
    assert residency.limit_bytes < residency.total_bytes / 4
    assert 0 < written_later - written <= residency.total_bytes
    assert 0 < read_later - read <= residency.total_bytes + again
    assert residency.most_bytes <= residency.limit_bytes


def hooked(model, first, last):
    """``model``, with hooks in front of its first block and in front of its last one."""
    blocks = list(find_blocks(model).values())
    blocks[0].register_forward_pre_hook(first)
    blocks[-1].register_forward_pre_hook(last)
    return model


def draws(model):
    def draw(block, args):
        return (args[0] * torch.rand(()), *args[1:])

    return hooked(model, draw, draw)


def leaves_something_on_itself(model):
    def leave(block, args):
        model.left = args[0].mean()

    def find(block, args):
        return (args[0] + model.left, *args[1:])

    return hooked(model, leave, find)


def looks_at_a_weight(model, name="transformer.wpe.weight"):
    def look(block, args):
        model.seen = model.get_parameter(name)[:1].view(-1)

    def see(block, args):
        seen, model.seen = model.seen, None
        return (args[0] + seen, *args[1:])

    return hooked(model, look, see)


def looks_at_a_small_weight(model):
    return looks_at_a_weight(model, "transformer.ln_f.bias")


UNFIT = [draws, leaves_something_on_itself, looks_at_a_weight, looks_at_a_small_weight]


@pytest.mark.parametrize("way", UNFIT)
def test_a_model_whose_passes_cannot_take_turns_has_the_bits_of_two_passes(way, tmp_path, said):
    expected = []
    for model in (way(deep()), way(deep())):
        if expected:
            attached(model, tmp_path)
        torch.manual_seed(5)
        found = trained(model), torch.get_rng_state()
        expected = expected or found
    assert_same(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert len(said()) == 1
    assert "in two passes over the weights" in said()[0]


def test_random_numbers_that_a_later_step_draws_are_those_of_two_passes(tmp_path, said):
    def sometimes(model, step):
        return loss_of(model, step) * (torch.rand(()) if step == 2 else 1.0)

    expected = []
    for model in (deep(), deep()):
        if expected:
            attached(model, tmp_path)
        torch.manual_seed(5)
        found = trained(model, sometimes), torch.rand(())
        expected = expected or found
    assert_same(found[0], expected[0])
    assert found[1] == expected[1]
    assert ["one pass" in each for each in said()] == [True, False]


class Lost(Exception):
    pass


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("error", [Lost, KeyboardInterrupt])
def test_an_error_in_either_pass_leaves_weights_as_two_passes_would(which, error, tmp_path):
    results = []
    for model in (deep(), deep()):
        takes_turns = bool(results)
        if takes_turns:
            attached(model, tmp_path)
        optimizer = MeZO(model.parameters(), model, **SETTINGS)
        optimizer.step(lambda model=model: loss_of(model, 0))
        optimizer.step(lambda model=model: loss_of(model, 1))
        calls = []

        def fail(block, args, calls=calls):
            calls.append(threading.get_ident())
            if len(calls) == 1 + which:
                raise error("in a block")

        threads = threading.active_count()
        handle = list(find_blocks(model).values())[3].register_forward_pre_hook(fail)
        with pytest.raises(error, match="in a block"):
            optimizer.step(lambda model=model: loss_of(model, 2))
        handle.remove()
        assert len(set(calls)) == (1 + which if takes_turns else 1)
        assert threading.active_count() == threads
        loss = float(optimizer.step(lambda model=model: loss_of(model, 3)))
        results.append((weights(model), optimizer.log, loss))
    assert_same(results[1], results[0])


def test_passes_do_not_take_turns_where_most_weights_stay_in_memory(tmp_path, said):
    """There it would write all of them, and two passes only what leaves."""
    model = deep()
    session = attached(model, tmp_path, memory_budget="1MiB")
    assert session.residency.limit_bytes > session.residency.total_bytes / 2
    assert_same(trained(model), trained(deep()))
    assert said() == []


def test_a_model_without_blocks_is_trained_in_two_passes(tmp_path, said):
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    attached(model, tmp_path)
    optimizer = MeZO(model.parameters(), model)
    optimizer.step(lambda: model(torch.ones(1, 32)).sum())
    assert said() == []
