"""Which weights are in memory, which are read ahead, and whose memory a weight has while the drive still writes it."""

import pytest
import torch
from torch import nn

from hf_offload.state.contexts import outside
from hf_offload.state.order import UseOrder
from tests.faults.failing_calls import Hang
from tests.helpers.parked import in_memory, leave_memory, parked

WIDTH = 136
NBYTES = 4 * WIDTH * WIDTH  # enough for its buffer to be used again


def layers(count=6):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])


@pytest.fixture
def chain(tmp_path):
    model = layers()
    session = parked(model, tmp_path)
    return model, session, session.residency.store, session.residency.weights()


def use_all(model):
    with torch.no_grad():
        model(torch.ones(1, WIDTH))


def reading(session):
    """Names of what is on its way to memory, or there."""
    return {weight.name for weight in session.residency.weights() if weight._stored and weight._stored._read}


def test_the_order_of_uses_is_learned():
    order = UseOrder(4)
    for number in [0, 1, 2, 1, 0, 3] * 2:
        order.used(number)
    order.used(0)
    assert order.coming()[:3] == [1, 2, 1]
    for number in [1, 2, 1]:
        order.used(number)
    assert order.coming()[:2] == [0, 3]
    order.used(0)
    order.used(1)  # not 3: as after the first 0, and not as after 2
    assert order.coming()[:3] == [2, 1, 0]


def test_what_comes_next_is_read_ahead_and_no_more_than_the_window_has_room_for(chain):
    model, session, store, _ = chain
    store.window_bytes = 4 * NBYTES
    use_all(model)
    use_all(model)
    leave_memory(session)
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda *_: seen.append(sum(each.nbytes for each in store._reading)))
    with torch.no_grad():
        model[0](torch.ones(1, WIDTH))
    assert reading(session) == {"1.weight", "2.weight"}
    use_all(model)
    assert max(seen) == 2 * NBYTES


def test_weights_that_are_used_last_leave_first(chain):
    model, session, _, _ = chain
    session.residency.limit_bytes = 3 * NBYTES
    for _ in range(3):
        use_all(model)
    with torch.no_grad():
        model[0](torch.ones(1, WIDTH))
        model[1](torch.ones(1, WIDTH))
        model[2](torch.ones(1, WIDTH))
        model[3](torch.ones(1, WIDTH))
    # 2 was used before 3, and is farther away than 0 only where the order is known: 4, 5, 0, 1, 2, 3.
    assert "3.weight" in in_memory(session)
    assert in_memory(session) & {"0.weight", "1.weight"}
    assert "2.weight" not in in_memory(session)


def come(weight):
    weight.enter()
    weight.leave()


def go(weight, store):
    with weight.residency._lock, outside():
        weight.send(store)


@pytest.fixture
def written(chain, monkeypatch):
    """A weight that was changed, and has come back while the drive writes it: with its value, and the drive that waits."""
    model, session, store, weights = chain
    store.window_bytes = 64 << 20  # room for buffers that are kept for others
    expected = model[0].weight.detach().clone() + 1
    leave_memory(session)
    session.residency.limit_bytes = 1 << 30
    come(weights[0])
    with torch.no_grad():
        model[0].weight.add_(1)
    hang = Hang(monkeypatch, "write_once")
    try:
        go(weights[0], store)
        assert hang.inside.wait(60)
        come(weights[0])
        yield model[0].weight, weights[0], store, expected, hang
    finally:
        hang.end()


def test_memory_that_comes_back_while_the_drive_writes_it_is_the_weights_own(written):
    parameter, _, store, expected, hang = written
    phase = parameter.data_ptr() % 4096
    hang.end()
    store.settle()
    store.new_buffer(NBYTES, phase).fill_(0xFF)
    assert torch.equal(parameter.detach(), expected)


def test_memory_that_was_looked_at_while_the_drive_writes_it_is_kept_until_it_is_written(written):
    parameter, weight, store, expected, hang = written
    phase = weight._buffer.data_ptr() % 4096
    go(weight, store)
    store.new_buffer(NBYTES, phase).fill_(0xFF)
    hang.end()
    store.settle()
    assert not weight.is_in_memory
    assert torch.equal(parameter.detach(), expected)
