"""What the planner plays of weights of which a part is in memory."""

from hf_offload.plan.weight_transfers import Use, simulate_traffic


def uses_of(layers):
    """Those of a step: forward, in which each weight is updated, and backward."""
    forward = [Use(one, one, changes=True) for one in range(layers)]
    return forward + [Use(one, 2 * layers - 1 - one) for one in reversed(range(layers))]


def test_what_comes_next_is_read_into_the_memory_of_what_is_used_last():
    """Of four weights, two are in memory. Forward ends with the last two, and backward with the first two."""
    later, earlier = (simulate_traffic(uses_of(4), [1] * 4, limit_bytes=2, ahead_bytes=ahead) for ahead in (0, 1))
    assert later.read == earlier.read == ((2, 2), (3, 3), (6, 1), (7, 0))
    assert later.written == ((2, 0), (3, 1), (6, 3), (7, 2))
    assert earlier.written == ((0, 0), (2, 1), (4, 3), (6, 2))  # to make room while another computes
    assert set(later.held_bytes) == set(earlier.held_bytes) == {2}


def test_weights_that_all_fit_do_not_move():
    moved = simulate_traffic(uses_of(4), [1] * 4, limit_bytes=4, ahead_bytes=1)
    assert (moved.read, moved.written) == ((), ())
    assert set(moved.held_bytes) == {4}
