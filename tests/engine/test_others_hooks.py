"""A model that is offloaded, and called where somebody else has hooks for what is saved: theirs see what they would see
without offloading. Activation checkpointing counts tensors, and one that it does not see shifts all that follow.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_offload import OffloadConfig, attach

WIDTH, ROWS, STEPS = 32, 16, 3
Model = Callable[[Tensor], Tensor]


def _saved_on_cpu(model: Model, hidden: Tensor) -> Tensor:
    with save_on_cpu():
        return model(hidden) * hidden


def _cloned(model: Model, hidden: Tensor) -> Tensor:
    with saved_tensors_hooks(Tensor.clone, lambda tensor: tensor):
        return model(hidden) * hidden


WAYS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "nobody's": lambda model, hidden: model(hidden) * hidden,
    "the model alone": lambda model, hidden: checkpoint(model, hidden, use_reentrant=False),
    "more than the model": lambda model, hidden: checkpoint(lambda h: model(h) * h, hidden, use_reentrant=False),
    "before the model": lambda model, hidden: checkpoint(lambda h: model(h.sin() * h), hidden, use_reentrant=False),
    "twice": lambda model, hidden: checkpoint(lambda h: model(model(h)) * h, hidden, use_reentrant=False),
    "nested": lambda model, hidden: checkpoint(
        lambda h: checkpoint(model, h, use_reentrant=False) * h, hidden, use_reentrant=False
    ),
    "reentrant": lambda model, hidden: checkpoint(lambda h: model(h) * h, hidden, use_reentrant=True),
    "behind it": lambda model, hidden: checkpoint(lambda h: h.sin() * h, model(hidden), use_reentrant=False),
    "saved on the CPU": _saved_on_cpu,
    "cloned": _cloned,
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.SiLU())


def found(way: Callable[[Model, Tensor], Tensor], model: nn.Module, end_step: Callable[[], None] = lambda: None):
    results = []
    for step in range(STEPS):
        torch.manual_seed(step)
        hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
        way(model, hidden).sum().backward()
        results += [hidden.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        end_step()
    return results


# Each way with and without recompute, and on every other tier.
TABLE = [
    (way, *row) for way, tier in zip(WAYS, itertools.cycle(("ram", "auto"))) for row in (("ssd", None), (tier, "exact"))
]


@pytest.mark.parametrize(("way", "tier", "lean"), TABLE)
def test_others_hooks_see_what_they_would_see_without_offloading(way, tier, lean, tmp_path, machine_with_drive):
    machine_with_drive(1e9)
    expected = found(WAYS[way], network())
    model = network()
    where = {} if tier == "ram" else {"directory": tmp_path}
    session = attach(model, OffloadConfig(tier=tier, min_bytes=0, recompute_elementwise=lean, **where))
    assert all(map(torch.equal, expected, found(WAYS[way], model, session.end_step)))
    if way == "nobody's":
        assert session.stats.total.offloaded_bytes > 0
    session.detach()


def test_a_model_in_another_one_has_hooks_of_its_own(tmp_path):
    """Those of the outer one are ours, too."""
    inner = network()
    outer = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH))
    sessions = [attach(model, OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0)) for model in (outer, inner)]
    outer(torch.randn(ROWS, WIDTH)).sum().backward()
    assert all(session.stats.total.offloaded_bytes > 0 for session in sessions)
    for session in sessions:
        session.detach()
