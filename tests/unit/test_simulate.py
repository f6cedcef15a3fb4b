"""The simulated step, against steps worked out by hand."""

import dataclasses

import pytest

from hf_offload.plan.footprint import Transfer
from hf_offload.plan.plan import Placement
from hf_offload.plan.simulate import likely_peak, simulate
from hf_offload.plan.state_placement import GRADIENTS, STATE, WEIGHTS
from hf_offload.plan.timeline import Channel, Windows
from tests.helpers.handmade_footprints import MB, footprint_of

NARROW = Windows(0, 1 << 40)


def play(footprint, placement, channel=None, windows=NARROW, **details):
    placements = dict.fromkeys(footprint.units, placement)
    channels = {"ssd": channel} if channel else {}
    return simulate(footprint, placements, channels, windows, **details)


def test_keeping_costs_no_time_and_all_the_memory():
    # three units of 1 s (backward 2 s), 10 MB saved each, 5 MB alive in each, 100 MB of weights
    timeline = play(footprint_of([10 * MB] * 3, [1.0] * 3, [5 * MB] * 3), Placement.KEEP)
    assert timeline.step_s == pytest.approx(9.0)
    assert timeline.peak_bytes == (100 + 30 + 5) * MB
    assert timeline.moved_bytes == 0
    assert timeline.stall_s == 0


def test_a_fast_tier_hides_everything():
    footprint = footprint_of([10 * MB] * 3, [1.0] * 3, [5 * MB] * 3)
    timeline = play(footprint, Placement.SSD, Channel(1e9, 1e9), Windows(20 * MB, 1 << 40))
    # the two that backward needs first never leave; the third comes back while the second computes
    assert timeline.moved_bytes == 10 * MB
    assert timeline.stall_s == 0
    assert timeline.step_s == pytest.approx(9.0)


@pytest.mark.parametrize(("write_behind", "peak", "stalled"), [(0, 140, 140), (14 * MB, 150, 154), (1 << 40, 150, 160)])
def test_a_tier_that_stops_writing_holds_up_to_the_window_in_memory(write_behind, peak, stalled):
    footprint = footprint_of([10 * MB] * 3, [1.0] * 3, [5 * MB] * 3)
    segments = list(footprint.segments)
    segments[2] = dataclasses.replace(segments[2], live_bytes=40 * MB)  # the last of forward
    footprint = dataclasses.replace(footprint, segments=tuple(segments))
    timeline = play(footprint, Placement.SSD, Channel(1e12, 1e12), Windows(0, write_behind))
    # There the first tensor has left, and the second is leaving; with no window forward has waited until it was out.
    assert timeline.peak_bytes == peak * MB
    assert timeline.must_fit_bytes == stalled * MB


def test_what_measuring_takes_is_no_part_of_the_peak_but_has_to_fit():
    footprint = footprint_of([10 * MB] * 2, [0.1] * 2, [1 * MB] * 2)
    *segments, last = footprint.segments
    footprint = dataclasses.replace(footprint, segments=(*segments, dataclasses.replace(last, measured_bytes=30 * MB)))
    timeline = play(footprint, Placement.KEEP)
    assert timeline.peak_bytes == (100 + 20 + 1) * MB
    assert timeline.must_fit_bytes == (100 + 10 + 1 + 30) * MB  # one of two is released by then


def test_a_block_that_did_not_run_has_to_fit_beside_all_that_may_be_in_memory():
    footprint = footprint_of([10 * MB] * 3, [0.1] * 3, [40 * MB, 5 * MB, 5 * MB])
    skipped = dataclasses.replace(footprint, skipped_blocks=("layers.3",))
    without, timeline = play(footprint, Placement.KEEP), play(skipped, Placement.KEEP)
    assert timeline.peak_bytes == without.peak_bytes == without.must_fit_bytes == (100 + 40 + 10) * MB
    assert timeline.must_fit_bytes == (100 + 40 + 30) * MB


def test_loads_that_cannot_be_hidden_are_waited_for():
    footprint = footprint_of([10 * MB] * 3, [1.0] * 3, [5 * MB] * 3)
    # Reading takes 4 s a tensor. What the last unit saved is still on its way out when it is needed: taken from memory. The
    # others are read while the one before computes (2 s), and waited for as long again.
    timeline = play(footprint, Placement.SSD, Channel(1e12, 2.5e6))
    assert timeline.load_stall_s == pytest.approx(2 + 2)
    assert timeline.step_s == pytest.approx(9 + 4)


def test_forward_waits_while_too_much_is_on_its_way_out():
    footprint = footprint_of([10 * MB] * 3, [1.0] * 3, [5 * MB] * 3)
    # Writing takes 4 s a tensor; one may wait. The second is packed at 2 s and has to wait until the first is out (5 s).
    timeline = play(footprint, Placement.SSD, Channel(2.5e6, 1e12), Windows(0, 10 * MB))
    assert timeline.store_stall_s == pytest.approx((5 - 2) + (9 - 6))
    slow_disk = play(footprint, Placement.SSD, Channel(2.5e6, 1e12), Windows(0, 1 << 40))
    assert slow_disk.peak_bytes > timeline.peak_bytes


def test_a_load_beside_a_store_gets_its_share_of_the_drive():
    footprint = footprint_of([10 * MB] * 4, [1.0] * 4, [5 * MB] * 4)
    # Writing takes 2.4 s a tensor: the third is written from 5.8 to 8.2 s, and backward takes it from memory at 6 s. From
    # then on the second is read for 8 s, and from when it is there the first, for 2 s later: 3 s each, alone.
    store, load = 10 * MB / 2.4, 10 * MB / 3.0
    assert play(footprint, Placement.SSD, Channel(store, load)).load_stall_s == pytest.approx(1 + 1)
    assert play(footprint, Placement.SSD, Channel(store, load, store + load)).load_stall_s == pytest.approx(1 + 1)
    assert play(footprint, Placement.SSD, Channel(store, load, (store + load) / 2)).load_stall_s == pytest.approx(4 + 1)


def test_a_store_that_has_not_begun_is_not_made_for_what_backward_wants():
    footprint = footprint_of([10 * MB] * 3, [1.0] * 3, [5 * MB] * 3)
    # Writing takes 1.5 s a tensor: the third would be written from 4 to 5.5 s, and backward takes it at 3 s. The second is
    # asked for at 5 s: 1 s, for the drive has nothing else to do.
    assert play(footprint, Placement.SSD, Channel(10 * MB / 1.5, 10 * MB, 10 * MB)).load_stall_s == pytest.approx(1)


def test_from_an_accelerator_bytes_leave_when_they_are_copied_and_forward_waits_for_the_ring():
    footprint = footprint_of([10 * MB] * 6, [1.0] * 6, [5 * MB] * 6)
    slow = Channel(2.5e6, 1e12)  # 4 s a tensor: the drive has the first at 5 s, and the fifth at 21 s
    host = play(footprint, Placement.SSD, slow, Windows(0, 20 * MB))
    staged = dataclasses.replace(slow, link_bytes_per_s=1e12, ring_bytes=1 << 30)
    roomy = play(footprint, Placement.SSD, staged, Windows(0, 20 * MB))
    assert roomy.store_stall_s == pytest.approx(0, abs=1e-3)
    assert roomy.store_stall_s < host.store_stall_s
    assert roomy.load_stall_s == pytest.approx(21 - 8, abs=1e-3)  # backward asks for the fifth, which is in the ring
    # In three quarters of the ring, one tensor: the second is packed at 2 s, and copied when the first is written.
    narrow = play(footprint, Placement.SSD, dataclasses.replace(staged, ring_bytes=20 * MB), Windows(0, 20 * MB))
    assert narrow.store_stall_s == pytest.approx(5 * (4 - 1), abs=1e-3)


def test_recomputing_costs_forward_again_and_the_blocks_memory():
    footprint = footprint_of([10 * MB] * 3, [1.0] * 3, [5 * MB] * 3, boundary=2 * MB)
    timeline = play(footprint, Placement.RECOMPUTE)
    assert timeline.recompute_s == pytest.approx(3.0)
    assert timeline.step_s == pytest.approx(12.0)
    # three boundaries, one block's tensor, what is alive
    assert timeline.peak_bytes == (100 + 3 * 2 + 10 + 5) * MB


def test_boundaries_may_leave_too():
    footprint = footprint_of([10 * MB] * 4, [1.0] * 4, [5 * MB] * 4, boundary=2 * MB)
    kept = play(footprint, Placement.RECOMPUTE)
    moved = play(footprint, Placement.RECOMPUTE_SSD, Channel(1e9, 1e9), Windows(2 * MB, 1 << 40))
    assert moved.peak_bytes < kept.peak_bytes
    assert moved.tier_bytes["ssd"] == 3 * 2 * MB


def test_what_something_else_holds_costs_nothing_and_is_not_loaded():
    footprint = footprint_of([10 * MB] * 2, [1.0] * 2, [15 * MB] * 2)
    held = dataclasses.replace(
        footprint, saved=tuple(dataclasses.replace(one, gone=one.released) for one in footprint.saved)
    )
    timeline = play(held, Placement.SSD, Channel(1e9, 1.0))
    assert timeline.load_stall_s == 0
    assert timeline.peak_bytes == (100 + 15) * MB


def test_the_engine_holds_what_stays_while_something_else_passes():
    footprint = footprint_of([30 * MB, 10 * MB, 1 * MB], [1.0] * 3, [5 * MB] * 3)
    first, *others = footprint.saved
    first = dataclasses.replace(first, needed=3, released=3)  # autograd lets go of it when forward ends
    footprint = dataclasses.replace(footprint, saved=(first, *others))
    placements = dict.fromkeys(footprint.units, Placement.SSD) | {first.unit: Placement.KEEP}
    # Forward waits until the second is out: the first is there with it only until then.
    timeline = simulate(footprint, placements, {"ssd": Channel(1e9, 1e9)}, Windows(0, 0))
    assert timeline.resident_bytes == (30 + 10) * MB


def test_details_cover_the_whole_step():
    footprint = footprint_of([10 * MB] * 3, [1.0] * 3, [5 * MB] * 3)
    timeline = play(footprint, Placement.SSD, Channel(2.5e6, 2.5e6), Windows(0, 10 * MB), details=True)
    busy = sum(bar.end_s - bar.begin_s for bar in timeline.intervals if bar.channel in ("compute", "wait", "recompute"))
    assert busy == pytest.approx(timeline.step_s)
    assert max(one.total_bytes for one in timeline.memory) == timeline.peak_bytes


@pytest.mark.parametrize(("placement", "kind"), [(Placement.KEEP, "kept_bytes"), (Placement.SSD, "moving_bytes")])
def test_details_tell_what_stays_from_what_is_on_its_way(placement, kind):
    footprint = footprint_of([10 * MB] * 3, [1.0] * 3, [5 * MB] * 3)
    segments = [dataclasses.replace(one, gradient_bytes=MB * one.backward) for one in footprint.segments]
    footprint = dataclasses.replace(footprint, segments=tuple(segments), gradient_bytes=2 * MB)
    timeline = play(footprint, placement, Channel(2.5e6, 2.5e6), Windows(0, 10 * MB), details=True)
    assert max(getattr(one, kind) for one in timeline.memory) > 0
    live = [*(segment.live_bytes for segment in segments), 2 * MB]
    for one, nbytes in zip(timeline.memory, live, strict=True):
        assert one.kept_bytes + one.moving_bytes == getattr(one, kind)
        assert one.total_bytes == footprint.base_bytes + nbytes + getattr(one, kind)
    assert [one.gradient_bytes for one in timeline.memory] == [0, 0, 0, MB, MB, MB, 2 * MB]


def test_a_host_that_computes_itself_is_busy_with_every_byte_that_moves_each_way():
    footprint = footprint_of([10 * MB] * 3, [1.0] * 3, [5 * MB] * 3)
    channel = Channel(1e12, 1e12)
    busy = dataclasses.replace(channel, busy_s={"activations": 0.1 / MB, "weights": 1.0})
    for windows in (NARROW, Windows(20 * MB, 1 << 40)):  # what never leaves is prepared to, and asked for
        quick = play(footprint, Placement.SSD, channel, windows).step_s
        assert play(footprint, Placement.SSD, busy, windows).step_s == pytest.approx(quick + 2 * 3 * 1.0, rel=1e-4)
    assert play(footprint, Placement.KEEP, busy).step_s == play(footprint, Placement.KEEP, channel).step_s


@pytest.mark.parametrize("placement", [Placement.KEEP, Placement.RECOMPUTE])
def test_what_cannot_be_used_of_windows_is_not_there_but_in_the_optimizer_s_step(placement):
    footprint = footprint_of([10 * MB] * 3, [1.0] * 3, [5 * MB] * 3)
    stepping = dataclasses.replace(footprint, optimizer_step_bytes=500 * MB)
    idle = ((0, 6, 3 * MB), (1, 6, 4 * MB))
    usual, less = (play(one, placement) for one in (footprint, dataclasses.replace(footprint, idle=idle)))
    assert less.peak_bytes == less.must_fit_bytes == usual.peak_bytes - 7 * MB
    usual, same = (play(one, placement) for one in (stepping, dataclasses.replace(stepping, idle=idle)))
    assert same.peak_bytes == usual.peak_bytes


@pytest.mark.parametrize("kind", [STATE, GRADIENTS, WEIGHTS])
@pytest.mark.parametrize("link", [None, 1e12])
def test_a_host_that_computes_itself_waits_for_what_has_no_room_in_a_window(kind, link):
    """Two units whose 40 MB are read and written in forward, over a window with room for 10 MB each way."""
    footprint = footprint_of([MB] * 2, [1.0] * 2, [5 * MB] * 2)
    transfers = tuple(
        Transfer(kind, f"layers.{at}", "ssd", 40 * MB, at, loads) for at in range(2) for loads in (True, False)
    )
    footprint = dataclasses.replace(
        footprint, transfers=transfers, transfer_windows={kind: 20 * MB}, transfer_spares={kind: 0}
    )
    timeline = play(footprint, Placement.KEEP, Channel(40e6, 40e6, link_bytes_per_s=link))
    if link is None and kind != WEIGHTS:
        # Of each, a quarter is read ahead, the first of them in no time that is computed, and a quarter written meanwhile.
        assert timeline.load_stall_s == pytest.approx(1.0 + 0.75)
        assert timeline.store_stall_s == pytest.approx(0.75 + 0.75)
    else:
        assert timeline.load_stall_s == pytest.approx(1.0)
        assert timeline.store_stall_s == 0


def test_of_the_room_that_is_left_in_a_window_a_quarter_is_likely_to_be_used():
    """While the first unit computes, 8 MB of weights are on their way, and its window has room for 20 MB."""
    footprint = dataclasses.replace(
        footprint_of([MB] * 2, [1.0] * 2, [50 * MB, 5 * MB]),
        transfers=(Transfer(WEIGHTS, "layers.1", "ssd", 8 * MB, 1, loads=True),),
        transfer_windows={WEIGHTS: 40 * MB},
        transfer_spares={WEIGHTS: 0},
        in_flight_bytes=40 * MB,
    )
    placements = dict.fromkeys(footprint.units, Placement.KEEP)
    likely = likely_peak(footprint, placements, {"ssd": Channel(1e9, 1e9)}, NARROW)
    assert likely == (100 - 40 + 50 + 8 + (20 - 8) // 4) * MB
