"""Nothing keeps weights, or what holds them, longer than a run in memory would."""

import gc
import weakref

import pytest
import torch
from torch import nn

from hf_offload.state.optimizer import streaming_of
from hf_offload.state.registry import _parked, parked_of
from hf_offload.state.units import units_of
from tests.helpers.parked import in_memory, parked


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64))


@pytest.mark.parametrize("with_backward", [False, True])
def test_files_go_with_the_model_although_weights_were_in_memory(tmp_path, with_backward):
    known = len(_parked)
    model = _model()
    session = parked(model, tmp_path)
    result = model(torch.randn(3, 64)).sum()
    if with_backward:
        result.backward()
    assert len(_parked) > known
    store = weakref.ref(session.residency.store)
    del model, session, result
    gc.collect()
    assert store() is None
    assert len(_parked) <= known


def test_the_last_weight_that_backward_asks_for_may_leave_when_it_is_over(tmp_path):
    model = _model()
    session = parked(model, tmp_path)
    inputs = torch.randn(3, 64, requires_grad=True)
    model(inputs).sum().backward()
    assert all(unit.pin_count == 0 for unit in units_of(model).units)
    assert in_memory(session)


def test_backward_that_fails_does_not_keep_the_next_one_from_asking(tmp_path):
    model = _model()
    parked(model, tmp_path)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("once")

    result = model[0](torch.randn(3, 64, requires_grad=True))
    handle = result.register_hook(fail)
    loss = model[2](model[1](result)).sum()
    with pytest.raises(ValueError, match="once"):
        loss.backward()
    handle.remove()
    model(torch.randn(3, 64)).sum().backward()
    assert all(unit.pin_count == 0 for unit in units_of(model).units)


@pytest.mark.parametrize("part_bytes", [None, 4096])
def test_memory_of_gradients_and_state_goes_without_the_garbage_collector(tmp_path, part_bytes, no_collections):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    session = parked(model, tmp_path, optimizer="ssd")
    optimizer = session.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    session.defer_updates()
    streaming_of(optimizer)._updates.part_bytes = part_bytes
    for _ in range(3):
        model(torch.randn(3, 64)).sum().backward()
        known = [weakref.ref(parked_of(one.grad)) for one in model.parameters()]
        optimizer.step()
        model(torch.randn(3, 64))
        optimizer.zero_grad()
        for store in (streaming_of(optimizer).gradient_store, streaming_of(optimizer).state_store):
            store.settle()
        assert [one() for one in known] == [None] * 4
    of_state = [one for parameter in model.parameters() for one in streaming_of(optimizer).state_tensors(parameter)]
    known = [weakref.ref(parked_of(one)) for one in of_state]
    assert len(known) == 4  # of two weights: biases are small
    of_state.clear()
    optimizer.state.clear()
    assert [one() for one in known] == [None] * 4


def test_a_model_whose_update_is_owed_goes_although_it_has_gradients(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    session = parked(model, tmp_path, optimizer="ssd")
    optimizer = session.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    session.defer_updates()
    for _ in range(2):
        model(torch.randn(3, 64)).sum().backward()
        optimizer.step()
    assert all(streaming_of(optimizer).streamed_of(one).update is not None for one in model.parameters())
    weights = [weakref.ref(one) for one in model.parameters()]
    del model, session, optimizer
    gc.collect()
    assert [one() for one in weights] == [None] * 4
