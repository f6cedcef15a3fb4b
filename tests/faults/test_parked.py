"""Storages whose writes fail once or are overtaken, and whose memory others hold: what comes back are the last bytes."""

import gc
import itertools

import pytest
import torch

from hf_offload.state.optimizer import streaming_of
from hf_offload.state.parked import Where
from hf_offload.state.registry import before_user_code, parked_of
from tests.faults.failing_calls import EIO, Faults, Hang
from tests.helpers.parked import let_weights_leave, parked
from tests.helpers.train import Run, adamw, assert_same, batch, mlp, stream_in_parts, train


def logs(tmp_path, action, **options):
    """Of the same training in memory and with state on a drive, to which ``action`` does something before each step."""
    found = []
    for run in (Run("none", tmp_path), Run("ssd", tmp_path)):
        model = mlp()
        optimizer = adamw(run, model, **options)
        train(run, model, optimizer, steps=5, before=lambda number: action(run, model, optimizer, number))  # noqa: B023
        run.log_all(model, optimizer)
        found.append(run.logged)
    return found


def test_a_part_that_could_not_be_written_once_is_that_of_the_last_update(tmp_path, monkeypatch):
    """A drive that fails for a moment, such as a network's."""
    stream_in_parts(monkeypatch)
    faults = []

    def fail_in_the_third_step(run, model, optimizer, number):
        streaming = streaming_of(optimizer)
        if streaming is not None and number in (2, 3):
            streaming.state_store.settle()
            faults.append(Faults(monkeypatch, "write_once", EIO, range(4) if number == 2 else ()))

    assert_same(*reversed(logs(tmp_path, fail_in_the_third_step)))
    assert faults[0].failed > 0


def test_a_fused_step_as_a_whole_of_state_that_was_made_in_parts_is_not_lost(tmp_path, monkeypatch):
    """Fused steps count no change of the state, and who holds a gradient (to log its norm) keeps it from being cut."""
    stream_in_parts(monkeypatch)
    held = []

    def hold(run, model, optimizer, number):
        held[:] = [p.grad.detach() for p in model.parameters()] if number == 2 else []

    assert_same(*reversed(logs(tmp_path, hold, fused=True)))


@pytest.mark.parametrize("comes_back", [False, True])
def test_values_that_were_swapped_during_a_write_come_back(comes_back, tmp_path, monkeypatch):
    """As by an average of weights, for an evaluation: written to by ``.data``, which no version counts, and put back."""
    model = mlp()
    session = parked(model, tmp_path)
    weight = next(model.parameters())
    moved = parked_of(weight)
    moved.come()
    weight.data.mul_(2)
    before = weight.detach().clone()
    session.residency.store.settle()
    hang = Hang(monkeypatch, "write_once")
    moved.leave()
    assert moved.where is Where.LEAVING
    assert hang.inside.wait(60)
    if comes_back:
        moved.come()
    before_user_code()  # code of the user runs
    with torch.no_grad():
        weight.data.zero_()
        hang.end()
        moved._write.result(60)
        weight.data.copy_(before)
    let_weights_leave(session)
    assert moved.is_away
    assert torch.equal(weight, before)


def test_clipping_shows_where_others_hold_a_gradient(tmp_path):
    """As in memory, where an alias is the gradient."""
    found = []
    for run in (Run("none", tmp_path), Run("ssd", tmp_path)):
        model = mlp()
        optimizer = adamw(run, model)
        streaming = streaming_of(optimizer)
        model(batch(0)).square().mean().backward()
        if streaming is not None:
            streaming.gradient_store.settle()
        aliases = [parameter.grad.detach() for parameter in model.parameters()]
        run.log(run.clip(model, 1e-4), aliases)
        found.append(run.logged)
    assert_same(*reversed(found))


def test_a_clipped_gradient_that_was_read_is_in_no_write_as_the_user_writes_to_it(tmp_path):
    """To log its norm, and to scale it by ``.data``, which no version counts."""
    run, model = Run("ssd", tmp_path), mlp()
    optimizer = adamw(run, model)
    model(batch(0)).square().mean().backward()
    streaming_of(optimizer).gradient_store.settle()
    run.clip(model, 1e-4)
    for parameter in model.parameters():
        if (moved := parked_of(parameter.grad)) is not None:
            parameter.grad.norm()
            assert moved.is_away


def test_the_end_of_one_write_is_not_taken_for_that_of_another(tmp_path, monkeypatch):
    """It came back before it was written, has changed, and leaves again: nobody waits for the drive."""
    model = mlp()
    session = parked(model, tmp_path)
    let_weights_leave(session)
    weight, store = next(model.parameters()), session.residency.store
    moved = parked_of(weight)
    with torch.no_grad():
        for _ in range(2):
            moved.come()
            weight.add_(1)
            moved.leave()
            if hang := getattr(store, "hang", None):
                assert hang.inside.wait(60)
            else:
                moved.come()
                weight.add_(1)
                moved.wait_until_written()
                store.hang = Hang(monkeypatch, "write_once")
    store.collect()  # the first write has ended, the second has not
    assert moved.where is Where.LEAVING
    store.hang.end()
    store.settle()
    assert moved.is_away


def test_weights_that_were_replaced_take_no_memory(tmp_path):
    """By ``.data = ...``, as when a checkpoint is loaded by hand, and by another head."""
    model = mlp()
    session = parked(model, tmp_path)
    weights = session.residency
    for _ in range(3):
        for parameter in model.parameters():
            parameter.data = parameter.detach().clone()
        model(batch(0))
    let_weights_leave(session)
    assert len(weights._parked) == len(weights.weights()) <= 6
    model[4] = torch.nn.Linear(160, 96)
    session.detach()
    gc.collect()
    again = parked(model, tmp_path)
    of_units = set(itertools.chain.from_iterable(unit.weights for unit in again.residency._units.units))
    assert of_units == set(again.residency.weights())


def test_a_thread_that_reads_a_weight_leaves_that_of_another_s_forward_in_memory(tmp_path):
    model = mlp()
    session = parked(model, tmp_path)
    units, weight = session.residency._units, next(model.parameters())
    unit = units.unit_of(weight)
    with units.using([unit]):
        units.complete(unit)
        assert unit.is_here


def test_weights_that_are_read_ahead_do_not_overtake_those_that_are_used_before(tmp_path, monkeypatch):
    """Urgent reads come before all others, the last one first."""
    model = mlp()
    session = parked(model, tmp_path)
    reads = []
    own = session.residency.store.tier.read
    monkeypatch.setattr(
        session.residency.store.tier,
        "read",
        lambda slot, into, urgent, begin: (reads.append(urgent), own(slot, into, urgent, begin))[1],
    )
    session.residency.limit_bytes = 150 << 10
    for _ in range(3):
        model(batch(0))
    assert False in reads
