"""Budgets are kept in every step after the first, as a meter of the allocator's own calls sees it."""

import shutil
import sys

import pytest

from tests.budgets.__main__ import run_metered

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="the meter is compiled, and there is no C compiler"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the meter is preloaded as on Linux"),
]


@pytest.mark.parametrize(
    "arguments",
    [
        "--models opt --scenarios plain --shares 0.5",  # two units save one storage
        "--models vit --scenarios gradients_stay --shares 0.5",
    ],
)
def test_a_budget_is_kept(arguments):
    assert run_metered(arguments.split()).returncode == 0


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_every_budget_of_every_architecture_is_kept():
    assert run_metered([]).returncode == 0
