"""Under autocast, copies of weights that leave memory go, too, and nothing changes by a bit."""

import pytest
import torch
from torch import nn

from hf_offload.parameters.casts import _CASTS, copy_of
from hf_offload.state.contexts import outside
from tests.helpers.parked import parked


class Repeated(nn.Module):
    """Uses one weight three times, another one once, and a third one only in the end."""

    def __init__(self):
        super().__init__()
        self.shared, self.once, self.last = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        x = self.shared(x).relu()
        x = self.once(x) + self.shared(x)
        with torch.no_grad():  # autocast takes the copy here, too
            y = self.shared(x)
        return self.last(x + y) @ self.shared.weight.t()


def run(folder, frozen=(), checkpointed=False, offloaded=True, steps=3):
    torch.manual_seed(0)
    model = Repeated()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if offloaded:
        parked(model, folder)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                x = torch.randn(8, 64, requires_grad=True)
                if checkpointed:
                    y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
                else:
                    y = model(x)
                loss = y.float().square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("frozen", [(), ("shared.weight", "once.weight")], ids=["trained", "frozen"])
def test_weights_under_autocast_have_the_bits_of_the_run_in_memory(tmp_path, frozen, checkpointed):
    plain = run(tmp_path, frozen, checkpointed, offloaded=False)
    offloaded = run(tmp_path, frozen, checkpointed)
    assert len(plain) == len(offloaded)
    assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))


def test_the_copy_of_a_weight_has_no_memory_between_two_uses(tmp_path):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    parked(model, tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.randn(2, 64, requires_grad=True))
        copies = [copy_of(layer.weight) for layer in model]
        assert [copy.dtype for copy in copies] == [torch.bfloat16] * 3
        assert [copy.untyped_storage().nbytes() for copy in copies] == [0] * 3
        model(torch.randn(2, 64, requires_grad=True))
        assert [copy_of(layer.weight) is copy for layer, copy in zip(model, copies, strict=True)] == [True] * 3
    del copies
    assert [copy_of(layer.weight) for layer in model] == [None] * 3, "the graph holds a copy"
    output.float().sum().backward()


def change(weight):
    with torch.no_grad():
        weight.mul_(2)


def change_data(weight):
    weight.data.mul_(2)  # the weight's version stays


def change_array(weight):
    weight.detach().numpy()[:] *= 2


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("changes", [change, change_data, change_array])
def test_a_weight_that_is_changed_inside_of_autocast_is_used_with_its_former_value_as_in_memory(
    tmp_path, needs_gradient, changes
):
    def outputs(offloaded):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        if offloaded:
            parked(model, tmp_path)
        found = []
        with torch.autocast("cpu", torch.bfloat16):
            for needs in (needs_gradient, True, True):
                x = torch.randn(2, 64, requires_grad=needs)
                output = model(x)
                output.float().square().sum().backward()
                found += [output.detach(), x.grad if needs else x]
                changes(model.weight)
        return found

    assert all(torch.equal(one, other) for one, other in zip(outputs(False), outputs(True), strict=True))


def test_a_copy_that_is_held_keeps_its_memory(tmp_path):
    model = nn.Linear(64, 64)
    parked(model, tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.randn(2, 64, requires_grad=True))
        held = [node for node, _ in output.grad_fn.next_functions if node is not None]
        copy = model.weight.to(torch.bfloat16)
        torch.nn.functional.linear(torch.randn(2, 64, requires_grad=True), copy).float().sum().backward()
    assert held
    assert torch.equal(copy, model.weight.detach().to(torch.bfloat16))


def renorm(weight):
    torch.nn.functional.embedding(torch.tensor([1]), weight, max_norm=0.1)


def step(weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.1).step()


def replace(weight):
    weight.data = weight.data * 2


def change_later(weight):
    weight.grad = None
    held = weight.detach()
    weight.sum()
    held.mul_(2)


CHANGES = {
    "in place": change,
    "data": change_data,
    "array": change_array,
    "out": lambda weight: torch.mul(weight.detach(), 2, out=weight.data),
    "foreach": lambda weight: torch._foreach_mul_([weight.data], 2),
    "item": lambda weight: weight.data.__setitem__(0, 1),
    "renormalised": renorm,
    "step": step,
    "other memory": replace,
    "held": change_later,
    "storage": lambda weight: weight.untyped_storage().fill_(0),
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_backward_after_a_change_uses_the_former_copy_as_in_memory(tmp_path, changes):
    def gradients(offloaded):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        session = parked(model, tmp_path) if offloaded else None
        x = torch.randn(8, 64, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            model(x)  # another graph, which has gone
            loss = model(x).float().square().sum()
        for _ in range(2):
            for layer in model:
                changes(layer.weight)
            if session is not None:
                leave_memory_if_it_may(session)
            loss.backward(retain_graph=True)
        assert session is None or session.residency.store.tier.stats.read_bytes > 0
        return [x.grad, *[p.grad for p in model.parameters()], *[p.detach().clone() for p in model.parameters()]]

    assert all(torch.equal(one, other) for one, other in zip(gradients(False), gradients(True), strict=True))


def leave_memory_if_it_may(session):
    with session.residency._lock, outside():
        session.residency._make_room(0)
    session.residency.store.settle()


def test_an_update_on_the_tier_leaves_backward_the_former_copy(tmp_path):
    def gradients(offloaded):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if offloaded:
            session = parked(model, tmp_path, optimizer="ssd")
            optimizer = session.prepare_optimizer(optimizer)
        x = torch.randn(8, 64, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            losses = [model(x).float().square().sum() for _ in range(3)]
        for loss in losses:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [x.grad, *[p.detach().clone() for p in model.parameters()]]

    assert all(torch.equal(one, other) for one, other in zip(gradients(False), gradients(True), strict=True))


def test_no_copy_is_kept_as_long_as_nothing_changes(tmp_path):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    parked(model, tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        loss = sum(model(torch.randn(2, 64, requires_grad=True)).float().sum() for _ in range(2))
    for layer in model:
        assert layer.weight.sum() != 0
    assert [value.kept for layer in model for value in vars(layer.weight)[_CASTS].live_values()] == [None] * 3
    loss.backward()
    del loss
    assert [vars(layer.weight)[_CASTS].live_values() for layer in model] == [[]] * 3
