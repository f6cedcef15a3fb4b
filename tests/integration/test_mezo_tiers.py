"""MeZO with weights on tiers: the bits of a run in memory, and how often each weight is read and written."""

import copy

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, attach
from hf_offload.methods.mezo import MeZO
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights
from tests.helpers.train import assert_same

STEPS = 3
SETTINGS = {"eps": 1e-2, "seed": 3}
MEZO = {"tier": "none", "memory_mode": "mezo", "memory_mode_kwargs": SETTINGS}


def attached(model, tmp_path, tier="ssd", **others):
    config = {"min_bytes": 1024, "memory_budget": "1KiB"} | others
    if tier == "ssd":
        config["directory"] = str(tmp_path)
    return attach(model, OffloadConfig(**MEZO, params=tier, **config))


def optimizer_of(model):
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2], "lr": 2e-2}]
    return MeZO(groups, model, lr=1e-2, **SETTINGS)


def loss_of(model, step):
    return model(**tiny_batch(model.config.model_type, seed=step)).loss


def trained(model, between=lambda *_: None, loss_of=loss_of):
    """The weights, the log and all losses after some steps, with ``between`` after each."""
    optimizer = optimizer_of(model)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
        losses.append(float(optimizer.step(lambda step=step: loss_of(model, step))))
        between(model, optimizer, step)
    return weights(model), str(optimizer.log), losses  # NaN is not NaN


def assert_within_budget(session):
    assert session.residency.most_bytes <= session.residency.budget_bytes
    assert session.residency.limit_bytes < session.residency.total_bytes


@pytest.mark.parametrize(
    ("name", "tier"), [("gpt2", "ram"), ("bert", "ssd"), ("t5", "ssd"), ("llama", "ssd"), ("mixtral", "ssd")]
)
def test_weights_move_when_they_are_used_and_have_the_bits_of_a_run_in_memory(name, tier, tmp_path):
    models = [tiny_model(name), tiny_model(name)]
    for one in models:
        next(iter(one.parameters())).requires_grad_(name != "t5")
    session = attached(models[1], tmp_path, tier)
    expected, found = (trained(one) for one in models)
    assert_same(found, expected)
    assert_within_budget(session)


def an_evaluation(model, optimizer, step):
    with torch.no_grad():
        loss_of(model, 9)


def a_state_dict(model, optimizer, step):
    model.kept = {name: one.clone() for name, one in model.state_dict().items()}


def changes_by_others(model, optimizer, step):
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(0.5)


def an_aborted_step(model, optimizer, step):
    def closure():
        calls.append(None)
        loss = loss_of(model, 5)
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


def another_optimizer(model, optimizer, step):
    """It goes on from where the last one has left the weights."""
    other = optimizer_of(model)
    other.step(lambda: loss_of(model, 7))


@pytest.mark.parametrize(
    "between",
    [an_evaluation, a_state_dict, changes_by_others, an_aborted_step, a_resumed_log, another_optimizer],
)
def test_what_comes_between_steps_finds_weights_as_in_memory(between, tmp_path):
    models = [tiny_model("gpt2"), tiny_model("gpt2")]
    session = attached(models[1], tmp_path)
    expected, found = (trained(one, between) for one in models)
    assert_same(found, expected)
    assert_within_budget(session)
    if between is a_state_dict:
        assert_same(models[1].kept, models[0].kept)


def test_weights_that_come_back_for_good_go_on_with_the_same_bits(tmp_path):
    model, other = tiny_model("gpt2"), tiny_model("gpt2")
    session = attached(other, tmp_path)

    def home(model, optimizer, step):
        if step == 1 and model is other:
            session.detach()
            attach(other, OffloadConfig(**MEZO)).detach()
            assert all(type(one) is nn.Parameter or one.nbytes < 1024 for one in other.parameters())

    expected, found = (trained(one, between=home) for one in (model, other))
    assert_same(found, expected)


def test_memory_that_others_hold_follows_at_once(tmp_path):
    """Views and arrays of large and of small weights, and a block that lets weights come."""
    model, other = tiny_model("gpt2"), tiny_model("gpt2")
    session = attached(other, tmp_path)
    seen = []
    for one in (model, other):
        large, small = one.transformer.h[0].mlp.c_fc.weight, one.transformer.h[0].ln_1.weight
        arrays = [each.detach().numpy() for each in (large, small)]
        optimizer = optimizer_of(one)
        found = []

        def closure(one=one, arrays=arrays, found=found):
            found.extend(float(each.sum()) for each in arrays)
            return loss_of(one, 0)

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
    assert_same(weights(other), weights(model))


def linears():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))


INPUTS = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


def test_a_view_that_a_forward_keeps_has_the_weight_of_this_forward(tmp_path):
    found = []
    for is_attached in (False, True):
        model = linears()
        if is_attached:
            session = attached(model, tmp_path, memory_budget=None)
            assert session.residency.limit_bytes < session.residency.total_bytes / 2
        kept = []
        model[1].register_forward_pre_hook(lambda *_, model=model, kept=kept: kept.append(model[0].weight[:1]))
        model[7].register_forward_hook(lambda module, args, output, kept=kept: output + kept.pop())
        found.append(trained(model, loss_of=lambda model, step: model(INPUTS + step).pow(2).mean()))
    assert_same(found[1], found[0])


def test_weights_that_find_no_room_on_the_tier_have_the_same_bits(tmp_path):
    model, other = tiny_model("gpt2"), tiny_model("gpt2")
    session = attached(other, tmp_path, disk_budget="32KiB")
    expected, found = (trained(one) for one in (model, other))
    assert session.residency.store.refusal is not None
    assert_same(found, expected)


def test_autocast_keeps_no_casts_of_weights_that_leave_memory(tmp_path):
    expected, found = [], []
    for steps, one in ((expected, tiny_model("llama")), (found, tiny_model("llama"))):
        if steps is found:
            attached(one, tmp_path)
        optimizer = optimizer_of(one)

        def closure(steps=steps, one=one):
            with torch.autocast("cpu", torch.bfloat16):
                steps.append(torch.is_autocast_cache_enabled())
                return loss_of(one, 0)

        steps += [float(optimizer.step(closure)) for _ in range(2)]
        assert torch.is_autocast_cache_enabled()
    assert expected[:4] == [True] * 4
    assert found == [False] * 4 + expected[4:]


def test_a_step_of_two_passes_reads_and_writes_each_weight_twice(tmp_path):
    """8 bytes each way of a parameter in fp32."""
    model = linears()
    residency = attached(model, tmp_path, memory_budget=None).residency
    optimizer = MeZO(model.parameters(), model, lr=1e-3)
    moved = []
    for _ in range(6):
        optimizer.step(lambda: model(INPUTS).pow(2).mean())
        residency.store.settle()
        moved.append(residency.moved_bytes)
    (written, read), (written_later, read_later) = moved[1], moved[-1]
    each = residency.total_bytes
    assert residency.limit_bytes < each / 2
    # What was still in memory as the second step ended is written in one of the four steps counted.
    assert 0 < written_later - written <= 4 * 2 * each + residency.limit_bytes
    assert 0 < read_later - read <= 4 * 2 * each
