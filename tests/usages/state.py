"""What programs do with the state of optimizers: hold, replace, read, save and load it."""

import collections
import copy
import gc
import pickle

import torch
from torch import nn

from tests.helpers.train import Run, adamw, copied, mlp, train
from tests.usages.table import usage

# -- state that others hold ----------------------------------------------------------------------------------------------


def _tensors_of(state):
    return [each for each in state.values() if isinstance(each, torch.Tensor)]


# What is held of each parameter's state, as tensors that are written to and read later.
HOLDS = {
    "tensors": lambda state: _tensors_of(state),
    "views": lambda state: [each.view(-1)[:8] for each in _tensors_of(state) if each.dim()],
    "arrays": lambda state: [each.numpy() for each in _tensors_of(state)],
    "dictionary": lambda state: [state],
}


def _write(held):
    if isinstance(held, dict):
        for each in _tensors_of(held):
            _write(each)
    else:
        held *= 0.5


def _read_and_write(run, held):
    run.log(*(one if isinstance(one, dict) else torch.as_tensor(one) for one in held))
    for one in held:
        _write(one)


def _hold_between_steps(run, make, hold):
    """State is held after two steps, read and written after each of the next ones, and let go."""
    model = mlp()
    optimizer = run.prepare(model, make(model.parameters()))
    train(run, model, optimizer, steps=2)
    held = [each for state in optimizer.state.values() for each in hold(state)]
    train(run, model, optimizer, first=2, after=lambda number: _read_and_write(run, held))
    for one in held:
        if isinstance(one, torch.Tensor):
            one.data.fill_(1)  # which is no new version
    held.clear()
    gc.collect()
    train(run, model, optimizer, steps=2, first=5)
    run.log_all(model, optimizer)


@usage("torch.distributed.checkpoint and Muon's loggers, which hold state while steps go on")
def state_is_held_between_steps(run):
    for hold in HOLDS.values():
        _hold_between_steps(run, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), hold)
    _hold_between_steps(run, lambda parameters: torch.optim.Adafactor(parameters, lr=0.1), HOLDS["tensors"])


def _before_the_first_step(run, model):
    optimizer = adamw(run, model)
    return optimizer, [optimizer.state[p] for p in model.parameters()]


def _before_it_is_prepared(run, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(Run("none", None), model, optimizer, steps=1)
    held = [each for state in optimizer.state.values() for each in _tensors_of(state)]
    return run.prepare(model, optimizer), held


def _one_that_was_set(run, model):
    optimizer = adamw(run, model)
    train(run, model, optimizer, steps=1)
    held = dict(optimizer.state[model[0].weight])
    optimizer.state[model[0].weight] = held
    return optimizer, [held]


def _after_loading(run, model):
    optimizer = adamw(run, model)
    train(run, model, optimizer, steps=1)
    held = [each for state in optimizer.state.values() for each in _tensors_of(state)]
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer, held + [each for state in optimizer.state.values() for each in _tensors_of(state)]


@usage("schedule-free and Prodigy's loggers: state that is held since before steps, or loading", in_backward=True)
def state_is_held_from_elsewhere(run):
    for begin in (_before_the_first_step, _before_it_is_prepared, _one_that_was_set, _after_loading):
        model = mlp()
        optimizer, held = begin(run, model)
        train(run, model, optimizer, after=lambda number, held=held: _read_and_write(run, held))
        run.log_all(model, optimizer)


# -- state that is set, saved and loaded ---------------------------------------------------------------------------------


@usage("accelerate, which moves state by setting optimizer.state; Lookahead, which clears it")
def state_is_replaced(run):
    model = mlp()
    optimizer = adamw(run, model)
    train(run, model, optimizer)
    optimizer.state = collections.defaultdict(dict)
    train(run, model, optimizer)
    optimizer.state.clear()
    train(run, model, optimizer)
    run.log_all(model, optimizer)


@usage("PEFT's LoRA-GA and pruning libraries, which read and set state by weight")
def state_is_read_and_written(run):
    model = mlp()
    optimizer = adamw(run, model)
    state, weight = optimizer.state, model[0].weight
    train(run, model, optimizer, after=lambda _: run.log(weight in state, state.get(weight)))
    state = optimizer.state  # after all steps: what is taken out of it is not made again
    run.log(state.setdefault(weight, {})["exp_avg"], [one["exp_avg"] for one in state.values()])
    state.update({weight: {name: value * 2 for name, value in state[weight].items()}})
    del state[model[4].weight]
    train(run, model, optimizer)
    run.log(len(state), state.copy()[weight]["exp_avg"], {**state}[weight]["exp_avg"], (state | {"a": 1})[weight])
    state |= {weight: {name: value * 2 for name, value in state[weight].items()}}
    train(run, model, optimizer)
    run.log_all(model, optimizer)


def _unfreeze(number, model, optimizer):
    for place, layer in enumerate(model):
        layer.requires_grad_(place >= len(model) - 1 - number)


def _pop(number, model, optimizer):
    if number == 1:
        optimizer.state.pop(model[1].weight)
        model[1].requires_grad_(False)
    model[1].requires_grad_(number != 1)


def _set(number, model, optimizer):
    if number == 0:
        states = ("exp_avg", "exp_avg_sq")
        optimizer.state[model[2].weight] = {name: torch.zeros_like(model[2].weight) for name in states}
        optimizer.state[model[2].weight]["step"] = torch.tensor(1.0)


def _load_in_another_order(number, model, optimizer):
    if number == 1:
        state = optimizer.state_dict()
        state["state"] = {key: copied(state["state"][key]) for key in reversed(state["state"])}
        optimizer.load_state_dict(state)


def _replace(number, model, optimizer):
    if number == 1:
        optimizer.state = dict(reversed(list(optimizer.state.items())))


@usage("PyTorch's state_dict, whose keys come in the order in which weights have got their state", in_backward=True)
def keys_of_state_are_in_order(run):
    for act in (_unfreeze, _pop, _set, _load_in_another_order, _replace):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(96, 96) for _ in range(4)])
        groups = [{"params": list(model[2:].parameters())}, {"params": list(model[:2].parameters())}]
        optimizer = run.prepare(model, torch.optim.AdamW(groups, lr=1e-2))
        names = {parameter: name for name, parameter in model.named_parameters()}
        for number in range(3):
            act(number, model, optimizer)
            train(run, model, optimizer, steps=1, first=number, loss=lambda model, x: model(x.requires_grad_()).sum())
            run.log(list(optimizer.state_dict()["state"]))
        run.log([names[key] for key in optimizer.state])
        run.log_all(model, optimizer)


@usage("PyTorch's docs, Saving and loading a general checkpoint; scripts that go back to their best step")
def states_are_held_and_loaded_later(run):
    for of_optimizer in (False, True):
        for way in ("held", "at once", "copied", "loaded twice", "after others"):
            model = mlp()
            optimizer = adamw(run, model)
            train(run, model, optimizer, steps=2)
            whose = optimizer if of_optimizer else model
            taken = whose.state_dict() if way in ("held", "at once") else copy.deepcopy(whose.state_dict())
            if way in ("loaded twice", "at once"):
                whose.load_state_dict(taken)
            elif way == "after others":
                whose.load_state_dict(copy.deepcopy(taken))
                whose.load_state_dict(taken)
            train(run, model, optimizer, steps=2, first=2)
            if way in ("held", "copied", "loaded twice"):
                whose.load_state_dict(taken)
                train(run, model, optimizer, steps=1, first=4)
            run.log_all(model, optimizer)


@usage("TRL, whose trainers of two phases make another optimizer for the same model")
def another_optimizer_comes_later(run):
    model = mlp()
    train(run, model, adamw(run, model), zero=False)
    gc.collect()
    optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(run, model, optimizer, zero=False)
    run.log_all(model, optimizer)


@usage("copy.deepcopy and pickle of a model with its optimizer, as meta-learning does")
def model_and_optimizer_are_copied(run):
    model = mlp()
    optimizer = adamw(run, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(run, model, optimizer, after=lambda _: scheduler.step(), zero=False)
    pairs = [(model, optimizer), copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    for one, its_optimizer in pairs:
        train(run, one, its_optimizer)
        run.log_all(one, its_optimizer)


@usage("transfer learning: a group is added to Adafactor, whose weights cannot be cut")
def a_group_is_added(run):
    model = mlp()
    optimizer = run.prepare(model, torch.optim.Adafactor(model[0].parameters(), lr=0.1))
    train(run, model, optimizer)
    optimizer.add_param_group({"params": list(model[2:].parameters())})
    train(run, model, optimizer)
    run.log_all(model, optimizer)
