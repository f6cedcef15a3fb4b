"""A few random trainings that break off; ``python -m tests.fuzz.broken_steps`` runs as many as asked."""

import pytest

from tests.fuzz.broken_steps import Program, run
from tests.helpers.seed_search import attempt, failures


@pytest.fixture(autouse=True)
def known_machine(machine_with_drive):
    """Plans do not depend on how busy the machine is."""
    machine_with_drive(1e9)


def test_trainings_that_break_off_have_the_bits_of_those_in_memory_and_stay_within_their_budgets():
    places = set()
    for seed in range(4):
        assert failures(run(seed)) == [], f"python -m tests.fuzz.broken_steps --seed {seed}"
        places |= {(one.then, one.error) for one in Program.random(seed).breaks.values()}
    assert len(places) >= 4  # of six


@pytest.mark.parametrize("first", [pytest.param(first, marks=pytest.mark.full) for first in range(0, 400, 100)])
def test_trainings_from_seeds(first):
    found = {seed: found for seed in range(first, first + 100) if (found := failures(attempt(run, seed)))}
    assert not found, f"python -m tests.fuzz.broken_steps --seed {min(found)}: {found[min(found)]}"
