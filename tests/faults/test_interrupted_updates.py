"""Updates that are broken off: each is computed once, with the gradient of its step, and goes where there is room."""

import errno
import functools

import pytest
import torch
from torch import nn

from hf_offload import StorageError
from hf_offload.state.optimizer import streaming_of
from hf_offload.state.parts import Parts
from hf_offload.state.shadow import Shadow
from hf_offload.state.update import UpdateComputer
from tests.faults.failing_calls import Faults
from tests.helpers.train import Run, assert_same, batch, mlp, same, stream_in_parts


def begun(place="ssd", folder=None, **settings):
    """A model whose optimizer has made one step, so that there is state."""
    run, model = Run(place, folder, defers=False, **settings), mlp()
    optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    backward(model, 0)
    optimizer.step()
    return model, optimizer


def backward(model, number):
    model.zero_grad()
    model(batch(number)).square().mean().backward()


def values(model, optimizer):
    return [model.state_dict(), optimizer.state_dict()["state"]]


@pytest.fixture
def two_steps():
    """The values after two steps in memory."""
    model, optimizer = begun("none")
    backward(model, 1)
    optimizer.step()
    return values(model, optimizer)


@pytest.mark.parametrize("parts", [False, True])
def test_an_interrupt_while_the_state_leaves_steps_no_weight_twice(parts, two_steps, tmp_path, monkeypatch):
    if parts:
        stream_in_parts(monkeypatch)
    model, optimizer = begun(folder=tmp_path)
    backward(model, 1)
    park, left = UpdateComputer.park, [1]

    def interrupted(self, *args):
        park(self, *args)
        if left and left.pop():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UpdateComputer, "park", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert_same(values(model, optimizer), two_steps)


def test_weights_that_are_loaded_after_a_step_that_failed_are_those_that_were_loaded(tmp_path, monkeypatch):
    model, optimizer = begun(folder=tmp_path)
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
    expected = values(*begun("none"))
    model, optimizer = begun(folder=tmp_path, disk_budget=64 << 10)
    assert streaming_of(optimizer).state_store.refusal is not None
    assert_same(values(model, optimizer), expected)


def test_parts_count_against_the_write_limit_as_what_is_written(tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    model, optimizer = begun(folder=tmp_path)
    for number in range(1, 3):
        backward(model, number)
        optimizer.step()
    store = streaming_of(optimizer).state_store
    store.settle()
    tiers = {store.tier, streaming_of(optimizer).gradient_store.tier}
    limit = store.storage.disk_writes
    assert limit.taken_bytes <= 1.1 * sum(tier.stats.written_bytes for tier in tiers)


def gradient_is_added_to(run):
    """While the update waits for the next forward."""
    model = nn.Embedding(64, 64)
    nn.init.ones_(model.weight)
    optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.arange(64) % (step + 3)).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
    loss.backward()
    optimizer.step()
    run.log_all(model, optimizer)


def second_optimizer(run):
    model = mlp()
    optimizers = [
        run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1)),
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    ]
    for number in range(3):
        backward(model, number)
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        run.log_all(model, optimizer)


def clipping_after_a_step(run):
    model = mlp()
    optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for number in range(3):
        backward(model, number)
        optimizer.step()
        run.clip(model, 1e-3)
    run.log_all(model, optimizer)


@pytest.mark.parametrize("use", [gradient_is_added_to, second_optimizer, clipping_after_a_step])
def test_an_update_that_waits_is_of_its_own_step(use, tmp_path):
    runs = [Run("none", tmp_path), Run("ssd", tmp_path)]
    for run in runs:
        use(run)
    assert_same(runs[1].logged, runs[0].logged)


def test_an_array_of_a_gradient_that_is_leaving_keeps_its_values(tmp_path):
    model, optimizer = begun(folder=tmp_path)
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


def test_an_error_of_the_class_in_a_later_part_leaves_no_half_of_a_step(two_steps, tmp_path, monkeypatch):
    """As where an accelerator's memory is full for a moment: the rest of the step is computed with the next use."""
    stream_in_parts(monkeypatch)
    model, optimizer = begun(folder=tmp_path)
    backward(model, 1)
    own, calls = Shadow.step, []

    def failing(self, *args):
        calls.append(args)
        if len(calls) == 2:  # of the first weight
            raise torch.OutOfMemoryError("full")
        return own(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Shadow, "step", failing)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    streaming_of(optimizer).finish()
    assert_same(values(model, optimizer), two_steps)


def test_a_part_whose_state_could_not_be_stored_is_an_error_at_each_use(tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    model, optimizer = begun(folder=tmp_path)
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
