"""Optimizer state that others hold while steps go on: it is that of the run in memory, whichever way it is held."""

import gc
import threading

import pytest
import torch

from hf_offload.state.optimizer import streaming_of
from hf_offload.state.parked import Where
from hf_offload.state.registry import parked_of
from hf_offload.state.units import stepping
from tests.faults.failing_calls import Hang
from tests.helpers.streamed import Run, mlp, same, stream_in_parts, train

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def tensors_of(state):
    return [each for each in state.values() if isinstance(each, torch.Tensor)]


# What is held of each parameter's state, as tensors that are written to and read later.
HOLDS = {
    "tensors": lambda state: tensors_of(state),
    "views": lambda state: [each.view(-1)[:8] for each in tensors_of(state) if each.dim()],
    "arrays": lambda state: [each.numpy() for each in tensors_of(state)],
    "counters": lambda state: [each for each in tensors_of(state) if not each.dim()],
    "dictionary": lambda state: [state],
}


def write(held):
    if isinstance(held, dict):
        for each in tensors_of(held):
            write(each)
    else:
        held *= 0.5


def read(held):
    return held if isinstance(held, dict) else torch.as_tensor(held)


def holds_between_steps(run, make, hold):
    """State is held after two steps, read and written after each of the next ones, and let go."""
    model = mlp()
    optimizer = run.prepare(model, make(model.parameters()))
    train(run, model, optimizer, steps=2)
    held = [each for state in optimizer.state.values() for each in hold(state)]

    def look(number):
        run.log(*map(read, held))
        for each in held:
            write(each)

    train(run, model, optimizer, steps=3, first=2, after=look)
    run.log(*map(read, held))
    held.clear()
    gc.collect()
    train(run, model, optimizer, steps=2, first=5)
    run.log_all(model, optimizer)
    return optimizer


@pytest.mark.parametrize(
    "name",
    ["adamw", "adafactor", *(pytest.param(name, marks=pytest.mark.full) for name in ("fused", "sgd"))],
)
@pytest.mark.parametrize("how", HOLDS)
def test_what_is_held_between_steps_is_the_state_of_the_optimizer(name, how, tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    logs = []
    for place in ("none", "ssd"):
        run = Run(place, tmp_path)
        optimizer = holds_between_steps(run, OPTIMIZERS[name], HOLDS[how])
        logs.append(run.logged)
    assert same(*logs)
    assert any(record.state_bytes for record in streaming_of(optimizer).records) or name == "adafactor"  # it was let go


def _before_the_first_step(run, model, make):
    optimizer = run.prepare(model, make(model.parameters()))
    return optimizer, [optimizer.state[p] for p in model.parameters()]


def _before_it_is_prepared(run, model, make):
    optimizer = make(model.parameters())
    train(Run("none", None), model, optimizer, steps=1)
    held = [each for state in optimizer.state.values() for each in tensors_of(state)]
    return run.prepare(model, optimizer), held


def _one_that_was_set(run, model, make):
    optimizer = run.prepare(model, make(model.parameters()))
    train(run, model, optimizer, steps=1)
    held = dict(optimizer.state[model[0].weight])
    optimizer.state[model[0].weight] = held
    return optimizer, [held]


def _after_loading(run, model, make):
    optimizer = run.prepare(model, make(model.parameters()))
    train(run, model, optimizer, steps=1)
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer, [each for state in optimizer.state.values() for each in tensors_of(state)]


@pytest.mark.parametrize("begin", [_before_the_first_step, _before_it_is_prepared, _one_that_was_set, _after_loading])
@pytest.mark.parametrize(
    "settings", [{"optimizer": "ssd"}, {"optimizer": "ram"}, {"optimizer": "ssd", "params": "ssd"}]
)
@pytest.mark.parametrize("in_backward", [False, True])
def test_what_is_held_from_elsewhere_is_the_state_of_the_optimizer(begin, settings, in_backward, tmp_path):
    logs = []
    for place in ("none", settings["optimizer"]):
        others = {key: value for key, value in settings.items() if key != "optimizer" and place != "none"}
        run, model = Run(place, tmp_path, **others), mlp()
        optimizer, held = begin(run, model, OPTIMIZERS["adamw"])
        if in_backward and run.session is not None:
            run.session.update_in_backward(True)

        def look(number, run=run, held=held):
            run.log(*map(read, held))
            for each in held:
                write(each)

        train(run, model, optimizer, after=look)
        run.log_all(model, optimizer)
        logs.append(run.logged)
    assert same(*logs)


def test_looking_at_state_without_holding_it_keeps_none_in_memory(tmp_path):
    run, model = Run("ssd", tmp_path), mlp()
    optimizer = run.prepare(model, OPTIMIZERS["adamw"](model.parameters()))

    def look(number):
        run.log([state["exp_avg"].norm() for state in optimizer.state.values()])
        saved = optimizer.state_dict()
        assert len(saved["state"]) == 6
        assert streaming_of(optimizer).state_store is not None

    train(run, model, optimizer, after=look)
    train(run, model, optimizer, steps=1, first=3)
    with stepping():  # what is on its way when code of the user goes on stays for now
        moved = [parked_of(state["exp_avg"]) for state in optimizer.state.values()]
        streaming_of(optimizer).state_store.settle()
    assert {one.where for one in moved if one is not None} == {Where.AWAY}


def test_state_that_is_being_written_in_parts_is_that_after_the_step(tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    logs = []
    for place in ("none", "ssd"):
        run, model = Run(place, tmp_path), mlp()
        optimizer = run.prepare(model, OPTIMIZERS["adamw"](model.parameters()))
        train(run, model, optimizer, steps=2)
        held = optimizer.state[model[0].weight]["exp_avg"]
        train(run, model, optimizer, steps=1, first=2)
        hang = Hang(monkeypatch, "write_once") if place == "ssd" else None
        model[0].weight.sum()  # which completes the step
        if hang is not None:
            threading.Timer(0.1, hang.end).start()
        run.log(held)
        logs.append(run.logged)
    assert same(*logs)


def test_state_that_is_held_is_written_to_without_a_new_version(tmp_path):
    logs = []
    for place in ("none", "ssd"):
        run, model = Run(place, tmp_path), mlp()
        optimizer = run.prepare(model, OPTIMIZERS["adamw"](model.parameters()))
        train(run, model, optimizer, steps=1)
        held = [state["exp_avg"] for state in optimizer.state.values()]
        train(run, model, optimizer, steps=2, first=1)
        for each in held:
            each.data.fill_(1)
        train(run, model, optimizer, steps=2, first=3)
        run.log_all(model, optimizer)
        logs.append(run.logged)
    assert same(*logs)
