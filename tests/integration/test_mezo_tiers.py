"""MeZO with weights on tiers: the bits of a run in memory, and how often each weight is read and written."""

import copy
import functools

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, attach
from hf_offload.optimizers.mezo import MeZO, replay
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights

STEPS = 4
SETTINGS = {"eps": 1e-2, "seed": 3}
MEZO = {"tier": "none", "memory_mode": "mezo", "memory_mode_kwargs": SETTINGS}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(weight, other[name]) for name, weight in one.items())


def attached(model, tmp_path, tier="ssd", **others):
    config = {"min_bytes": 1024, "memory_budget": "1KiB"} | others
    if tier == "ssd":
        config["directory"] = str(tmp_path)
    return attach(model, OffloadConfig(**MEZO, params=tier, **config))


def groups_of(model):
    trained = [one for one in model.parameters() if one.requires_grad]
    return [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2], "lr": 2e-2}]


def optimizer_of(model, restore="reference"):
    return MeZO(groups_of(model), model, lr=1e-2, restore=restore, **SETTINGS)


def no_event(model, optimizer, step):
    pass


def trained(model, name, between=no_event, session=None, restore="reference"):
    """The weights, the log and all losses after some steps, with ``between`` after each."""
    optimizer = optimizer_of(model, restore)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
        losses.append(float(optimizer.step(lambda step=step: model(**tiny_batch(name, seed=step)).loss)))
        between(model, optimizer, step)
        if session is not None:
            assert session.residency.most_bytes <= session.residency.budget_bytes
            assert session.residency.limit_bytes < session.residency.total_bytes
    return weights(model), optimizer.log, losses


def of(name):
    model = tiny_model(name)
    next(iter(model.parameters())).requires_grad_(name != "t5")
    return model


RESTORES = pytest.mark.parametrize("restore", ["reference", "pristine"])


@RESTORES
@pytest.mark.parametrize(
    ("name", "tier"), [("gpt2", "ram"), ("bert", "ssd"), ("t5", "ssd"), ("llama", "ssd"), ("mixtral", "ssd")]
)
def test_weights_move_when_they_are_used_and_have_the_bits_of_a_run_in_memory(name, tier, restore, tmp_path):
    expected = trained(of(name), name, restore=restore)
    model = of(name)
    session = attached(model, tmp_path, tier)
    assert trained(model, name, session=session, restore=restore)[1:] == expected[1:]
    assert same(weights(model), expected[0])
    initial = weights(of(name))
    replay(expected[1], initial)
    assert same(initial, expected[0])


def an_evaluation(model, optimizer, step):
    with torch.no_grad():
        model(**tiny_batch("gpt2", seed=9))


def a_state_dict(model, optimizer, step):
    model.kept = {name: one.clone() for name, one in model.state_dict().items()}


def changes_by_others(model, optimizer, step):
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(0.5)


def an_aborted_step(model, optimizer, step):
    def closure():
        calls.append(None)
        loss = model(**tiny_batch("gpt2", seed=5)).loss
        if len(calls) > 1:
            raise KeyboardInterrupt
        return loss

    calls = []
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)


def a_resumed_log(model, optimizer, step):
    state = copy.deepcopy(optimizer.state_dict())
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()})
    optimizer.load_state_dict(state)


EVENTS = [an_evaluation, a_state_dict, changes_by_others, an_aborted_step, a_resumed_log]


@RESTORES
@pytest.mark.parametrize("between", EVENTS)
def test_what_comes_between_steps_finds_weights_as_in_memory(between, restore, tmp_path):
    model, other = tiny_model("gpt2"), tiny_model("gpt2")
    expected = trained(model, "gpt2", between, restore=restore)
    session = attached(other, tmp_path)
    found = trained(other, "gpt2", between, session, restore)
    assert found[1:] == expected[1:]
    assert same(found[0], expected[0])
    if between is a_state_dict:
        assert same(model.kept, other.kept)


@RESTORES
def test_memory_that_others_hold_follows_at_once(restore, tmp_path):
    """Views and arrays of large and of small weights, and a block that lets weights come."""
    model, other = tiny_model("gpt2"), tiny_model("gpt2")
    session = attached(other, tmp_path)
    seen = []
    for one in (model, other):
        large, small = one.transformer.h[0].mlp.c_fc.weight, one.transformer.h[0].ln_1.weight
        arrays = [each.detach().numpy() for each in (large, small)]
        optimizer = optimizer_of(one, restore)
        found = []

        def closure(one=one, arrays=arrays, found=found):
            found.extend(float(each.sum()) for each in arrays)
            return one(**tiny_batch("gpt2", seed=0)).loss

        optimizer.step(closure)
        found.extend(float(each.sum()) for each in arrays)
        if one is other:
            with session.weights(other.transformer.h[1]):
                held = other.transformer.h[1].mlp.c_fc.weight
                optimizer.step(closure)
                with torch._C.DisableTorchFunctionSubclass():
                    found.append(float(held.detach().sum()))
        else:
            optimizer.step(closure)
            found.append(float(one.transformer.h[1].mlp.c_fc.weight.detach().sum()))
        seen.append(found)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == len(seen[0])
    assert same(weights(model), weights(other))


@RESTORES
def test_a_view_that_a_forward_keeps_has_the_weight_of_this_forward(restore, tmp_path):
    found = []
    for is_attached in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        if is_attached:
            session = attached(model, tmp_path, memory_budget=None)
            assert session.residency.limit_bytes < session.residency.total_bytes / 2
        kept = []
        model[1].register_forward_pre_hook(lambda *_, model=model, kept=kept: kept.append(model[0].weight[:1]))
        model[7].register_forward_hook(lambda module, args, output, kept=kept: output + kept.pop())
        optimizer = optimizer_of(model, restore)
        closure = functools.partial(lambda model, inputs: model(inputs).pow(2).mean(), model, torch.randn(4, 64))
        losses = [float(optimizer.step(closure)) for _ in range(3)]
        found.append((losses, optimizer.log, weights(model)))
    assert found[0][:2] == found[1][:2]
    assert same(found[0][2], found[1][2])


@RESTORES
def test_weights_that_find_no_room_on_the_tier_have_the_same_bits(restore, tmp_path):
    expected = trained(tiny_model("gpt2"), "gpt2", restore=restore)
    model = tiny_model("gpt2")
    session = attached(model, tmp_path, disk_budget="32KiB")
    optimizer = optimizer_of(model, restore)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
        optimizer.step(lambda step=step: model(**tiny_batch("gpt2", seed=step)).loss)
    assert session.residency.store.refusal is not None
    assert optimizer.log == expected[1]
    assert same(weights(model), expected[0])


def test_another_optimizer_goes_on_from_where_the_last_one_has_left_the_weights(tmp_path):
    model, other = tiny_model("gpt2"), tiny_model("gpt2")
    attached(other, tmp_path)
    for one in (model, other):
        trained(one, "gpt2")
        trained(one, "gpt2")
    assert same(weights(model), weights(other))


def test_weights_that_come_back_for_good_go_on_with_the_same_bits(tmp_path):
    model, other = tiny_model("gpt2"), tiny_model("gpt2")
    session = attached(other, tmp_path)

    def home(model, optimizer, step):
        if step == 1 and model is other:
            session.detach()
            attach(other, OffloadConfig(**MEZO)).detach()
            assert all(type(one) is nn.Parameter or one.nbytes < 1024 for one in other.parameters())

    expected, found = trained(model, "gpt2", home), trained(other, "gpt2", home)
    assert found[1:] == expected[1:]
    assert same(found[0], expected[0])


def test_autocast_keeps_no_casts_of_weights_that_leave_memory(tmp_path):
    expected, found = [], []
    for steps, one in ((expected, tiny_model("llama")), (found, tiny_model("llama"))):
        if steps is found:
            attached(one, tmp_path)
        optimizer = optimizer_of(one)

        def closure(steps=steps, one=one):
            with torch.autocast("cpu", torch.bfloat16):
                steps.append(torch.is_autocast_cache_enabled())
                return one(**tiny_batch("llama", seed=0)).loss

        steps += [float(optimizer.step(closure)) for _ in range(2)]
        assert torch.is_autocast_cache_enabled()
    assert expected[:4] == [True] * 4
    assert found == [False] * 4 + expected[4:]


@pytest.mark.parametrize(("restore", "copies"), [("reference", 0), ("pristine", 1)])
def test_a_step_of_two_passes_reads_and_writes_each_weight_twice(restore, copies, tmp_path):
    """8 bytes each way of a parameter in fp32, and 4 of a copy."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    session = attached(model, tmp_path, memory_budget=None)
    residency = session.residency
    optimizer = MeZO(model.parameters(), model, lr=1e-3, restore=restore)
    inputs = torch.randn(4, 64)
    moved = []
    for _ in range(6):
        optimizer.step(lambda: model(inputs).pow(2).mean())
        residency.store.settle()
        moved.append(residency.moved_bytes)
    (written, read), (written_later, read_later) = moved[1], moved[-1]
    each = residency.total_bytes
    assert residency.limit_bytes < each / 2
    assert 0 < written_later - written <= 4 * (2 + copies) * each
    assert 0 < read_later - read <= 4 * (2 + copies) * each
