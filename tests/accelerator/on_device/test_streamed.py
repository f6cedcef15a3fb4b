"""Optimizer state and gradients that leave the device: steps are computed there, with the bits of the run that keeps them."""

import gc
import itertools

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, attach
from hf_offload.state.optimizer import streaming_of
from tests.accelerator.on_device.training import Case, batch, build
from tests.helpers.tables import rows

pytestmark = pytest.mark.usefixtures("nothing_stays_behind")
STEPS = 4


def trained(case, place, tier="none", clip=True, fused=False):
    model = build(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    session = attach(model, OffloadConfig(tier=tier, optimizer=place, min_bytes=0))
    session.prepare_optimizer(optimizer)
    torch.manual_seed(7)
    found = []
    for step in range(STEPS):
        for micro in range(case.accumulation):
            loss = model(**batch(case, 10 * step + micro)).loss
            loss.backward()
            found.append(loss.detach().cpu())
            del loss
        if clip:
            found.append(session.clip_grad_norm_(0.5).cpu())
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
    streaming = streaming_of(optimizer)
    if streaming is not None:
        streaming.finish()
        assert any(record.state_bytes for record in streaming.records)
        devices = {value.device.type for state in optimizer.state.values() for value in state.values() if value.dim()}
        assert devices <= {"late"}
    found += [parameter.detach().cpu() for parameter in model.parameters()]
    state = optimizer.state_dict()["state"]
    found += [value.cpu() for place in sorted(state) for _, value in sorted(state[place].items())]
    session.detach()
    return found


def assert_same(expected, found):
    assert len(expected) == len(found)
    assert [
        place for place, (one, other) in enumerate(zip(expected, found, strict=True)) if not torch.equal(one, other)
    ] == []


WAYS = list(itertools.product(("none", "ssd"), ("clipped", "accumulated"), ("ram", "ssd")))
# Every two of a tier, a way and a place.
QUICK = [
    ("none", "clipped", "ram"), ("none", "accumulated", "ssd"), ("ssd", "clipped", "ssd"), ("ssd", "accumulated", "ram"),
]  # fmt: skip


@pytest.mark.parametrize(("tier", "way", "place"), rows(WAYS, quick=QUICK))
def test_steps_on_the_device_have_the_same_bits(late, tier, way, place):
    clip, accumulation = {"clipped": (True, 1), "accumulated": (False, 2)}[way]
    case = Case(accumulation=accumulation)
    expected = trained(case, "none", clip=clip)
    gc.collect()
    for seed in range(3):
        late.reseed(seed)
        assert_same(expected, trained(case, place, tier=tier, clip=clip))
        gc.collect()


def test_state_leaves_the_device(late):
    model: nn.Module = build(Case())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    session = attach(model, OffloadConfig(tier="none", optimizer="ram", min_bytes=0))
    session.prepare_optimizer(optimizer)
    gc.collect()
    before = torch.accelerator.memory_allocated("late:0")
    for step in range(2):
        model(**batch(Case(), step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    streaming_of(optimizer).finish()
    gc.collect()
    assert torch.accelerator.memory_allocated("late:0") - before < weights / 4
    session.detach()
