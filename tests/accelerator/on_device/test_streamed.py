"""Optimizer state and gradients that leave the device: steps are computed there, with the bits of the run that keeps them."""

import gc
import io
import itertools

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, attach
from hf_offload.state.optimizer import streaming_of
from hf_offload.state.shadow import Shadow
from tests.accelerator.on_device.training import Case, batch, build, train_on_tiers
from tests.helpers.tables import rows
from tests.helpers.train import assert_same

pytestmark = pytest.mark.usefixtures("nothing_stays_behind")
STEPS = 4


WAYS = list(itertools.product(("none", "ssd"), ("clipped", "accumulated"), ("ram", "ssd")))
# Every two of a tier, a way and a place.
QUICK = [
    ("none", "clipped", "ram"), ("none", "accumulated", "ssd"), ("ssd", "clipped", "ssd"), ("ssd", "accumulated", "ram"),
]  # fmt: skip


@pytest.mark.parametrize(("tier", "way", "place"), rows(WAYS, quick=QUICK))
def test_steps_on_the_device_have_the_same_bits(late, tier, way, place):
    clip, accumulation = {"clipped": (True, 1), "accumulated": (False, 2)}[way]
    case = Case(accumulation=accumulation)
    expected = train_on_tiers(case, clip=clip)
    gc.collect()
    for seed in range(2):
        late.reseed(seed)
        assert_same(expected, train_on_tiers(case, optimizer=place, tier=tier, clip=clip))
        gc.collect()


def test_state_leaves_the_device(late):
    model: nn.Module = build(Case())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    session = attach(model, OffloadConfig(tier="none", optimizer="ram", min_bytes=0))
    session.prepare_optimizer(optimizer)
    session.defer_updates()
    gc.collect()
    before = torch.accelerator.memory_allocated("late:0")
    for step in range(2):
        model(**batch(Case(), step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    streaming_of(optimizer).finish()
    gc.collect()
    assert torch.accelerator.memory_allocated("late:0") - before < weights / 4
    session.detach()


# -- what else reads gradients and state ------------------------------------------------------------------------------------


class Signed(torch.optim.AdamW):
    """Not one of the classes that are known to step each weight by itself."""


class Run:
    """Steps of a model whose ``look(run)`` is called between backward and step."""

    def __init__(self, place, look, kind=torch.optim.AdamW, clears=True, **options):
        torch.manual_seed(7)
        self.model = build(Case())
        self.optimizer = kind(self.model.parameters(), lr=1e-2, **options)
        self.session = attach(self.model, OffloadConfig(tier="none", optimizer=place, min_bytes=0))
        self.session.prepare_optimizer(self.optimizer)
        self.session.defer_updates()
        self.found = []
        self.came_bytes = []  # that were still there after the look
        for step in range(STEPS):
            self.model(**batch(Case(), step)).loss.backward()
            gc.collect()
            before = torch.accelerator.memory_allocated("late:0")
            self.found += [value.detach().cpu() for value in look(self)]
            gc.collect()
            self.came_bytes.append(torch.accelerator.memory_allocated("late:0") - before)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=clears)
        self.found += [parameter.detach().cpu() for parameter in self.model.parameters()]
        self.session.detach()

    @property
    def gradients(self):
        return [parameter.grad for parameter in self.model.parameters()]

    @property
    def moments(self):
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.model.parameters()]
        return [value for state in states for _, value in sorted(state.items()) if value.dim()]


def nothing(run):
    return []


def norms(run):
    return [gradient.norm() for gradient in run.gradients]


def clipped(run):
    return [nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)]


def scaled(run):
    for gradient in run.gradients:
        gradient.mul_(0.5)
    return run.gradients[:2]


def of_moments(run):
    torch._foreach_mul_(run.moments, 0.5) if run.moments else None
    return [moment.sum() for moment in run.moments]


def viewed(run):
    """Aliases of gradients, which are written to by their memory's address."""
    run.views = [gradient.view(-1).detach() for gradient in run.gradients]
    for view in run.views:
        view.data[0] = 0.25
    return run.views


def replaced(run):
    """Other tensors over the memory of gradients, while others come and go."""
    for parameter in run.model.parameters():
        parameter.grad = parameter.grad.detach()
    run.session.clip_grad_norm_(0.5)
    return run.gradients


def saved(run):
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), map_location="cpu")
    run.optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    return [value for _, place in sorted(state["state"].items()) for _, value in sorted(place.items())]


LOOKS = {look.__name__: look for look in (nothing, norms, clipped, scaled, of_moments, viewed, replaced, saved)}
KINDS = {
    "whole": {"kind": Signed, "fused": True},
    "uncleared": {"clears": False},
    "momentum": {"kind": torch.optim.SGD, "momentum": 0.9},
}
READS = [*((look, "uncleared") for look in LOOKS), ("nothing", "whole"), ("clipped", "whole"), ("norms", "momentum")]


@pytest.mark.parametrize(
    ("look", "kind", "place"), [(*row, "ssd" if number % 2 else "ram") for number, row in enumerate(READS)]
)
def test_whoever_reads_gradients_and_state_reads_their_bits(late, look, kind, place):
    expected = Run("none", LOOKS[look], **KINDS[kind]).found
    gc.collect()
    late.reseed(len(look))
    assert_same(expected, Run(place, LOOKS[look], **KINDS[kind]).found)
    gc.collect()


def test_large_weights_step_in_parts(late, monkeypatch):
    monkeypatch.setattr("hf_offload.state.update.CUT_ELEMENTS", 1024)
    monkeypatch.setattr("hf_offload.state.setting.part_bytes", lambda budget: 4096)
    expected = Run("none", of_moments).found
    gc.collect()
    run = Run("ssd", of_moments)
    streaming = streaming_of(run.optimizer)
    assert any(streaming.spans(parameter, None) for parameter in run.model.parameters())
    assert_same(expected, run.found)
    del run, streaming
    gc.collect()


@pytest.mark.parametrize("look", ["norms", "of_moments"])
def test_what_somebody_reads_leaves_the_device_again(late, look):
    run = Run("ram", LOOKS[look])
    largest = max(parameter.nbytes for parameter in run.model.parameters())
    assert max(run.came_bytes[1:]) <= largest  # of the last that was read, whose alias had not gone
    del run
    gc.collect()


def prepared(place, **options):
    torch.manual_seed(7)
    model = build(Case())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    session = attach(model, OffloadConfig(tier="none", optimizer=place, min_bytes=0))
    session.prepare_optimizer(optimizer)
    return model, optimizer, session


def scaled_steps(place):
    model, optimizer, session = prepared(place, fused=True)
    scaler = torch.amp.GradScaler("late", init_scale=8.0)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(model(**batch(Case(), step)).loss).backward()
        scaler.step(optimizer)
        scaler.update()
    found = [tensor.detach().cpu() for p in model.parameters() for tensor in (p.grad, p)]
    session.detach()
    return found


def test_a_fused_step_divides_a_whole_gradient_by_the_scale(late):
    """Who reads the gradient after the step reads what memory has."""
    expected = scaled_steps("none")
    gc.collect()
    assert_same(expected, scaled_steps("ram"))


def interrupted_steps(place, monkeypatch):
    """A state dict holds the slots, so that parts go to others; Ctrl-C comes between two parts, and moments are read."""
    model, optimizer, session = prepared(place, foreach=False)
    own, calls = Shadow.step, []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return own(self, *args)

    for step in range(2):
        optimizer.zero_grad()
        model(**batch(Case(), step)).loss.backward()
        if place == "none" or step == 0:
            optimizer.step()
            continue
        held, states = optimizer.state_dict(), dict(optimizer.state)
        with monkeypatch.context() as patch:
            patch.setattr(Shadow, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        sums = [state["exp_avg"].norm() for state in states.values()]
        assert held
        assert sums
        streaming_of(optimizer).finish()
    found = [value.detach().cpu() for p in model.parameters() for value in (p, *optimizer.state[p].values())]
    session.detach()
    return found


def test_moments_that_are_read_in_the_midst_of_a_step_are_those_after_it(late, monkeypatch):
    monkeypatch.setattr("hf_offload.state.update.CUT_ELEMENTS", 1024)
    monkeypatch.setattr("hf_offload.state.setting.part_bytes", lambda budget: 4096)
    expected = interrupted_steps("none", monkeypatch)
    gc.collect()
    assert_same(expected, interrupted_steps("ssd", monkeypatch))
