"""Optimizers of classes that are not PyTorch's: the bits of the run in memory, or a refusal that leaves no trace."""

import logging
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig
from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.optimizers.streamed import check_streamable, streaming_of
from hf_offload.optimizers.streamed.trial import state_per_weight
from hf_offload.session import attach
from tests.helpers.streamed import Run, batch, mlp, same, stream_in_parts, train
from tests.helpers.unusual_optimizers import Factored, HasFactor, Unusual

# -- what steps may read -------------------------------------------------------------------------------------------------


def reading(rule):
    """A class whose steps are as long as ``rule`` says: its code is that of the rule."""

    class Ruled(torch.optim.Optimizer):
        def __init__(self, parameters, lr=1e-2, **options):
            super().__init__(parameters, {"lr": lr, "betas": [0.9, 0.5], **options})
            self.factor = 1.0

        length = rule

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for number, parameter in enumerate(group["params"]):
                    if parameter.grad is not None:
                        mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                        mean.lerp_(parameter.grad, 1 - group["betas"][0])
                        parameter.sub_(mean * self.length(parameter, number, group), alpha=group["lr"])

    return Ruled


def an_attribute(optimizer, parameter, number, group):
    return float(optimizer.factor + 0.0)


def an_attribute_of_parameters(optimizer, parameter, number, group):
    return getattr(parameter, "scale", 1.0)


def an_option(optimizer, parameter, number, group):
    return group["betas"][1]


def names(optimizer, parameter, number, group):
    return 3.0 if group.get("param_names", [""] * 99)[number].endswith("2.weight") else 1.0


def the_first_group(optimizer, parameter, number, group):
    return optimizer.param_groups[0]["betas"][1] * optimizer.param_groups[0]["lr"]


def a_norm_where_decayed(optimizer, parameter, number, group):
    return 1.0 if group["lr"] < 0.02 else parameter.norm()


def identity(optimizer, parameter, number, group):
    return float(parameter.dim())


RULES = [an_attribute, an_attribute_of_parameters, an_option, names, the_first_group, a_norm_where_decayed, identity]


def _change(optimizer, number):
    """What a loop does after a step: nothing of it may reach the step before."""
    if isinstance(optimizer.factor, torch.Tensor):
        optimizer.factor.mul_(0.7)
    else:
        optimizer.factor = 0.5 + 0.1 * number
    for group in optimizer.param_groups:
        group["betas"][:] = [0.8, 0.2 + 0.1 * number]
        group["lr"] *= 0.9
        for parameter in group["params"]:
            parameter.scale = 0.3 + 0.2 * number


def _rule_run(rule, groups, tensor, run):
    model = mlp()
    for parameter in model.parameters():
        parameter.scale = 2.0
    named = list(model.named_parameters())
    parts = [named] if groups == 1 else [named[:3], named[3:]]
    kind = reading(rule)
    optimizer = kind([{"params": part, "lr": lr} for part, lr in zip(parts, (0.01, 0.03), strict=False)])
    if tensor:
        optimizer.factor = torch.tensor(1.0)
    run.prepare(model, optimizer)
    train(run, model, optimizer, after=lambda number: _change(optimizer, number))
    run.log_all(model, optimizer)
    return optimizer


@pytest.mark.parametrize(
    ("rule", "groups", "tensor"), [*((rule, 2, False) for rule in RULES), *((rule, 1, True) for rule in RULES[:2])]
)
def test_what_a_step_reads_is_what_it_reads_in_memory(rule, groups, tensor, tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)  # weights are larger than a part
    runs = [Run("none", tmp_path), Run("ssd", tmp_path)]
    optimizers = [_rule_run(rule, groups, tensor, run) for run in runs]
    assert same(runs[0].logged, runs[1].logged)
    assert streaming_of(optimizers[1]).own is not None


def test_options_of_known_classes_are_those_of_the_step(tmp_path):
    def go(run):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        optimizer.param_groups[0]["betas"] = [0.9, 0.999]
        run.prepare(model, optimizer)

        def change(number):
            optimizer.param_groups[0]["betas"][0] = 0.5 + 0.1 * number

        train(run, model, optimizer, after=change)
        run.log_all(model, optimizer)
        return optimizer

    runs = [Run("none", tmp_path), Run("ssd", tmp_path)]
    found = [go(run) for run in runs]
    assert same(runs[0].logged, runs[1].logged)
    assert streaming_of(found[1]).own is None


# -- what steps may not read, or change ------------------------------------------------------------------------------------


def _inner():
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


VALUES = {
    "object": types.SimpleNamespace,
    "dictionary": dict,
    "list": list,
    "set": set,
    "generator": torch.Generator,
    "Python's random": random.Random,
    "NumPy's": np.random.default_rng,
    "array": lambda: np.ones(2),
    "function": lambda: lambda: 1.0,
    "optimizer": _inner,
    "module": lambda: nn.Linear(2, 2),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("place", ["attribute", "option", "attribute of the class", "default", "closure"])
def test_values_that_a_step_could_change_are_refused_before_anything_runs(name, place, tmp_path):
    value = VALUES[name]()
    if (place == "option" and name in ("dictionary", "list")) or (
        name == "function" and place not in ("attribute", "option")
    ):
        return  # the former are copied, and the code of the latter changes nothing

    class Own(HasFactor):
        def update(self, parameter, state, group, kept=value if place == "default" else None):
            if place == "closure":
                _ = value
            parameter.sub_(parameter.grad, alpha=group["lr"])

    model = mlp()
    optimizer = Own(model.parameters())
    if place == "attribute":
        optimizer.kept = value
    elif place == "option":
        optimizer.param_groups[0]["kept"] = value
    elif place == "attribute of the class":
        Own.kept = value
    with pytest.raises(OffloadConfigError, match=r"is not a class of PyTorch's.*cannot be streamed"):
        Run("ssd", tmp_path).prepare(model, optimizer)
    assert type(optimizer) is Own


COUNTS = {"steps": 0}
CALLS = 0
CONSTANT = 0.5
GENERATOR = torch.Generator()
module_of_the_user = types.ModuleType("module_of_the_user")
module_of_the_user.settings = {"lr": 1.0}
module_of_the_user.number = 1


def helper():
    return COUNTS


def counting():
    calls = 0

    def count():
        nonlocal calls
        calls += 1

    return count


count_by_nonlocal = counting()


def counted():
    return CONSTANT


def in_global_dictionary(self, parameter, state, group):
    COUNTS["steps"] += 1


def in_a_dictionary_of_a_helper(self, parameter, state, group):
    helper()["steps"] += 1


def in_a_global_number(self, parameter, state, group):
    global CALLS
    CALLS += 1


def in_a_variable_of_a_closure(self, parameter, state, group):
    count_by_nonlocal()


def in_a_module(self, parameter, state, group):
    module_of_the_user.settings["lr"] *= 0.5


def in_a_number_of_a_module(self, parameter, state, group):
    module_of_the_user.number += 1


def in_an_attribute_of_a_function(self, parameter, state, group):
    counted.calls = getattr(counted, "calls", 0) + 1


def in_an_attribute_of_its_class(self, parameter, state, group):
    type(self).calls = getattr(type(self), "calls", 0) + 1


def in_an_attribute(self, parameter, state, group):
    self.factor += 1


def in_a_switch(self, parameter, state, group):
    self.is_first = False


def in_an_option(self, parameter, state, group):
    group["betas"][0] *= 0.5


def in_a_state_for_all(self, parameter, state, group):
    self.state["all"]["calls"] = self.state["all"].get("calls", 0) + 1


def in_a_generator(self, parameter, state, group):
    torch.randn(2, generator=GENERATOR)


def in_pytorchs_random_numbers(self, parameter, state, group):
    state["noise"] = torch.rand_like(parameter)


def in_python_s_random_numbers(self, parameter, state, group):
    random.random()


def in_numpys_random_numbers(self, parameter, state, group):
    np.random.rand()  # noqa: NPY002 -- what users call


def in_what_it_imports(self, parameter, state, group):
    import random as numbers

    numbers.random()


CHANGING = [value for name, value in list(globals().items()) if name.startswith("in_")]


def _left_by_steps():
    states = torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002 -- see above
    numbers = CALLS, dict(COUNTS), dict(module_of_the_user.settings), module_of_the_user.number
    return (*states, *numbers, vars(counted).copy(), GENERATOR.get_state().tolist())


@pytest.mark.parametrize("change", CHANGING, ids=lambda change: change.__name__)
def test_steps_that_change_more_than_a_weight_are_refused_without_a_trace(change, tmp_path):
    class Own(Unusual):
        is_first = True
        also = change

        def update(self, parameter, state, group):
            self.also(parameter, state, group)
            parameter.sub_(parameter.grad, alpha=group["lr"])

    model = mlp()
    optimizer = Own(model.parameters(), betas=[0.9, 0.5])
    attributes, before = vars(optimizer).copy(), _left_by_steps()
    state_per_weight(optimizer)
    with pytest.raises(OffloadConfigError, match="cannot be streamed"):
        check_streamable(optimizer)
    assert _left_by_steps() == before
    assert vars(optimizer) == attributes
    assert not hasattr(Own, "calls")
    assert optimizer.param_groups[0]["betas"] == [0.9, 0.5]


@pytest.mark.parametrize("place", ["attribute", "option"])
def test_what_is_assigned_later_is_an_error_before_anything_is_updated(place, tmp_path):
    run, model = Run("ssd", tmp_path), mlp()
    optimizer = run.prepare(model, HasFactor(model.parameters()))
    train(run, model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(batch(0)).mean().backward()
    if place == "attribute":
        optimizer.factor = {"value": 1.0}
    else:
        optimizer.param_groups[0]["factor"] = types.SimpleNamespace()
    with pytest.raises(OffloadConfigError, match=r"factor.*which is not a plain value"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


class ChangesLater(Unusual):
    """Counts, but not from the first step on."""

    def update(self, parameter, state, group):
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 5:
            self.factor = 2.0
        parameter.sub_(parameter.grad, alpha=group["lr"] * self.factor)


def test_what_a_step_changes_that_it_did_not_change_on_trial_is_an_error(tmp_path):
    run, model = Run("ssd", tmp_path), mlp()
    optimizer = run.prepare(model, ChangesLater(model.parameters()))
    train(run, model, optimizer, steps=4)
    with pytest.raises(OffloadError, match="has changed an attribute of its own"):
        train(run, model, optimizer, steps=1)


def test_state_of_another_place_is_refused(tmp_path):
    model = mlp()
    optimizer = HasFactor(model.parameters())
    optimizer.state[model[0].weight]["is_normalized"] = True
    with pytest.raises(OffloadConfigError, match="its state was given 'is_normalized'"):
        Run("ssd", tmp_path).prepare(model, optimizer)


def test_an_optimizer_that_has_stepped_in_memory_goes_on(tmp_path):
    def go(run):
        model = mlp()
        optimizer = reading(an_option)(model.parameters())
        train(run, model, optimizer)
        run.prepare(model, optimizer)
        train(run, model, optimizer)
        run.log_all(model, optimizer)

    runs = [Run("none", tmp_path), Run("ssd", tmp_path)]
    for run in runs:
        go(run)
    assert same(runs[0].logged, runs[1].logged)


class EvaluatesTwice(HasFactor):
    """As those do that look for a flat minimum."""

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        super().step(closure)


@pytest.mark.parametrize("kind", [HasFactor, EvaluatesTwice])
def test_closures_are_called_as_the_class_does_or_refused(kind, tmp_path):
    model = mlp()
    run = Run("ssd", tmp_path)
    optimizer = run.prepare(model, kind(model.parameters()))

    def closure():
        loss = model(batch(0)).square().mean()
        loss.backward()
        return loss

    if kind is HasFactor:
        assert optimizer.step(closure) is not None
        return
    with pytest.raises(OffloadError, match="does not call its closure once"):
        optimizer.step(closure)


@pytest.mark.parametrize("base_was_made", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_subclasses_of_known_classes_are_known_unless_they_compute(changes, base_was_made, monkeypatch):
    """PyTorch wraps the step of the class that is made first, whichever has defined it."""
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", step.__wrapped__ if hasattr(step, "hooked") else step)
    if base_was_made:
        torch.optim.AdamW(mlp().parameters())

    class Own(torch.optim.AdamW):
        def __init__(self, parameters, notes):
            super().__init__(parameters, lr=1e-2)
            self.notes = notes

    if changes:
        Own.step = lambda self, closure=None: torch.optim.AdamW.step(self, closure)
    optimizer = Own(mlp().parameters(), {"for": "the log"})
    if changes:
        with pytest.raises(OffloadConfigError, match="'notes'"):
            check_streamable(optimizer)
    else:
        assert check_streamable(optimizer).own is None


class Coupled(torch.optim.Optimizer):
    """Divides the updates of weights with so many dimensions by the norm of all of them."""

    def __init__(self, parameters, lr, dims):
        super().__init__(parameters, {"lr": lr})
        self.dims = dims

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            mine = [p for p in group["params"] if p.grad is not None]
            norm = sum((p.grad.square().sum() for p in mine if p.dim() == self.dims), start=torch.zeros(()))
            for parameter in mine:
                parameter.sub_(parameter.grad / (norm if parameter.dim() == self.dims else 1.0), alpha=group["lr"])


@pytest.mark.parametrize("lr", [1e-2, 0.0])
@pytest.mark.parametrize("dims", [1, 2, 4])
def test_updates_that_depend_on_other_weights_are_refused(dims, lr):
    """Also where a schedule begins with 0, and where those alone depend on each other that are no matrices."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 8))
    with pytest.raises(OffloadConfigError, match="in another way if the others step at another time"):
        check_streamable(Coupled(model.parameters(), lr, dims))


def test_state_of_large_matrices_is_what_a_class_is_expected_to_keep():
    """Which may be factored, unlike that of small ones."""
    assert state_per_weight(Factored([nn.Parameter(torch.zeros(300, 300))])) < 0.1


class Noisy(Unusual):
    """Draws from a generator of its own."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.generator = torch.Generator().manual_seed(7)

    def update(self, parameter, state, group):
        state["noise"] = torch.randn(parameter.shape, generator=self.generator)
        parameter.sub_(parameter.grad + 1e-3 * state["noise"], alpha=group["lr"])


def test_a_plan_leaves_it_in_memory_and_says_why(tmp_path, caplog):
    def go(budget):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(3)))
        optimizer, losses, session = Noisy(model.parameters()), [], None
        if budget is not None:
            session = attach(model, OffloadConfig(memory_budget=budget, directory=tmp_path, min_bytes=1024))
            session.prepare_optimizer(optimizer)
        for number in range(3):
            loss = model(batch(number, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if session is not None:
                session.end_step()
        found = [losses, [p.detach().clone() for p in model.parameters()], optimizer.generator.get_state()]
        if session is not None:
            assert streaming_of(optimizer) is None
            session.detach()
        return found

    with caplog.at_level(logging.INFO, "hf_offload"):
        assert same(go(None), go("6MiB"))
    assert any("stay in memory" in m and "'generator' is of type Generator" in m for m in map(str, caplog.messages))
