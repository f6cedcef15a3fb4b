"""A few random programs of training steps; ``python -m tests.fuzz.steps`` runs as many as asked."""

import pytest

from tests.fuzz.steps import ACTIONS, check


@pytest.mark.usefixtures("one_thread")
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
