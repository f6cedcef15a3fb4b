"""A few random models whose weights are on a tier; ``python -m tests.fuzz.weights`` runs as many as asked."""

import itertools

import pytest

from tests.fuzz.weights import ACTIONS, check, run
from tests.helpers.crashing import Crashing
from tests.helpers.seed_search import LeftOut, failures

SEEDS = range(20, 40)


def test_losses_and_weights_are_those_of_a_run_in_memory():
    with Crashing(run) as guarded:
        found = {seed: problems for seed in SEEDS if (problems := failures(guarded(seed)))}
    assert not found, f"python -m tests.fuzz.weights --seed {min(found)}: {found[min(found)]}"


def test_a_seed_that_ends_its_process_has_failed():
    with Crashing(_crash) as guarded:
        assert "ended with" in guarded(0)[0]
        assert guarded(1) == []


def test_programs_are_worth_their_name():
    """Most of them read weights from a tier, and do what there is to do."""
    read, done = 0, set()
    for seed in SEEDS:
        _, player = check(seed)
        read += player.read_bytes > 0
        done |= {entry[0] for entry in player.log}
    assert read > len(SEEDS) / 4
    assert len(set(ACTIONS) - done) < 8


_numbers = itertools.count()


def _another_number(player, rng):
    return next(_numbers)


def test_a_program_that_memory_does_not_repeat_is_left_out(monkeypatch):
    monkeypatch.setitem(ACTIONS, "backward", (_another_number, 1000))
    problems, _ = check(20)
    assert problems
    assert not failures(problems)
    assert isinstance(problems[0], LeftOut)


@pytest.mark.parametrize("first", [pytest.param(first, marks=pytest.mark.full) for first in range(1000, 2000, 250)])
def test_programs_from_seeds(first):
    with Crashing(run) as guarded:
        found = {seed: problems for seed in range(first, first + 250) if (problems := failures(guarded(seed)))}
    assert not found, f"python -m tests.fuzz.weights --seed {min(found)}: {found[min(found)]}"


def _crash(seed: int) -> list[str]:
    if seed == 0:
        import os

        os.abort()
    return []
