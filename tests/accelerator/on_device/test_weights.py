"""Weights that leave the device between uses: the bits of the run that keeps them there, whatever its streams do first."""

import gc
import itertools

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, OffloadSession, attach
from hf_offload.state.contexts import outside
from tests.accelerator.on_device.training import Case, batch, build
from tests.helpers.tables import rows
from tests.helpers.tiny_models import NAMES

pytestmark = pytest.mark.usefixtures("nothing_stays_behind")
STEPS = 3
SETTINGS = {
    "ram": {"params": "ram"},
    "ssd": {"params": "ssd"},
    "all": {"params": "ssd", "optimizer": "ssd", "tier": "ssd"},
}
# Every model and every setting, and for each pair of them a test among the slow ones.
SAMPLE = set(zip([*NAMES, "whisper"], itertools.cycle(SETTINGS), strict=False))
PAIRS = [
    pytest.param(*pair, marks=() if pair in SAMPLE else pytest.mark.full)
    for pair in itertools.product([*NAMES, "whisper"], SETTINGS)
]


def park(model: nn.Module, **settings: str) -> OffloadSession:
    session = attach(model, OffloadConfig(min_bytes=0, **{"tier": "none"} | settings))
    if session.residency is not None:
        session.residency.limit_bytes = 1
    return session


def trained(case: Case, frozen: bool = False, **settings: str) -> list[torch.Tensor]:
    model = build(case)
    if frozen:
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(number % 3 == 0)
    session = park(model, **settings)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=False)
    session.prepare_optimizer(optimizer)
    torch.manual_seed(7)
    found = []
    for step in range(STEPS):
        for micro in range(case.accumulation):
            loss = model(**batch(case, 10 * step + micro)).loss
            loss.backward()
            found.append(loss.detach().cpu())
            del loss
        found.append(session.clip_grad_norm_(0.5).cpu())
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
    if settings:
        assert session.residency.store.tier.stats.read_bytes > 0
    with torch.no_grad():
        found += [parameter.detach().cpu() for parameter in model.parameters()]
    session.detach()
    return found


def assert_same(expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    assert len(expected) == len(found)
    assert [place for place, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)] == []


@pytest.mark.parametrize(("name", "settings"), PAIRS)
def test_every_architecture_has_the_same_bits(late, name, settings):
    case = Case(name=name)
    expected = trained(case)
    for seed in range(2):
        gc.collect()
        late.reseed(seed)
        assert_same(expected, trained(case, **SETTINGS[settings]))
    gc.collect()


RECOMPUTED = list(itertools.product((False, True), (None, "reentrant", "not reentrant")))


@pytest.mark.parametrize(("frozen", "checkpointing"), rows(RECOMPUTED, quick=RECOMPUTED[::2]))
def test_frozen_weights_accumulation_and_recomputation_have_the_same_bits(late, frozen, checkpointing):
    case = Case(name="llama", accumulation=2, checkpointing=checkpointing)
    expected = trained(case, frozen)
    for seed, settings in enumerate(SETTINGS.values()):
        gc.collect()
        late.reseed(seed)
        assert_same(expected, trained(case, frozen, **settings))
    gc.collect()


def test_weights_leave_the_device(late):
    model = build(Case())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    gc.collect()
    before = torch.accelerator.memory_allocated("late:0")
    session = park(model, params="ram")
    residency = session.residency
    with torch.no_grad():
        model(**batch(Case(), 0))
    with residency._lock, outside():
        residency._make_room(0)
    gc.collect()
    assert before - torch.accelerator.memory_allocated("late:0") > 0.9 * weights
    session.detach()
