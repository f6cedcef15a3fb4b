"""Losses, gradients and weights of every architecture are the same bits on an accelerator, whatever its streams do first."""

import pytest

from tests.accelerator.on_device.training import EVERY_TIER, TIERS, Case, assert_exact
from tests.helpers.tiny_models import NAMES

pytestmark = pytest.mark.usefixtures("nothing_stays_behind")


@pytest.mark.parametrize("tier", EVERY_TIER)
@pytest.mark.parametrize("name", [*(name for name in NAMES if name != "gpt2"), "whisper"])
def test_models(late, name, tier):
    assert_exact(late, Case(name=name), **TIERS[tier])
