"""Optimizers whose classes are not known to update each weight by itself step as a whole: with the bits of memory."""

import functools
import logging

import bitsandbytes
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_lorafa_optimizer
from torch import nn

from hf_offload import OffloadConfig
from hf_offload.errors import OffloadConfigError
from hf_offload.session import attach
from hf_offload.state.optimizer import check_streamable, state_per_weight, streaming_of
from tests.helpers.streamed import Run, batch, copied, mlp, same, train
from tests.helpers.unusual_optimizers import Unusual


class DividesByTheNormOfAll(Unusual):
    """As LARS's and LAMB's layers do, but over all weights, as Prodigy's and D-Adaptation's estimates are."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.factor = torch.linalg.vector_norm(torch.stack([each.norm() for each in gradients]))
        return super().step(closure)

    def update(self, parameter, state, group):
        mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        parameter.sub_(mean / self.factor, alpha=group["lr"])


class CountsInItsGroups(Unusual):
    """As schedule-free optimizers do, whose weights are those of the mean or not."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)

    def update(self, parameter, state, group):
        z = state.setdefault("z", parameter.clone())
        z.sub_(parameter.grad, alpha=group["lr"])
        parameter.lerp_(z, 1 / group["k"])


class LooksAhead(torch.optim.Optimizer):
    """Lookahead: another optimizer steps, whose weights are pulled back every few steps."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, {"lr": 1e-2})
        self.inner = torch.optim.AdamW(parameters, lr=1e-2)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            if self.steps % 2 == 0:
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class Draws(Unusual):
    """Adds noise, from a generator of its own and from PyTorch's: SGLD."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.generator = torch.Generator().manual_seed(7)

    def update(self, parameter, state, group):
        state["noise"] = torch.randn(parameter.shape, generator=self.generator) + torch.rand_like(parameter)
        parameter.sub_(parameter.grad + 1e-3 * state["noise"], alpha=group["lr"])


class StepsOutOfSharpMinima(Unusual):
    """SAM: evaluates the loss again, at weights that are moved."""

    @torch.no_grad()
    def step(self, closure=None):
        moved = [(p, p.grad * 0.05) for p in self.param_groups[0]["params"] if p.grad is not None]
        for parameter, by in moved:
            parameter.add_(by)
            parameter.grad = None
        with torch.enable_grad():
            loss = closure()
        for parameter, by in moved:
            parameter.sub_(by)
        super().step()
        return loss

    def update(self, parameter, state, group):
        parameter.sub_(state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1))


class KeepsOneBuffer(Unusual):
    """Keeps the state of all weights in one tensor, as flattened optimizers do."""

    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        if not self.state:
            flat = torch.zeros(sum(p.numel() for p in parameters))
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                self.state[parameter]["mean"] = part.view_as(parameter)
        return super().step(closure)

    def update(self, parameter, state, group):
        parameter.sub_(state["mean"].lerp_(parameter.grad, 0.1), alpha=group["lr"])


class CallsItsBase(torch.optim.AdamW):
    """A subclass that computes: its base is known, and it is not."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        return super().step(closure)


torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # PyTorch notes on the step of a class that it has wrapped it


class KeepsTheNameOfItsBase(torch.optim.SGD):
    """Copies what PyTorch has noted on the step of its base, as ``functools.wraps`` does."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-2, momentum=0.9)

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        return super().step(closure)


KINDS = [
    KeepsTheNameOfItsBase,
    DividesByTheNormOfAll,
    CountsInItsGroups,
    LooksAhead,
    Draws,
    StepsOutOfSharpMinima,
    KeepsOneBuffer,
    CallsItsBase,
    torch.optim.LBFGS,
]


def _trained(kind, run):
    torch.manual_seed(0)
    model = mlp()
    optimizer = run.prepare(model, kind(model.parameters()))
    needs_closure = kind in (StepsOutOfSharpMinima, torch.optim.LBFGS)

    def step(number):
        def closure():
            optimizer.zero_grad()
            loss = model(batch(number)).square().mean()
            loss.backward()
            return loss

        if kind is StepsOutOfSharpMinima:
            closure()
        elif not needs_closure:
            closure()
            run.clip(model, 0.1)
        run.log(optimizer.step(closure) if needs_closure else optimizer.step())

    for number in range(4):
        step(number)
    moved = run.session is not None and [record.state_bytes > 0 for record in streaming_of(optimizer).records]
    run.log_all(model, optimizer)
    optimizer.load_state_dict(copied(optimizer.state_dict()))
    for number in range(4, 6):
        step(number)
    run.log_all(model, optimizer)
    run.log(torch.get_rng_state(), [p.grad for p in model.parameters()])
    return optimizer, moved


@pytest.mark.parametrize("settings", [{}, {"params": "ssd"}], ids=["state", "state and weights"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_class_has_the_bits_of_memory(kind, settings, tmp_path):
    runs = [Run("none", tmp_path), Run("ssd", tmp_path, **settings)]
    _trained(kind, runs[0])
    optimizer, moved = _trained(kind, runs[1])
    assert same(runs[0].logged, runs[1].logged)
    assert streaming_of(optimizer).whole
    assert any(moved) or kind in (KeepsOneBuffer, torch.optim.LBFGS)  # whose state is shared, or belongs to one weight


@pytest.fixture
def overrides():
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()  # it knows weights by their ids, which other tests' weights had
    yield manager
    manager.initialize()


@pytest.mark.parametrize("later", [False, True])
def test_bitsandbytes_with_options_for_single_weights(later, overrides, tmp_path):
    """A Trainer registers embeddings for 32-bit state with every 8-bit optimizer of bitsandbytes."""
    runs = [Run("none", tmp_path), Run("ssd", tmp_path)]
    for run in runs:
        model = mlp()
        if not later:
            overrides.register_module_override(model[2], "weight", {"optim_bits": 32})
        optimizer = run.prepare(model, bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=256))
        if later:
            overrides.register_module_override(model[2], "weight", {"optim_bits": 32})
        train(run, model, optimizer)
        dtypes = {optimizer.state[model[number].weight]["state1"].dtype for number in (0, 2)}
        assert dtypes == {torch.uint8, torch.float32}
        run.log_all(model, optimizer)
        overrides.initialize()
    assert same(runs[0].logged, runs[1].logged)


@pytest.mark.parametrize("settings", [{}, {"params": "ssd"}], ids=["state", "state and weights"])
def test_lora_fa_has_the_bits_of_memory(settings, tmp_path):
    """PEFT's optimizer steps two matrices of an adapter together."""
    runs = [Run("none", tmp_path), Run("ssd", tmp_path, **settings)]
    for run in runs:
        torch.manual_seed(0)
        model = get_peft_model(mlp(), LoraConfig(r=4, target_modules=["0", "2"]))
        optimizer = run.prepare(model, create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-2))
        train(run, model, optimizer)
        run.log_all(model, optimizer)
    assert same(runs[0].logged, runs[1].logged)


def test_only_what_overrides_nothing_is_known():
    def is_known(optimizer):
        try:
            check_streamable(optimizer)
        except OffloadConfigError as error:
            return "not known to step each weight by itself" not in str(error)
        return True

    parameters = list(mlp().parameters())
    assert is_known(torch.optim.AdamW(parameters))
    assert not is_known(CallsItsBase(parameters))
    assert not is_known(torch.optim.LBFGS(parameters))


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

    runs = [Run("none", tmp_path), Run("ssd", tmp_path)]
    for run in runs:
        go(run)
    assert same(runs[0].logged, runs[1].logged)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.optim.AdamW, 2.0),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3.0),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (torch.optim.Adafactor, 0.01),
        (Draws, 2.0),
    ],
    ids=["AdamW", "AMSGrad", "SGD", "Adafactor", "not known"],
)
def test_bytes_of_state_are_those_of_a_large_weight(make, expected):
    before = torch.get_rng_state()
    assert state_per_weight(make([nn.Parameter(torch.ones(300, 300))])) == pytest.approx(expected, abs=0.01)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "settings", [{"tier": "auto", "memory_budget": "6MiB"}, {"optimizer": "auto", "memory_budget": "1MiB"}]
)
def test_what_is_automatic_leaves_it_in_memory_and_says_why(settings, tmp_path, caplog):
    def go(offloads):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(3)))
        optimizer, losses, session = Draws(model.parameters()), [], None
        if offloads:
            session = attach(model, OffloadConfig(directory=tmp_path, min_bytes=1024, **{"tier": "none", **settings}))
            session.prepare_optimizer(optimizer)
        for number in range(3):
            loss = model(batch(number, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if session is not None:
                session.end_step()
        if session is not None:
            assert streaming_of(optimizer) is None
            session.detach()
        return [losses, [p.detach().clone() for p in model.parameters()], optimizer.generator.get_state()]

    with caplog.at_level(logging.INFO, "hf_offload"):
        assert same(go(False), go(True))
    assert any(
        "stay in memory" in m and "Draws is not known to step each weight by itself" in m for m in caplog.messages
    )
