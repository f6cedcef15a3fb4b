"""The optimizer of a memory mode in place of a script's: its schedulers, checkpoints and sessions, bit by bit."""

import copy
import functools

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.optim import lr_scheduler as schedulers
from transformers import get_scheduler

from hf_offload import OffloadConfig, OffloadError, OffloadPlugin, attach
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.train import assert_same
from tests.integration.test_memory_modes import SETTINGS
from tests.integration.test_modes_without_the_trainer import MODES, directly, trained

STEPS = 6
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-7}
SCHEDULES = {
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "exponential": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.7),
    "one_cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 2e-2, total_steps=2 * STEPS),
    "cyclic": lambda optimizer: schedulers.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=3),
    "plateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0),
    "sequential": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.ExponentialLR(optimizer, 0.7)], [2]
    ),
    "transformers": lambda optimizer: get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=STEPS),
}


@pytest.fixture(autouse=True)
def _other_accelerators_are_forgotten():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def adamw(model):
    """With two groups, unlike the optimizer of any mode."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2]}]
    return torch.optim.AdamW(groups, **ADAM, weight_decay=0.0)


def mode_of(name):
    return {"memory_mode": name, "memory_mode_kwargs": SETTINGS[name]}


def config_of(name):
    return OffloadConfig(tier="none", **mode_of(name))


def train(model, optimizer, scheduler, steps):
    for seed in steps:
        torch.manual_seed(seed)  # of dropout
        loss = model(**tiny_batch("llama", seed=seed)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(loss.item())
        elif scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def result(model, optimizer):
    """Weights, and what a checkpoint has of the schedule."""
    return trained(model), {
        key: value for key, value in optimizer.state_dict()["param_groups"][0].items() if key in (*ADAM, "initial_lr")
    }


@functools.cache
def by_hand(name, schedule):
    """The mode asked for directly, all steps at once."""
    model, optimizer, end = directly(name, ADAM)
    train(model, optimizer, SCHEDULES[schedule](optimizer) if schedule else None, range(STEPS))
    end()
    return result(model, optimizer)


def prepared(name, schedule, scheduled_first):
    torch.manual_seed(0)
    model = tiny_model("llama")
    session = attach(model, config_of(name))
    given = adamw(model)
    if scheduled_first:
        scheduler = SCHEDULES[schedule](given)
        return session, model, session.prepare_optimizer(given), scheduler
    optimizer = session.prepare_optimizer(given)
    return session, model, optimizer, SCHEDULES[schedule](optimizer)


def resumed(name, schedule, scheduled_first, loaded_first):
    session, *run = prepared(name, schedule, scheduled_first)
    train(*run, range(STEPS // 2))
    states = [copy.deepcopy(one.state_dict()) for one in run]
    session.detach()
    session, *run = prepared(name, schedule, scheduled_first)
    for one, state in list(zip(run, states, strict=True))[:: 1 if loaded_first == "optimizer" else -1]:
        one.load_state_dict(state)
    train(*run, range(STEPS // 2, STEPS))
    session.detach()
    return result(*run[:2])


# Every schedule, every mode, and every order.
RESUMED = [
    *(("galore", schedule, True, "optimizer") for schedule in SCHEDULES),
    *((mode, "exponential", True, "optimizer") for mode in MODES if mode != "galore"),
    ("galore", "exponential", True, "scheduler"),
    ("galore", "exponential", False, "optimizer"),
    ("galore", "exponential", False, "scheduler"),
]


@pytest.mark.parametrize(("name", "schedule", "scheduled_first", "loaded_first"), RESUMED)
def test_every_schedule_goes_on_from_a_checkpoint(name, schedule, scheduled_first, loaded_first):
    found = resumed(name, schedule, scheduled_first, loaded_first)
    assert_same(found, by_hand(name, schedule))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_scheduled_is_read_from_either_optimizer(schedule):
    model = tiny_model("llama")
    given = adamw(model)
    scheduler = SCHEDULES[schedule](given)
    session = attach(model, config_of("galore"))
    optimizer = session.prepare_optimizer(given)
    for seed in range(STEPS):
        train(model, optimizer, scheduler, [seed])
        for key in (*ADAM, "initial_lr"):
            values = [group.get(key) for each in (given, optimizer) for group in each.param_groups]
            assert values == values[:1] * len(values)
        assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    session.detach()


@pytest.mark.parametrize(
    ("name", "schedule"), [("galore", "one_cycle"), ("lora", "sequential"), ("lisa", "transformers")]
)
def test_an_accelerator_saves_and_loads_the_schedule(name, schedule, tmp_path):
    def run(steps, folder=None):
        torch.manual_seed(0)
        accelerator = OffloadPlugin(tier="none", **mode_of(name)).accelerator(cpu=True)
        model = tiny_model("llama")
        given = adamw(model)
        prepared = accelerator.prepare(model, given, SCHEDULES[schedule](given))
        if folder is not None:
            accelerator.load_state(str(folder))
        train(*prepared, steps)
        found = result(*prepared[:2])
        if folder is None:
            accelerator.save_state(str(tmp_path / "half"), safe_serialization=False)
        accelerator.end_training()
        return trained(prepared[0]), found[1]

    run(range(STEPS // 2))
    assert_same(run(range(STEPS // 2, STEPS), tmp_path / "half"), by_hand(name, schedule))


def test_a_group_that_is_set_twice_has_the_last_value():
    model = tiny_model("llama")
    given = adamw(model)
    session = attach(model, config_of("galore"))
    optimizer = session.prepare_optimizer(given)
    for _ in range(2):
        for group in given.param_groups:
            group["lr"] *= 0.5
            group["lr"] *= 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [ADAM["lr"] / 16] * len(optimizer.param_groups)
    session.detach()


def test_one_schedule_for_all_groups():
    model = tiny_model("llama")
    given = adamw(model)
    session = attach(model, config_of("galore"))
    optimizer = session.prepare_optimizer(given)
    scheduler = schedulers.LambdaLR(given, [lambda step: 1.0, lambda step: 1 / (1 + step)])
    with pytest.raises(OffloadError, match="use one schedule for all groups"):
        train(model, optimizer, scheduler, range(2))
    with pytest.raises(OffloadError, match="A schedule of weight_decay"):
        given.param_groups[0]["weight_decay"] = 0.5
    session.detach()


@pytest.mark.parametrize("method", ["step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"])
def test_the_replaced_optimizer_answers_nothing(method):
    model = tiny_model("llama")
    given = adamw(model)
    session = attach(model, config_of("galore"))
    optimizer = session.prepare_optimizer(given)
    arguments = {"load_state_dict": [optimizer.state_dict()], "add_param_group": [{"params": []}]}.get(method, [])
    with pytest.raises(OffloadError, match=rf"{method}\(\) of an optimizer that was replaced"):
        getattr(given, method)(*arguments)
    session.detach()


# -- sessions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "again"),
    [("lisa", "nothing"), ("galore", "nothing"), ("lora", "the replaced one"), ("badam", "the mode's")],
)
def test_a_training_goes_on_in_the_next_session(name, again):
    torch.manual_seed(0)
    model = tiny_model("llama")
    given = adamw(model)
    optimizer = None
    for steps in ([0], [1, 2], [3, 4, 5]):  # turns of two steps end within sessions and between them
        session = attach(model, config_of(name))
        required = [one.requires_grad for one in model.parameters()]
        if optimizer is None:
            optimizer = session.prepare_optimizer(given)
            assert session.prepare_optimizer(optimizer) is optimizer
        elif again != "nothing":
            assert session.prepare_optimizer(optimizer if again == "the mode's" else given) is optimizer
        train(model, optimizer, None, steps)
        session.detach()
        assert [one.requires_grad for one in model.parameters()] == required
    assert_same(result(model, optimizer), by_hand(name, None))


@pytest.mark.parametrize("name", ["lisa", "badam"])
def test_nothing_stays_frozen_where_the_optimizer_goes_first(name):
    model = tiny_model("llama")
    session = attach(model, config_of(name))
    train(model, session.prepare_optimizer(adamw(model)), None, [0])
    assert not all(one.requires_grad for one in model.parameters())
    session.detach()
    assert all(one.requires_grad for one in model.parameters())


def whole(model):
    return model(**tiny_batch("llama", seed=0)).loss


def parts(model):
    return model.lm_head(model.model(tiny_batch("llama", seed=0)["input_ids"])[0]).sum()


@pytest.mark.parametrize(
    ("name", "sessions_before", "training", "forward"),
    [("galore", 1, True, whole), ("lisa", 0, False, whole), ("lisa", 2, True, parts), ("lora", 0, True, parts)],
)
def test_nothing_is_trained_with_another_optimizer(name, sessions_before, training, forward):
    model = tiny_model("llama")
    for _ in range(sessions_before):
        session = attach(model, config_of(name))
        optimizer = session.prepare_optimizer(adamw(model))
        train(model, optimizer, None, [0])
        session.detach()
    session = attach(model, config_of(name))
    optimizer = adamw(model)  # the one before is gone
    model.train(training)
    loss = forward(model)  # as an evaluation may do
    with pytest.raises(OffloadError, match=r"session\.prepare_optimizer"):
        loss.backward()
    copied = copy.deepcopy(model)
    forward(copied).backward()
    train(model.train(), session.prepare_optimizer(optimizer), None, [0])
    session.detach()
    forward(model).backward()
