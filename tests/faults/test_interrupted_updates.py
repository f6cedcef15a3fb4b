"""Updates that are broken off: each is computed once, with the gradient of its step, and goes where there is room."""

import errno
import functools

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, StorageError, attach
from hf_offload.state.optimizer import streaming_of
from hf_offload.state.parts import Parts
from hf_offload.state.shadow import Shadow
from hf_offload.state.update import UpdateComputer
from tests.faults.failing_calls import Faults
from tests.helpers.train import batch, mlp, same, stream_in_parts


def training(place="ssd", folder=None, defers=False, **settings):
    """A model whose optimizer has made one step, so that there is state."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if place != "none":
        config = OffloadConfig(tier="none", optimizer=place, min_bytes=256, directory=folder, **settings)
        session = attach(model, config)
        session.prepare_optimizer(optimizer)
        if defers:
            session.defer_updates()
    backward(model, 0)
    optimizer.step()
    return model, optimizer


def backward(model, number):
    model.zero_grad()
    model(batch(number)).square().mean().backward()


def values(model, optimizer):
    return [model.state_dict(), optimizer.state_dict()["state"]]


@pytest.mark.parametrize("parts", [False, True])
def test_an_interrupt_while_the_state_leaves_steps_no_weight_twice(parts, tmp_path, monkeypatch):
    if parts:
        stream_in_parts(monkeypatch)
    found = []
    for place in ("none", "ssd"):
        model, optimizer = training(place, tmp_path)
        backward(model, 1)
        if place == "ssd":
            park, left = UpdateComputer.park, [1]

            def interrupted(self, *args, park=park, left=left):
                park(self, *args)
                if left and left.pop():
                    raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(UpdateComputer, "park", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
        else:
            optimizer.step()
        found.append(values(model, optimizer))
    assert same(*found)


def test_weights_that_are_loaded_after_a_step_that_failed_are_those_that_were_loaded(tmp_path, monkeypatch):
    model, optimizer = training(folder=tmp_path)
    best = {name: value.clone() for name, value in model.state_dict().items()}
    backward(model, 1)
    streaming = streaming_of(optimizer)
    for parameter in model.parameters():
        streaming.park_state(parameter)
    streaming.state_store.settle()  # so that the step has to read it
    with monkeypatch.context() as patch:
        Faults(patch, "read_once", errno.EIO, range(1, 100))
        with pytest.raises(StorageError, match="cannot be completed"):
            optimizer.step()
    model.load_state_dict(best)
    model(batch(2))
    assert same(dict(model.state_dict()), best)


def test_new_state_that_the_drive_has_no_room_for_stays_in_memory(tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    expected = values(*training("none"))
    model, optimizer = training(folder=tmp_path, disk_budget=64 << 10)
    assert streaming_of(optimizer).state_store.refusal is not None
    assert same(values(model, optimizer), expected)


def test_parts_count_against_the_write_limit_as_what_is_written(tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    model, optimizer = training(folder=tmp_path)
    for number in range(1, 3):
        backward(model, number)
        optimizer.step()
    store = streaming_of(optimizer).state_store
    store.settle()
    tiers = {store.tier, streaming_of(optimizer).gradient_store.tier}
    limit = store.storage.disk_writes
    assert limit.taken_bytes <= 1.1 * sum(tier.stats.written_bytes for tier in tiers)


def test_a_gradient_that_is_added_to_is_not_that_of_the_step_before(tmp_path):
    found = []
    for place in ("none", "ssd"):
        model = nn.Embedding(64, 64)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if place == "ssd":
            session = attach(model, OffloadConfig(tier="none", optimizer="ssd", min_bytes=256, directory=tmp_path))
            session.prepare_optimizer(optimizer)
            session.defer_updates()
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.arange(64) % (step + 3)).square().sum()
            loss.backward(retain_graph=True)
            optimizer.step()
        loss.backward()  # is added, while the update waits for the next forward
        optimizer.step()
        found.append(values(model, optimizer))
    assert same(*found)


def test_a_second_optimizer_of_the_same_weights_steps_after_the_first(tmp_path):
    found = []
    for place in ("none", "ssd"):
        model = mlp()
        optimizers = [
            torch.optim.AdamW(model.parameters(), lr=0.1),
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        ]
        if place == "ssd":
            session = attach(model, OffloadConfig(tier="none", optimizer="ssd", min_bytes=256, directory=tmp_path))
            for optimizer in optimizers:
                session.prepare_optimizer(optimizer)
            session.defer_updates()
        for number in range(3):
            backward(model, number)
            for optimizer in optimizers:
                optimizer.step()
        found.append([model.state_dict(), *(one.state_dict()["state"] for one in optimizers)])
    assert same(*found)


def test_clipping_after_a_step_is_not_of_that_step(tmp_path):
    found = []
    for place in ("none", "ssd"):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        clip = torch.nn.utils.clip_grad_norm_
        if place == "ssd":
            session = attach(model, OffloadConfig(tier="none", optimizer="ssd", min_bytes=256, directory=tmp_path))
            session.prepare_optimizer(optimizer)
            session.defer_updates()
        for number in range(3):
            backward(model, number)
            optimizer.step()
            clip(model.parameters(), 1e-3) if place == "none" else session.clip_grad_norm_(1e-3)
        found.append(values(model, optimizer))
    assert same(*found)


def test_an_array_of_a_gradient_that_is_leaving_keeps_its_values(tmp_path):
    model, optimizer = training(folder=tmp_path)
    kept = {}
    for name, parameter in model.named_parameters():

        def keep(parameter, name=name):
            kept[name] = parameter.grad.numpy(), parameter.grad.clone()

        parameter.register_post_accumulate_grad_hook(keep)
    backward(model, 1)
    streaming_of(optimizer).gradient_store.settle()
    optimizer.step()
    assert len(kept) == len(list(model.parameters()))
    assert all(torch.equal(torch.from_numpy(array), value) for array, value in kept.values())


def test_an_error_of_the_class_in_a_later_part_leaves_no_half_of_a_step(tmp_path, monkeypatch):
    """As where an accelerator's memory is full for a moment: the rest of the step is computed with the next use."""
    stream_in_parts(monkeypatch)
    found = []
    for place in ("none", "ssd"):
        model, optimizer = training(place, tmp_path)
        backward(model, 1)
        if place == "ssd":
            own, calls = Shadow.step, []

            def failing(self, *args, own=own, calls=calls):
                calls.append(args)
                if len(calls) == 2:  # of the first weight
                    raise torch.OutOfMemoryError("full")
                return own(self, *args)

            with monkeypatch.context() as patch:
                patch.setattr(Shadow, "step", failing)
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.step()
            streaming_of(optimizer).finish()
        else:
            optimizer.step()
        found.append(values(model, optimizer))
    assert same(*found)


def test_a_part_whose_state_could_not_be_stored_is_an_error_at_each_use(tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    model, optimizer = training(folder=tmp_path)
    backward(model, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Parts, "write", functools.partialmethod(fail))
        with pytest.raises(StorageError, match="cannot be completed"):
            optimizer.step()
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot be completed"):
            model(batch(2))


def fail(self, *args):
    """A tier that is full, and cannot be read."""
    raise StorageError("no room, and no bytes")
