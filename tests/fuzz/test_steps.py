"""A few random programs of training steps; ``python -m tests.fuzz.steps`` runs as many as asked."""

import pytest
import torch

from tests.fuzz.steps import ACTIONS, check, run
from tests.helpers.seed_search import attempt


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_steps_have_the_bits_of_torch_optim():
    """What the programs move, and do without an error, is worth their name."""
    moved, cut, done = 0, 0, set()
    for seed in range(30):
        problems, player = check(seed)
        assert problems == [], f"python -m tests.fuzz.steps --seed {seed}"
        moved += player.written_bytes > 0
        cut += player.cut_weights > 0
        done |= {entry[0] for entry in player.log if isinstance(entry, tuple)}
    assert moved > 15
    assert cut >= 5
    assert done == set(ACTIONS)


@pytest.mark.parametrize("first", [pytest.param(first, marks=pytest.mark.full) for first in range(0, 10_000, 1000)])
def test_programs_from_seeds(first):
    found = {seed: problems for seed in range(first, first + 1000) if (problems := attempt(run, seed))}
    assert not found, f"python -m tests.fuzz.steps --seed {min(found)}: {found[min(found)]}"
