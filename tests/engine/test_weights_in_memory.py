"""Which weights are in memory, which are read ahead, and whose memory a weight has while the drive still writes it."""

import pytest
import torch
from torch import nn

from hf_offload.state.order import UseOrder
from hf_offload.state.registry import before_user_code
from hf_offload.storage.store import whole_pages
from tests.faults.failing_calls import Hang
from tests.helpers.parked import in_memory, leave_memory, parked

WIDTH = 136
NBYTES = whole_pages(4 * WIDTH * WIDTH)


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
    return {weight.name for weight in session.residency.weights() if weight.is_coming}


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


@pytest.mark.parametrize("units", [2, 4])
def test_what_comes_next_is_read_ahead_and_no_more_than_the_largest_unit(chain, units):
    model, session, store, _ = chain
    session.residency.limit_bytes = units * model[0].weight.nbytes
    use_all(model)
    use_all(model)
    leave_memory(session)
    names, nbytes = [], []
    for layer in model:
        layer.register_forward_hook(lambda *_: names.append(reading(session)))
        layer.register_forward_hook(lambda *_: nbytes.append(sum(store._reading.values())))
    use_all(model)
    assert names[0] == {"1.weight"}
    assert max(nbytes) == NBYTES


def test_weights_that_are_used_last_leave_first(chain):
    model, session, _, _ = chain
    session.residency.limit_bytes = 3 * model[0].weight.nbytes
    for _ in range(3):
        use_all(model)
    with torch.no_grad():
        for layer in model[:3]:
            layer(torch.ones(1, WIDTH))
    # 2 is in use, which 1 has left for: of the others, it is used last.
    assert in_memory(session) == {"0.weight", "2.weight", "4.weight"}


@pytest.fixture(params=["before", "after"])
def written(chain, monkeypatch, request):
    """A weight that was changed and leaves, and a drive that hangs before it writes the bytes, or after that."""
    model, session, store, weights = chain
    store.window_bytes = 64 << 20  # room for slabs that are kept for others
    leave_memory(session)
    session.residency.limit_bytes = 1 << 30
    weights[0].come()
    expected = model[0].weight.detach().clone() + 1
    with torch.no_grad():
        model[0].weight.add_(1)
    hang = Hang(monkeypatch, "write_once", done=request.param == "after")
    try:
        assert weights[0].leave()
        assert hang.inside.wait(60)
        yield model[0].weight, weights[0], store, expected, hang
    finally:
        hang.end()


def test_memory_that_leaves_is_the_weights_until_it_is_written(written):
    parameter, weight, store, expected, hang = written
    store.new_slab(NBYTES).content.fill_(0xFF)
    assert torch.equal(parameter.detach(), expected)
    hang.end()
    store.settle()
    store.new_slab(NBYTES).content.fill_(0xFF)
    assert weight.is_away
    assert torch.equal(parameter.detach(), expected)


def test_memory_that_comes_back_while_the_drive_writes_it_is_the_weights_own(written):
    parameter, weight, store, expected, hang = written
    weight.come()
    hang.end()
    store.settle()
    store.new_slab(NBYTES).content.fill_(0xFF)
    assert weight.is_here
    assert torch.equal(parameter.detach(), expected)


def test_memory_that_is_written_to_while_it_leaves_stays(written):
    parameter, _, store, expected, hang = written
    with torch.no_grad():
        parameter.add_(1)
    hang.end()
    store.settle()
    assert torch.equal(parameter.detach(), expected + 1)


@pytest.mark.parametrize("then", ["stays", "leaves"])
def test_code_of_the_user_writes_without_a_new_version_to_what_is_being_written(written, then):
    parameter, weight, store, expected, hang = written
    before_user_code()
    parameter.data.add_(1)
    hang.end()
    store.settle()
    if then == "leaves":
        assert weight.leave()
        store.settle()
        assert weight.is_away
    assert torch.equal(parameter.detach(), expected + 1)


def test_code_of_the_user_writes_to_what_was_read_ahead(chain):
    model, session, _, weights = chain
    leave_memory(session)
    expected = model[0].weight.detach() + 1
    assert weights[0].read_ahead()
    assert reading(session) == {"0.weight"}
    weights[0].reads._begun[0, weights[0].nbytes][1].result()  # it has the bytes of before
    before_user_code()
    model[0].weight.data.add_(1)
    weights[0].come()
    assert torch.equal(model[0].weight.detach(), expected)


def test_code_of_the_user_writes_between_modules_that_it_calls(chain, monkeypatch):
    model, _, store, _ = chain
    store.window_bytes = 64 << 20  # no call waits for the drive
    inputs = torch.ones(1, WIDTH)
    for _ in range(2):
        use_all(model)
    with torch.no_grad():
        model[0](inputs)
        model[0].weight.mul_(2)
        hang = Hang(monkeypatch, "write_once", done=True)
        model[1](inputs)  # for which the first one leaves
        for layer in model:
            layer.weight.data.fill_(3)
        hang.end()
        store.settle()
        assert all((layer(inputs) == 3 * WIDTH).all() for layer in model)
