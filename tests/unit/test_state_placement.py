"""Weights, gradients and optimizer state in a plan: where they are, what they move, and what that does to a step."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.choosing import choose, everything_stays, frontier, least_memory, problem_of
from hf_offload.plan.explain import categories_of
from hf_offload.plan.footprint import UnitWeights
from hf_offload.plan.hardware import describe_hardware
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import make_problem, smallest_budget
from hf_offload.plan.refusal import find_choice, refuse
from hf_offload.plan.rules import part_bytes, spare_bytes, state_window
from hf_offload.plan.search import smallest
from hf_offload.plan.simulate import likely_peak, simulate
from hf_offload.plan.state_placement import (
    GRADIENTS,
    STATE,
    WEIGHTS,
    Allowed,
    StatePlacement,
    least_weights,
    moved_bytes,
    state_placements,
    tier_bytes,
)
from hf_offload.plan.state_transfers import place_state
from hf_offload.plan.timeline import Channel, Windows
from hf_offload.storage.ram import RamTier
from hf_offload.storage.service import RunStorage
from hf_offload.storage.store import Slab, Store
from tests.helpers.handmade_footprints import MB, footprint_of

LAYERS, WEIGHT = 8, 150 * MB
EVERYTHING = 4 * LAYERS * WEIGHT


def trained(layers=LAYERS):
    """Blocks of 100 MB of weights with gradients and twice as much state; 50 MB of activations in each."""
    plain = footprint_of([50 * MB] * layers, [0.05] * layers, [60 * MB] * layers)
    return with_gradients(plain, WEIGHT, 2, optimizer_s=0.1)


def with_gradients(plain, weight, state, optimizer_s=0.01):
    """``plain``, whose base are weights and ``state`` times as much, with gradients."""
    layers = len(plain.units)
    backward = [one for one in plain.segments if one.backward]
    gradients = {id(one): (index + 1) * weight for index, one in enumerate(backward)}
    return dataclasses.replace(
        plain,
        segments=tuple(
            dataclasses.replace(
                one, live_bytes=one.live_bytes + gradients.get(id(one), 0), gradient_bytes=gradients.get(id(one), 0)
            )
            for one in plain.segments
        ),
        base_bytes=(1 + state) * layers * weight,
        gradient_bytes=layers * weight,
        state_bytes=state * layers * weight,
        optimizer_step_s=optimizer_s,
        weights={f"layers.{index}": UnitWeights(weight, weight, state * weight) for index in range(layers)},
    )


def machine(ssd="5GB/s", ram="64GB"):
    return describe_hardware("24GB", tflops=80, pcie="25GB/s", ssd=ssd, ram=ram)


def chosen(budget, hardware=None, **allowed):
    return choose(trained(), hardware or machine(), budget, Allowed(**allowed))


def test_a_step_that_fits_is_left_alone():
    found = chosen(EVERYTHING + 2000 * MB)
    assert not found.state_placement.moves
    assert set(found.solution.placements.values()) == {Placement.KEEP}


BUDGETS = [size * MB for size in (800, 1200, 2000, 4000, 5200)]


def test_more_budget_is_never_slower_and_no_plan_exceeds_its_limits():
    hardware = machine(ram="4GB")
    found = [chosen(budget, hardware) for budget in BUDGETS]
    assert all(one is not None for one in found)
    assert len({one.state_placement for one in found}) > 2
    for smaller, larger in itertools.pairwise(found):
        assert larger.step_s <= smaller.step_s * 1.0001
    for budget, one in zip(BUDGETS, found, strict=True):
        assert one.solution.timeline.must_fit_bytes <= 0.97 * budget
        for tier, room in hardware.room.items():
            lying = tier_bytes(trained(), one.state_placement).get(tier, 0) + one.solution.timeline.tier_bytes.get(
                tier, 0
            )
            assert lying <= room


def test_a_faster_drive_is_never_slower():
    steps = [chosen(900 * MB, machine(ssd, ram="1MB")).step_s for ssd in ("1GB/s", "3GB/s", "12GB/s")]
    assert all(faster <= slower for slower, faster in itertools.pairwise(steps))
    assert steps[0] > 2 * steps[-1]


@pytest.mark.parametrize("in_backward", [False, True])
def test_what_is_on_tiers_passes_over_the_links(in_backward):
    footprint, hardware = trained(), machine()
    placement = StatePlacement("ssd", "ssd", 4 * WEIGHT, in_backward)
    found = place_state(footprint, placement, 2000 * MB, on_host=False)
    written, read = moved_bytes(found)
    state = 2 * LAYERS * WEIGHT
    gradients = 0 if in_backward else LAYERS * WEIGHT
    # Each weight is written once a step; what does not stay is read in forward and in backward.
    assert written == {"ssd": state + gradients + LAYERS * WEIGHT}
    assert read == {"ssd": state + gradients + 2 * (LAYERS - 4) * WEIGHT}
    problem = make_problem(found, hardware, 2000 * MB)
    kept = dict.fromkeys(footprint.units, Placement.KEEP)
    step_s = problem.play(kept, problem.windows[0]).timeline.step_s
    assert step_s >= max(written["ssd"], read["ssd"]) / 5e9
    assert step_s >= footprint.step_s
    assert found.base_bytes == 4 * WEIGHT


def test_a_host_that_computes_itself_is_busy_with_weights_gradients_and_state_that_move():
    footprint, hardware = trained(), dataclasses.replace(machine(), device="cpu")
    busy = dataclasses.replace(hardware, busy_s={"weights": 1e-6, "gradients": 1e-7, "optimizer state": 1e-8})

    def step_s(placement, on):
        problem = make_problem(place_state(footprint, placement, 2000 * MB, on_host=True), on, 2000 * MB)
        kept = problem.play(dict.fromkeys(footprint.units, Placement.KEEP), problem.windows[0])
        return kept.timeline.step_s

    placement = StatePlacement("ssd", "ssd", 4 * WEIGHT)
    of_weights = LAYERS * WEIGHT + 2 * (LAYERS - 4) * WEIGHT  # written once, read in forward and in backward
    seconds = 1e-6 * of_weights + 1e-7 * 2 * LAYERS * WEIGHT + 1e-8 * 2 * 2 * LAYERS * WEIGHT
    assert step_s(placement, busy) == pytest.approx(footprint.step_s + seconds, rel=0.01)
    assert seconds > 10 * footprint.step_s
    assert step_s(StatePlacement(), busy) == step_s(StatePlacement(), hardware)


def test_gradients_that_stay_take_memory_and_no_bandwidth():
    footprint = trained()
    found = place_state(footprint, StatePlacement("ssd", keeps_gradients=True), 2000 * MB, on_host=False)
    state = 2 * LAYERS * WEIGHT
    assert moved_bytes(found) == ({"ssd": state}, {"ssd": state})
    assert tier_bytes(footprint, StatePlacement("ssd", keeps_gradients=True)) == {"ssd": state}
    assert found.base_bytes == footprint.base_bytes - state
    assert found.gradient_bytes == footprint.gradient_bytes
    assert found.segments == footprint.segments
    kept = {
        one.state_placement.state: one.state_placement
        for one in (chosen(budget, keeps_gradients=True) for budget in BUDGETS)
        if one
    }
    assert all(one.keeps_gradients for one in kept.values())
    assert "ram" in kept


FIRST_TWO = frozenset(["layers.0", "layers.1"])


def test_state_that_stays_takes_memory_and_no_bandwidth():
    footprint, placement = trained(), StatePlacement("ssd", staying=FIRST_TWO)
    found = place_state(footprint, placement, 2000 * MB, on_host=False)
    left = LAYERS - 2
    assert moved_bytes(found) == ({"ssd": 3 * left * WEIGHT}, {"ssd": 3 * left * WEIGHT})
    assert tier_bytes(footprint, placement) == {"ssd": 3 * left * WEIGHT}
    assert found.base_bytes == footprint.base_bytes - 2 * left * WEIGHT
    assert found.state_bytes == 2 * 2 * WEIGHT
    assert found.gradient_bytes == 2 * WEIGHT
    gradients = [one.gradient_bytes for one in found.segments if one.backward]
    assert gradients == [WEIGHT] * (LAYERS - 1) + [
        2 * WEIGHT
    ]  # those of the second block are there when the first has its
    assert found.optimizer_step_s == pytest.approx(footprint.optimizer_step_s * 2 / LAYERS)
    assert found.step_s == pytest.approx(footprint.step_s)
    categories = {
        one.name: one for one in categories_of(footprint, make_problem(found, machine(), 2000 * MB), placement, None)
    }
    assert categories[STATE].memory_bytes == 2 * 2 * WEIGHT
    assert categories[GRADIENTS].memory_bytes == 2 * WEIGHT
    assert categories[STATE].place == categories[GRADIENTS].place == "memory, ssd"


def test_state_that_all_stays_needs_no_room_for_what_is_on_its_way():
    all_stay = frozenset(trained().units)
    found = place_state(trained(), StatePlacement("ssd", staying=all_stay), 2000 * MB, on_host=True)
    assert (found.base_bytes, found.transfers, found.transfer_windows) == (trained().base_bytes, (), {})


def test_windows_of_state_are_wide_unless_nothing_fits_with_them():
    hardware = dataclasses.replace(machine(ram="1MB"), device="cpu")
    sizes = [size * MB for size in range(500, 1000, 40)]
    found = {size: choose(trained(), hardware, size, Allowed()) for size in sizes}
    widths = [one.state_placement.width for one in found.values() if one is not None]
    assert widths == sorted(widths)
    assert set(widths) == {1, 2}
    for size, one in found.items():
        least = refuse(trained(), hardware, size, Allowed())[1].smallest_bytes
        assert (one is not None) == (least <= size)
        if one is not None:
            assert one.problem.footprint.transfer_windows[STATE] == size * one.state_placement.width // 32


UNITS = st.sets(st.sampled_from([f"layers.{index}" for index in range(4)])).map(frozenset)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(now=UNITS, then=UNITS, accumulates=st.booleans(), keeps_gradients=st.booleans())
def test_what_comes_back_or_leaves_is_as_if_it_had_always_been_there(now, then, accumulates, keeps_gradients):
    footprint = trained(4)
    if accumulates:  # gradients of all are there from the beginning
        more = footprint.gradient_bytes
        segments = [
            dataclasses.replace(one, live_bytes=one.live_bytes - one.gradient_bytes + more, gradient_bytes=more)
            for one in footprint.segments
        ]
        footprint = dataclasses.replace(footprint, segments=tuple(segments), accumulates=True)
    before, after = (StatePlacement("ssd", keeps_gradients=keeps_gradients, staying=units) for units in (now, then))
    measured = place_state(footprint, before, 2000 * MB, on_host=False)
    measured = dataclasses.replace(measured, transfers=(), transfer_windows={}, transfer_spares={})
    changed, expected = (
        place_state(measured, after, 2000 * MB, False, before),
        place_state(footprint, after, 2000 * MB, False),
    )
    for name in ("base_bytes", "state_bytes", "gradient_bytes", "transfers", "transfer_windows"):
        assert getattr(changed, name) == getattr(expected, name)
    for one, other in zip(changed.segments, expected.segments, strict=True):
        assert (one.live_bytes, one.gradient_bytes) == (other.live_bytes, other.gradient_bytes)


@pytest.mark.parametrize(("now", "then"), [({"layers.0"}, set()), (set(), {"layers.0"})])
def test_gradients_that_are_looked_at_before_the_step_are_all_there_wherever_they_were(now, then):
    before, after = (StatePlacement("ssd", staying=frozenset(units)) for units in (now, then))
    measured = place_state(trained(4), before, 2000 * MB, False)
    measured = dataclasses.replace(measured, transfers=(), gradient_bytes=4 * WEIGHT, looks_at_gradients=True)
    assert place_state(measured, after, 2000 * MB, False, before).gradient_bytes == 4 * WEIGHT


@pytest.mark.parametrize("at_once", [False, True])
def test_an_update_of_what_stays_needs_memory_for_it_at_once_or_for_the_largest(at_once):
    footprint = dataclasses.replace(trained(), optimizer_step_bytes=(LAYERS if at_once else 2) * WEIGHT)
    placement = StatePlacement("ssd", staying=FIRST_TWO | {"layers.2"})
    found = place_state(footprint, placement, 2000 * MB, on_host=False)
    assert found.optimizer_step_bytes == (3 if at_once else 2) * WEIGHT
    measured = dataclasses.replace(
        place_state(trained(), StatePlacement("ssd"), 2000 * MB, False),
        transfers=(),
        step_share=footprint.optimizer_step_bytes / (LAYERS * WEIGHT),
    )
    assert (
        place_state(measured, placement, 2000 * MB, False, StatePlacement("ssd")).optimizer_step_bytes
        == found.optimizer_step_bytes
    )


def test_frozen_weights_are_not_written():
    frozen = {name: UnitWeights(one.weight_bytes, 0, 0) for name, one in trained().weights.items()}
    footprint = dataclasses.replace(trained(), weights=frozen)
    written, read = moved_bytes(place_state(footprint, StatePlacement(None, "ram", 0), 2000 * MB, on_host=False))
    assert written == {}
    assert read == {"ram": 2 * LAYERS * WEIGHT - 2 * least_weights(footprint)}


def test_less_than_a_block_is_refused_with_what_it_takes():
    assert chosen(350 * MB) is None
    least = least_memory(trained(), machine(), 350 * MB, Allowed())
    assert (least.state_placement.state is None, least.state_placement.weights is None) == (False, False)
    assert least.solution.timeline.must_fit_bytes > 2 * WEIGHT  # it and its gradients


def test_of_steps_that_are_as_fast_one_that_spares_the_drive_is_taken():
    found = chosen(2600 * MB, machine(ssd="5000GB/s", ram="1MB"))
    assert (found.state_placement.state, found.state_placement.weights) == ("ssd", None)
    assert set(found.solution.placements.values()) == {Placement.KEEP}


@pytest.mark.parametrize("budget", [2800 * MB, 4000 * MB])
def test_what_a_measured_step_has_moved_stays_where_it_is(budget):
    """Another place would cost another measured step."""
    footprint, hardware = trained(), machine()
    placement = choose(footprint, hardware, budget, Allowed()).state_placement
    assert placement.moves
    there = place_state(footprint, placement, budget, on_host=False)
    there = dataclasses.replace(there, transfers=(), transfer_windows={}, transfer_spares={})  # as it is measured
    assert choose(there, hardware, budget, Allowed(now=placement)).state_placement == placement


def test_what_may_not_move_stays():
    assert chosen(3000 * MB, state="none", weights="none") is None
    assert chosen(3000 * MB, weights="none").state_placement.weights is None
    assert chosen(8000 * MB, state="ram", weights="none").state_placement.state == "ram"


@pytest.mark.parametrize("now", [StatePlacement(), StatePlacement("ssd"), StatePlacement("ssd", "ssd", width=2)])
def test_what_must_stay_where_it_is_is_nowhere_else(now):
    allowed = Allowed(now=now, must_stay=True)
    assert list(state_placements(trained(), machine(), allowed)) == [now]
    assert len(list(state_placements(trained(), machine(), dataclasses.replace(allowed, must_stay=False)))) > 1


def test_parts_of_weights_are_as_large_as_the_window_of_a_small_budget():
    assert part_bytes(4 << 20) == state_window(4 << 20) == (4 << 20) // 32
    assert part_bytes(1 << 20) == 64 << 10  # smaller ones would not be worth their transfer


def test_categories_add_up():
    found = chosen(900 * MB)
    categories = {
        one.name: one for one in categories_of(trained(), found.problem, found.state_placement, found.solution)
    }
    assert [categories[name].total_bytes for name in (WEIGHTS, GRADIENTS, STATE)] == [
        LAYERS * WEIGHT, LAYERS * WEIGHT, 2 * LAYERS * WEIGHT,
    ]  # fmt: skip
    assert categories[STATE].memory_bytes == categories[GRADIENTS].memory_bytes == 0
    assert categories[WEIGHTS].memory_bytes >= WEIGHT


ROOMY = Allowed()
MACHINES = st.tuples(*map(st.sampled_from, [("1GB/s", "3GB/s", "6GB/s"), ("8GB/s", "25GB/s"), ("1MB", "2GB", "64GB")]))


@st.composite
def steps(draw):
    """Steps of different proportions: weights, state, activations and times of a few blocks."""
    count = draw(st.integers(2, 4))
    weight = draw(st.integers(5, 150)) * MB
    frozen = draw(st.booleans())
    sizes = draw(st.lists(st.integers(5, 200), min_size=count, max_size=count))
    plain = footprint_of(
        [size * MB for size in sizes], [0.02] * count, [draw(st.integers(5, 80)) * MB] * count, base=count * weight
    )
    if frozen:
        placement = {f"layers.{index}": UnitWeights(weight, 0, 0) for index in range(count)}
        return dataclasses.replace(plain, weights=placement)
    return with_gradients(plain, weight, state=draw(st.sampled_from([1, 2])))


def limits_are_kept(found, footprint, hardware, budget):
    timeline = found.solution.timeline
    lying = tier_bytes(footprint, found.state_placement)
    return timeline.must_fit_bytes <= 0.97 * budget and all(
        lying.get(tier, 0) + timeline.tier_bytes.get(tier, 0) <= room for tier, room in hardware.room.items()
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(footprint=steps(), described=MACHINES, shares=st.lists(st.integers(5, 110), min_size=2, max_size=2))
def test_any_step_keeps_its_limits_and_is_no_slower_with_more_budget(footprint, described, shares):
    ssd, pcie, ram = described
    hardware = describe_hardware("24GB", tflops=80, pcie=pcie, ssd=ssd, ram=ram)
    everything = everything_of(footprint)
    last = None
    for share in sorted(shares):
        budget = everything * share // 100
        found = choose(footprint, hardware, budget, ROOMY)
        if found is None:
            assert last is None
            continue
        assert limits_are_kept(found, footprint, hardware, budget)
        assert last is None or found.step_s <= last
        last = found.step_s


def everything_of(footprint):
    return footprint.base_bytes + footprint.gradient_bytes + sum(footprint.saved_bytes.values())


@st.composite
def steps_with_elementwise(draw):
    """The same, whose blocks may recompute their elementwise operations: they save less then, and backward takes longer."""
    return with_elementwise(
        draw(steps()), draw(st.integers(20, 90)) / 100, takes=draw(st.sampled_from([1.02, 1.2, 2.0]))
    )


def with_elementwise(plain, saves, takes):
    reduced = dataclasses.replace(
        plain,
        saved=tuple(dataclasses.replace(one, nbytes=int(one.nbytes * saves)) for one in plain.saved),
        segments=tuple(
            dataclasses.replace(one, seconds=one.seconds * takes) if one.backward else one for one in plain.segments
        ),
    )
    return dataclasses.replace(plain, elementwise=reduced)


def budget_between(footprint, hardware, share):
    """From the smallest that does, of which most plans are tight, to the one that keeps everything."""
    most = least = smallest_budget(everything_of(footprint))
    for _ in range(2):  # what is on its way takes a part of the budget
        least = smallest_budget(least_memory(footprint, hardware, least, ROOMY).solution.timeline.must_fit_bytes)
    return least + (most - least) * share // 100


# To shrink an example takes minutes, and they are small.
@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    footprint=steps_with_elementwise(),
    described=MACHINES,
    share=st.sampled_from(range(0, 100, 5)),
    more=st.integers(1, 40),
)
def test_any_step_recomputes_elementwise_operations_where_anything_leaves(footprint, described, share, more):
    ssd, pcie, ram = described
    hardware = describe_hardware("24GB", tflops=80, pcie=pcie, ssd=ssd, ram=ram)
    budget = budget_between(footprint, hardware, share)
    found = choose(footprint, hardware, budget, ROOMY)
    assert found is not None
    assert limits_are_kept(found, footprint, hardware, budget)
    stays = everything_stays(footprint, hardware, budget, ROOMY)
    assert found.problem.footprint.is_reduced != stays
    assert stays == (not found.state_placement.moves and set(found.solution.placements.values()) == {Placement.KEEP})
    larger = choose(footprint, hardware, budget + everything_of(footprint) * more // 100, ROOMY)
    assert larger.step_s <= 1.01 * found.step_s


@settings(max_examples=8, deadline=None, derandomize=True)
@given(footprint=steps(), share=st.integers(15, 80))
def test_any_step_is_no_slower_with_a_faster_drive(footprint, share):
    found = [
        choose(footprint, machine(ssd, ram="1MB"), everything_of(footprint) * share // 100, ROOMY)
        for ssd in ("1GB/s", "2GB/s", "8GB/s")
    ]
    assert len({one is None for one in found}) == 1
    for slower, faster in itertools.pairwise(one for one in found if one is not None):
        assert faster.step_s <= slower.step_s


def written(found):
    return moved_bytes(found.problem.footprint)[0].get("ssd", 0) + found.solution.timeline.tier_bytes.get("ssd", 0)


def test_a_step_writes_no_more_than_allowed():
    footprint = with_gradients(footprint_of([50 * MB] * 8, [0.05] * 8, [60 * MB] * 8), MB, 2)

    def within(written_bytes):
        return choose(footprint, machine(ram="1MB"), 350 * MB, Allowed(written_bytes=written_bytes))

    free = within(None)
    assert written(free) >= 100 * MB
    limited = within(60 * MB)
    assert written(limited) <= 60 * MB
    assert limited.step_s > free.step_s  # something is recomputed instead
    assert chosen(3000 * MB, machine(ram="1MB"), written_bytes=60 * MB) is None


def test_the_frontier_goes_from_two_blocks_to_everything_in_memory():
    found = frontier(trained(), machine(), Allowed(), 5)
    budgets, choices = zip(*found, strict=True)
    assert len(found) == 5
    assert budgets[0] < EVERYTHING / 4 < EVERYTHING < budgets[-1]
    assert (choices[0].state_placement.state is None, choices[0].state_placement.weights is None) == (False, False)
    assert not choices[-1].state_placement.moves
    assert all(more.step_s <= less.step_s for less, more in itertools.pairwise(choices))
    assert chosen(budgets[0] * 9 // 10) is None


def one_large_weight():
    """A unit whose weight, gradient and state are nearly all of a step."""
    plain = footprint_of([MB], [0.05], [MB])
    return dataclasses.replace(with_gradients(plain, 800 * MB, 2), optimizer_step_bytes=1600 * MB)


def test_the_least_is_the_same_for_every_budget_and_never_more_than_the_peak_in_memory():
    footprint, hardware = one_large_weight(), dataclasses.replace(machine(), device="cpu")
    kept = make_problem(footprint, hardware, 1 << 40)
    in_memory = kept.play(dict.fromkeys(footprint.units, Placement.KEEP), kept.windows[0]).timeline.peak_bytes
    for allowed in (Allowed(state="none"), Allowed()):
        named = {refuse(footprint, hardware, size * MB, allowed)[1].smallest_bytes for size in (10, 100, 400)}
        assert len(named) == 1
        assert 0.97 * named.pop() <= in_memory + MB


def test_of_a_plan_with_less_than_the_budget_the_budget_itself_is_named():
    least = refuse(trained(), machine(), 100 * MB, Allowed())[1].smallest_bytes
    with pytest.raises(OffloadPlanError, match=rf"A memory budget of {least >> 20}[.]00 MiB is too small") as refused:
        find_choice(trained(), machine(), least, Allowed(), less=500 * MB)
    assert refused.value.smallest_bytes >= least + 500 * MB


def test_a_limit_of_written_bytes_that_leaves_no_way_is_named():
    """Not a budget that would do, nor room below zero."""
    hardware = machine(ram="1MB")
    for now in (None, StatePlacement("ssd", "ssd", 2 * WEIGHT)):
        # The settings of a run whose state has left say that it is on the drive.
        given = Allowed(state="auto" if now is None else "none", written_bytes=0, may_recompute=False, now=now)
        footprint = trained() if now is None else place_state(trained(), now, 2000 * MB, False)
        footprint = dataclasses.replace(footprint, transfers=(), transfer_windows={})  # as it is measured
        message = str(refuse(footprint, hardware, 2000 * MB, given)[1])
        assert re.search(r"max_step_write_bytes of [0-9.]+ GiB instead of 0 B", message)
        assert "instead of -" not in message
    assert "would do, but not within the limits of tiers" in message


@pytest.mark.parametrize(
    "placement",
    [
        StatePlacement(),
        StatePlacement("ram"),
        StatePlacement("ssd"),
        StatePlacement("ssd", "ssd", LAYERS * WEIGHT // 2),
    ],
)
@pytest.mark.parametrize("moved", [False, True])
def test_ram_has_less_room_where_snapshots_are_held(placement, moved):
    """State is twice the weights. What has left memory is a part of a snapshot, wherever it is when a step is measured."""
    footprint, allowed = trained(), Allowed()
    if moved:
        allowed = Allowed(now=placement)
        footprint = place_state(footprint, placement, 8 * WEIGHT, on_host=False)
    with_them = dataclasses.replace(allowed, snapshots=2)
    rooms = [problem_of(footprint, machine(), 8 * WEIGHT, placement, one).room_bytes for one in (allowed, with_them)]
    less = {tier: nbytes - rooms[1][tier] for tier, nbytes in rooms[0].items()}
    assert less == {"ram": 2 * 3 * LAYERS * WEIGHT, "ssd": 0}


def test_a_likely_peak_counts_of_what_is_on_its_way_what_is_there_at_that_time():
    footprint = trained()
    step = place_state(footprint, StatePlacement("ssd", "ssd", least_weights(footprint)), 32 * 96 * MB, on_host=True)
    windows, least = step.transfer_windows, step.base_bytes - step.in_flight_bytes
    assert step.in_flight_bytes == sum(windows.values())

    def played(play, bytes_per_s):
        return play(step, dict.fromkeys(step.units, Placement.KEEP), {"ssd": Channel(bytes_per_s, 1e13)}, Windows(0, 0))

    saved, live = sum(step.saved_bytes.values()), max(one.live_bytes for one in step.segments)
    # When the first gradients are on their way, which fill half of their window next to a quarter that is spare, state has
    # been written: on a slow drive, they wait for it. The window of weights is full then.
    in_flight = windows[WEIGHTS] + windows[GRADIENTS] * 3 // 4 + spare_bytes(windows[STATE])
    for bytes_per_s in (1e6, 1e13):
        assert played(likely_peak, bytes_per_s) == least + saved + live + in_flight
        assert played(likely_peak, bytes_per_s) < played(simulate, bytes_per_s).peak_bytes


@pytest.mark.parametrize(
    ("placement", "idle"),
    [
        # Of 96 MB each, 24 are spare. What forward has written may wait, and backward writes gradients.
        (StatePlacement("ssd"), [0] * 8 + [2 * 24] * 8),
        (StatePlacement("ssd", in_backward=True), [0] * 16),
        (StatePlacement("ssd", keeps_gradients=True), [0] * 16),
    ],
)
def test_windows_count_where_they_can_be_used(placement, idle):
    budget = 32 * 96 * MB
    step = place_state(trained(), placement, budget, on_host=True)
    assert (step.idle_bytes / MB).tolist() == idle
    assert not place_state(trained(), placement, budget, on_host=False).idle


def test_buffers_that_are_larger_than_a_window_has_to_spare_are_not_kept_for_the_next():
    footprint = trained()
    placement = StatePlacement("ssd", "ssd", least_weights(footprint))
    for budget, spares in ((32 * 96 * MB, {GRADIENTS, STATE}), (32 * MB, set())):
        step = place_state(footprint, placement, budget, on_host=True)
        assert {kind for kind, nbytes in step.transfer_spares.items() if nbytes} == spares


def test_spare_buffers_take_as_much_as_plans_count_on():
    window = 16 << 20
    store = Store(RunStorage(), RamTier(storage=RunStorage()), "state", window)
    for _ in range(8):
        store.recycle(store.new_slab(1 << 20))
        store.recycle(Slab(1 << 20))
    assert store.buffer_bytes == spare_bytes(window)


def test_a_budget_that_only_what_is_idle_makes_enough_is_not_refused():
    """What no placement does better counts it, too."""
    footprint = dataclasses.replace(footprint_of([MB] * 2, [1.0] * 2, [50 * MB] * 2), idle=((0, 4, 30 * MB),))
    problem = make_problem(footprint, machine(), smallest_budget((100 + 50 + 2 - 30) * MB))
    assert problem.may_fit
    assert problem.fits(smallest(problem))
