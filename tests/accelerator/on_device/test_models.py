"""Whatever the architecture, the tier and the way to train, all bits are the same on an accelerator."""

import pytest

from tests.accelerator.on_device.training import EVERY_TIER, TIERS, Case, assert_exact
from tests.helpers.tiny_models import NAMES

pytestmark = pytest.mark.usefixtures("nothing_stays_behind")


@pytest.mark.parametrize("tier", EVERY_TIER)
@pytest.mark.parametrize("name", [*(name for name in NAMES if name != "gpt2"), "whisper"])
def test_models(late, name, tier):
    assert_exact(late, Case(name=name), range(1), **TIERS[tier])


@pytest.mark.parametrize("tier", TIERS)
def test_tiers(late, tier):
    assert_exact(late, Case(), **TIERS[tier])


@pytest.mark.parametrize("tier", EVERY_TIER)
@pytest.mark.parametrize(
    "case",
    [
        Case(accumulation=3),
        Case(checkpointing="reentrant"),
        Case(checkpointing="non-reentrant"),
        Case(retain_graph=True),
        Case(own_stream=True),
        Case(device="late:1"),
    ],
    ids=["accumulation", "reentrant", "non-reentrant", "retain_graph", "own_stream", "second_device"],
)
def test_ways_to_train(late, case, tier):
    assert_exact(late, case, range(1), **TIERS[tier])


@pytest.mark.parametrize("tier", ["ssd", "spill"])
def test_what_goes_in_chunks(late, tier, monkeypatch):
    """Records of a few pages each, in chunks of one, through a ring that has room for some of them."""
    monkeypatch.setattr("hf_offload.plan.rules._CHUNK_BYTES", 4096)
    monkeypatch.setattr("hf_offload.plan.rules.RING_BYTES", 32 << 10)
    assert_exact(late, Case(), range(2), **TIERS[tier])


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_two_thousand_seeds(late, first):
    for index, tier in enumerate(("ram", "ssd", "spill")):
        assert_exact(late, Case(name="llama"), range(first + index, first + 100, 3), **TIERS[tier])
