"""Reading ahead: in the order that was learned, no further than a window, and what is needed at once does not leave."""

import pytest
import torch

from tests.helpers.controlled_tier import Rig, leaf, sines


def test_backward_reads_ahead_and_learns_the_order_it_really_has():
    x = leaf(64, 64)

    def odd_order(x):
        # The branch that is packed last is needed last: reverse packing order is wrong here.
        early, late = x * 2, x * 3
        return sines(early, 6), sines(late, 6)

    rig = Rig(read_ahead_bytes=3 * 64 * 64 * 4)
    urgent = []
    for _ in range(2):
        rig.tier.started.clear()
        with rig:
            a, b = odd_order(x)
        rig.settle()
        a.backward()
        b.backward()
        urgent.append(rig.tier.started.count("urgent"))
        del a, b
    assert "ahead" in rig.tier.started
    assert urgent == [2, 0]  # the first of each branch; once the order is known, what comes first does not even leave
    rig.assert_nothing_left()


def test_what_backward_asks_for_at_once_does_not_leave():
    rig = Rig(read_ahead_bytes=3 * 64 * 64 * 4)
    x = leaf(64, 64)
    written = []
    for _ in range(3):
        with rig:
            y = sines(x, 20)
        rig.settle()
        written.append(rig.tier.stats.written_bytes)
        y.backward()
        del y
    one = x.nbytes
    assert written == [20 * one, 37 * one, 54 * one]  # the first step had nothing to go by
    assert rig.stats.offloaded_bytes == 60 * one
    assert rig.stats.forwarded_bytes >= 6 * one
    rig.assert_nothing_left()


def test_a_record_larger_than_the_window_is_read_ahead_alone():
    rig = Rig(read_ahead_bytes=64)
    x = leaf(64, 64)
    with rig:
        y = sines(x, 10)
    rig.settle()
    y.backward()
    assert rig.tier.started[:2] == ["urgent", "ahead"]


@pytest.mark.parametrize(("read_ahead_bytes", "records"), [(None, 6), (2 * 64 * 64 * 4, 2), (7 * 64 * 64 * 4, 7)])
def test_the_window_is_six_usual_records_unless_it_is_given(read_ahead_bytes, records):
    rig = Rig(read_ahead_bytes=read_ahead_bytes)
    x = leaf(64, 64)
    ahead = []
    with rig:
        y = sines(x, 20, lambda _: ahead.append(rig.transfer.ledger.own_bytes))
    rig.settle()
    y.backward()
    assert max(ahead) == records * x.nbytes


def test_a_window_of_records_that_are_still_leaving_keeps_them_all():
    """They are in memory in any case: writing them would only cost the disk."""
    rig = Rig(read_ahead_bytes=3 * 64 * 64 * 4)
    x = leaf(64, 64)
    kept = []
    rig.tier.write_gate.clear()
    with rig:
        y = sines(x, 4, lambda _: kept.append(rig.stats.forwarded_bytes))
    y.backward()
    rig.tier.write_gate.set()
    assert kept[1] == 4 * x.nbytes  # as soon as backward has asked for one of them


def test_what_is_still_on_its_way_out_fills_the_window():
    """It is memory as much as what has been read ahead is."""
    one = 64 * 64 * 4
    rig = Rig(read_ahead_bytes=2 * one)
    x, z = leaf(64, 64), leaf(64, 64)
    with rig:
        y = sines(x, 10)
    rig.settle()
    rig.tier.write_gate.clear()
    with rig:
        other = sines(z, 2)  # its stores cannot end
    y.backward()
    assert "ahead" not in rig.tier.started
    rig.tier.write_gate.set()
    other.backward()
    assert torch.equal(x.grad, torch.autograd.grad(sines(x, 10), x)[0])


def test_a_batch_of_another_length_follows_the_order_that_was_learned():
    rig = Rig(read_ahead_bytes=3 * 64 * 64 * 4)

    def urgent_loads(rows):
        a, b = leaf(rows, 64), leaf(rows, 64)
        with rig:
            first, second = sines(a, 6), sines(b, 6)
        rig.settle()
        before = len(rig.tier.started)
        first.backward()  # packed first and needed first: not the reverse order that is assumed at the beginning
        second.backward()
        return rig.tier.started[before:].count("urgent")

    assert urgent_loads(64) > 1
    assert urgent_loads(48) == 0
