"""Changes of weights on a tier that PyTorch counts as no new version are kept: those of fused optimizers, and of others."""

import pytest
import torch

from hf_offload import OffloadConfig, attach
from hf_offload.planning.measuring import StepMeter
from tests.helpers.parked import leave_memory, parked
from tests.helpers.streamed import mlp, same, stream_in_parts

FUSED = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_step_is_kept(kind, tmp_path):
    found = []
    for place in ("none", "ssd"):
        model = mlp()
        session = parked(model, tmp_path) if place == "ssd" else None
        optimizer = FUSED[kind](model.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            model(torch.ones(4, 96)).square().mean().backward()
            if session is not None:
                leave_memory(session)
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                leave_memory(session)
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert same(*found)


LISTS = sorted(name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_"))


def call(name, weight):
    """Call a function of lists with whatever it takes."""
    function, other = getattr(torch, name), torch.full_like(weight, 0.5)
    for more in ((), (0.5,), ([other],), ([other], 0.5), ([other], [other]), (0.5, 0.25)):
        try:
            return function([weight], *more)
        except (RuntimeError, TypeError):
            continue
    raise AssertionError(f"nothing that {name} takes was found")


@pytest.mark.parametrize("name", LISTS)
def test_a_measured_step_counts_what_functions_of_lists_change(name):
    versions = []
    for is_measured in (False, True):
        model = mlp()
        weight = next(model.parameters())
        meter = StepMeter(model, lambda: 0, lambda: 0.0, lambda: 0)
        if is_measured:
            meter.begin()
            meter.begin_forward([torch.ones(1)], True)
        with torch.no_grad():
            call(name, weight)
        if is_measured:
            meter.end()
        versions.append(weight._version)
    assert versions[0] == versions[1] > 0


@pytest.mark.parametrize("group", ["with others", "of its own"])
def test_integers_that_an_optimizer_passes_by_are_no_obstacle(group, tmp_path):
    found = []
    for place in ("none", "ssd"):
        model = mlp()
        model.numbers = torch.nn.Parameter(torch.arange(8), requires_grad=False)
        weights = [p for p in model.parameters() if p.is_floating_point()]
        groups = (
            [*weights, model.numbers] if group == "with others" else [{"params": weights}, {"params": [model.numbers]}]
        )
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        if place == "ssd":
            optimizer = parked(model, tmp_path, optimizer="ssd").prepare_optimizer(optimizer)
        for _ in range(3):
            model(torch.ones(4, 96)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert same(*found)


def test_an_update_that_is_an_error_is_one_of_its_step(tmp_path):
    """Its state has another dtype than the weights since. No weight is stepped, then or later."""
    found = []
    for place in ("none", "ssd"):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        if place == "ssd":
            optimizer = parked(model, tmp_path, optimizer="ssd").prepare_optimizer(optimizer)
        for dtype in (torch.float32, torch.float64):
            model.to(dtype)
            model(torch.ones(4, 96, dtype=dtype)).square().mean().backward()
            if dtype == torch.float32:
                optimizer.step()
                optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="expected dtype"):
            optimizer.step()
        found.append([model(torch.ones(4, 96, dtype=torch.float64)), *model.parameters()])
    assert same(*found)


OPTIMIZERS = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "foreach": lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=True),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
}


@pytest.mark.parametrize("params", ["none", "ssd"])
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_streamed_step_counts_as_many_changes_as_in_memory(kind, parts, params, tmp_path, monkeypatch):
    if parts:
        stream_in_parts(monkeypatch)
    found = []
    for place in ("none", "ssd"):
        model = mlp()
        optimizer = OPTIMIZERS[kind](model.parameters())
        if place == "ssd":
            config = OffloadConfig(tier="none", params=params, optimizer="ssd", min_bytes=1, directory=tmp_path)
            session = attach(model, config)
            optimizer = session.prepare_optimizer(optimizer)
            session.defer_updates()
        versions = []
        for _ in range(2):
            loss = model(torch.ones(4, 96)).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            loss = model(torch.ones(4, 96)).square().mean()  # which an update has waited for
            versions.append([weight._version for weight in model.parameters()])
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            optimizer.zero_grad()
        found.append(versions)
    assert found[0] == found[1]


@pytest.mark.parametrize("place", ["none", "ram"])
def test_an_update_of_memory_that_overlaps_is_an_error_of_its_step(place):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(1, 64).expand(32, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if place == "ram":
        attach(model, OffloadConfig(tier="none", optimizer="ram", min_bytes=1)).prepare_optimizer(optimizer)
    (torch.ones(2, 64) @ model.weight.t()).sum().backward()
    with pytest.raises(RuntimeError, match="single memory location"):
        optimizer.step()
