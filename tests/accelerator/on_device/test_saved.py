"""What is saved of weights and state that left the device: files are written of it without the device's memory."""

import copy
import gc
import io

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from hf_offload import OffloadConfig, OffloadError, attach
from hf_offload.state.optimizer import streaming_of
from hf_offload.state.parked import Where
from hf_offload.state.registry import parked_of
from tests.helpers.train import assert_same

pytestmark = pytest.mark.usefixtures("nothing_stays_behind", "late")
SIZE, LAYERS = 128, 6


class Run:
    """A model whose layers take turns on the device, two at a time."""

    def __init__(self, params="none", optimizer="none"):
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)]).to("late")
        self.model[4].weight = self.model[1].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=False)
        config = OffloadConfig(tier="none", params=params, optimizer=optimizer, min_bytes=0)
        self.session = attach(self.model, config)
        self.session.prepare_optimizer(self.optimizer)
        self.steps(2)

    def steps(self, count):
        for _ in range(count):
            self.model(torch.ones(1, SIZE, device="late")).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.session.end_step()


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def host(state):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda one: one.cpu().clone(), state)


@pytest.mark.parametrize("place", ["ram", "ssd"])
def test_state_is_saved_without_the_device_s_memory(place):
    expected = Run()
    run = Run(optimizer=place)
    gc.collect()
    before = torch.accelerator.memory_allocated()
    state = run.optimizer.state_dict()
    assert {value["exp_avg"].device.type for value in state["state"].values()} == {"cpu"}
    found = saved(state)
    assert torch.accelerator.memory_allocated() <= before
    assert_same(host(expected.optimizer.state_dict()), found)
    run.steps(1)
    assert_same(found["state"][0]["exp_avg"], saved(state["state"][0]["exp_avg"]))
    expected.steps(1)
    assert_same(host(expected.optimizer.state_dict()), saved(run.optimizer.state_dict()))
    expected.optimizer.load_state_dict(found)
    run.optimizer.load_state_dict(found)
    assert_same(found, saved(run.optimizer.state_dict()))
    for each in (expected, run):
        each.session.detach()


@pytest.mark.parametrize("place", ["ram", "ssd"])
def test_weights_are_saved_without_the_device_s_memory(place):
    expected = Run()
    run = Run(params=place, optimizer=place)
    gc.collect()
    before = torch.accelerator.memory_allocated()
    state = run.model.state_dict()
    assert state["1.weight"].data_ptr() == state["4.weight"].data_ptr()
    found = saved(state)
    assert_same(host(dict(expected.model.state_dict())), dict(found))
    alone = {name: value for name, value in state.items() if name != "4.weight"}
    assert_same({name: found[name] for name in sorted(alone)}, dict(sorted(load(save(alone)).items())))
    assert torch.accelerator.memory_allocated() <= before
    del state, alone
    run.steps(1)
    expected.steps(1)
    assert_same(host(dict(expected.model.state_dict())), dict(saved(run.model.state_dict())))
    for each in (expected, run):
        each.session.detach()


def away(run):
    return next((name, each) for name, each in run.model.named_parameters() if parked_of(each).where is Where.AWAY)


def test_a_copy_of_weights_that_is_changed_or_old_is_an_error():
    run = Run(params="ssd")
    name, _ = away(run)
    run.model.state_dict()[name].add_(1)
    with pytest.raises(OffloadError, match="was changed in place"):
        run.model(torch.ones(1, SIZE, device="late"))
    run.session.detach()


def test_copies_of_weights_are_loaded_while_they_are_of_now(monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", False)
    run = Run(params="ssd", optimizer="ssd")
    weights, state = run.model.state_dict(), run.optimizer.state_dict()
    then = copy.deepcopy(weights), copy.deepcopy(state)
    run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(state)
    run.steps(1)
    with pytest.raises(OffloadError, match="has changed since"):
        run.model.load_state_dict(weights)
    with pytest.raises(OffloadError, match="has changed since"):
        run.optimizer.load_state_dict(state)
    del weights, state
    run.model.load_state_dict(then[0])
    run.optimizer.load_state_dict(then[1])
    assert_same(host(dict(then[0])), dict(saved(run.model.state_dict())))
    assert_same(host(then[1]), saved(run.optimizer.state_dict()))
    run.session.detach()


def copies_in(state):
    """What is not the tensor itself: that of weights in memory, and of counters, is, as in memory."""
    leaves = torch.utils._pytree.tree_leaves(dict(state))
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.device.type == "cpu" and one.dim()]


def test_copies_of_weights_stay_as_they_are_while_weights_are_written():
    run = Run(params="ssd")
    state = run.model.state_dict()
    copies = copies_in(state)
    then = [one.clone() for one in copies]
    run.steps(2)
    assert copies
    assert_same(then, copies)
    assert not torch.equal(then[0], saved(run.model.state_dict())["0.weight"])
    del state, copies
    run.session.detach()


@pytest.mark.parametrize("parts", [1, 4])
def test_a_copy_of_state_stays_as_it_is_while_steps_store_parts(parts):
    """What is stored next goes to another slot, and is read there."""
    expected, run = Run(), Run(optimizer="ssd")
    streaming_of(run.optimizer)._updates.part_bytes = SIZE * SIZE * 4 // parts
    for each in (expected, run):
        each.steps(1)
    state = run.optimizer.state_dict()
    assert_same(host(expected.optimizer.state_dict()), saved(state))
    copies = copies_in(state)
    then = [one.clone() for one in copies]
    for each in (expected, run):
        each.steps(2)
    assert copies
    assert_same(then, copies)
    del state, copies
    assert_same(host(expected.optimizer.state_dict()), saved(run.optimizer.state_dict()))
    for each in (expected, run):
        each.session.detach()
