"""The search for a placement, against every placement there is."""

import dataclasses
import itertools
import random
import statistics

import pytest

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.hardware import Measurement, describe_hardware
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import Problem, smallest_budget
from hf_offload.plan.refusal import find_choice
from hf_offload.plan.search import smallest, solve, uniform
from hf_offload.plan.state_placement import Allowed
from hf_offload.plan.timeline import Channel, Windows
from tests.helpers.handmade_footprints import MB, footprint_of


def random_problem(seed):
    draw = random.Random(seed)
    count = draw.randint(2, 8 if seed % 20 == 0 else 5)
    sizes = [draw.randint(5, 60) * MB for _ in range(count)]
    seconds = [draw.uniform(0.005, 0.05) for _ in range(count)]
    live = [draw.randint(1, 30) * MB for _ in range(count)]
    footprint = footprint_of(sizes, seconds, live)
    channels = {"ssd": Channel(draw.uniform(0.3, 4) * 1e9, draw.uniform(0.3, 4) * 1e9)}
    if draw.random() < 0.4 and count <= 5:
        channels["ram"] = Channel(8e9, 8e9)
    windows = (Windows(draw.randint(1, 80) * MB, draw.randint(1, 80) * MB),)
    room = {"ssd": 10**12, "ram": draw.randint(10, 100) * MB}
    problem = Problem(footprint, channels, room, 0, windows)
    most = uniform(problem, Placement.KEEP).timeline.peak_bytes
    least = smallest(problem).timeline.must_fit_bytes
    budget = smallest_budget(least + int((most - least) * draw.uniform(0.0, 1.0)))
    return Problem(footprint, channels, room, budget, windows)


def best_of_all(problem):
    """Brute force: the fastest of all placements that fit, as the simulation sees them."""
    options = [Placement.KEEP, *(Placement(tier) for tier in problem.channels), Placement.RECOMPUTE]
    options += [Placement(f"recompute+{tier}") for tier in problem.channels]
    units = list(problem.footprint.units)
    best = None
    footprint = problem.footprint
    forward_s = {one.unit: one.seconds for one in footprint.segments if not one.backward}
    for chosen in itertools.product(options, repeat=len(units)):
        again = sum(forward_s[unit] for unit, one in zip(units, chosen, strict=True) if one.recomputes)
        if best is not None and footprint.step_s + again >= best:
            continue  # slower without any waiting
        solution = problem.play(dict(zip(units, chosen, strict=True)), problem.windows[0])
        if problem.fits(solution) and (best is None or solution.timeline.step_s < best):
            best = solution.timeline.step_s
    return best


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.full)])  # 200 take a minute and a half
def test_greedy_search_is_nearly_as_good_as_brute_force(count):
    ratios = []
    for problem in map(random_problem, range(count)):
        found, best = solve(problem), best_of_all(problem)
        assert problem.fits(found)
        ratios.append(found.timeline.step_s / best)
    assert statistics.mean(ratios) < 1.015  # 1.010 of these 15


def test_nothing_moves_when_everything_fits():
    problem = random_problem(3)
    keep = uniform(problem, Placement.KEEP)
    budget = smallest_budget(keep.timeline.peak_bytes)
    roomy = Problem(problem.footprint, problem.channels, problem.room_bytes, budget, problem.windows)
    assert set(solve(roomy).placements.values()) == {Placement.KEEP}


def test_below_the_smallest_there_is_no_plan():
    problem = random_problem(3)
    least = smallest_budget(smallest(problem).timeline.must_fit_bytes)
    below = least - (1 << 20)
    assert solve(Problem(problem.footprint, problem.channels, problem.room_bytes, least, problem.windows)) is not None
    assert solve(Problem(problem.footprint, problem.channels, problem.room_bytes, below, problem.windows)) is None


def test_the_cheapest_blocks_are_recomputed_first():
    """As in models whose stages differ. Equal blocks, which differ by the clock alone, stay in the order of forward."""

    def recomputed(seconds):
        footprint = footprint_of([50 * MB] * 4, seconds, [MB] * 4)
        problem = Problem(footprint, {}, {}, 0, (Windows(MB, MB),))
        most = uniform(problem, Placement.KEEP).timeline.must_fit_bytes
        tight = dataclasses.replace(problem, budget_bytes=smallest_budget(most - 40 * MB))
        return [unit for unit, one in solve(tight).placements.items() if one.recomputes]

    assert recomputed([0.05, 0.05, 0.005, 0.05]) == ["layers.2"]
    assert recomputed([0.0502, 0.0501, 0.0499, 0.0503]) == ["layers.0"]


def test_a_tier_is_not_filled_beyond_its_room():
    footprint = footprint_of([50 * MB] * 6, [0.05] * 6, [1 * MB] * 6)
    channels = {"ram": Channel(1e12, 1e12), "ssd": Channel(2e8, 2e8)}
    windows = (Windows(20 * MB, 20 * MB),)
    budget = 100 * MB + 160 * MB
    found = solve(Problem(footprint, channels, {"ram": 60 * MB, "ssd": 10**12}, budget, windows, may_recompute=False))
    assert 0 < found.timeline.tier_bytes["ram"] <= 60 * MB
    assert found.timeline.tier_bytes["ssd"] > 0  # which has the rest


def machine_with(tier, room):
    """Nothing may move but to this tier, which has so much room."""
    found = describe_hardware("24GB", tflops=80, pcie="1GB/s", ssd="1GB/s")
    rates = {tier: Measurement(1e9, "given")}
    return dataclasses.replace(
        found,
        store_bytes_per_s=rates,
        load_bytes_per_s=rates,
        both_bytes_per_s={},
        room_bytes={tier: Measurement(room, "given")},
    )


SAVED = footprint_of([50 * MB] * 6, [0.05] * 6, [1 * MB] * 6)
NOTHING_ELSE = Allowed(state="none", weights="none", may_recompute=False)


def test_the_smallest_budget_is_for_tiers_as_full_as_they_may_be():
    hardware = machine_with("ssd", 120 * MB)
    with pytest.raises(OffloadPlanError, match="more room in the ssd tier, 2") as refusal:
        find_choice(SAVED, hardware, 10 * MB, NOTHING_ELSE)
    named = refusal.value.smallest_bytes
    found = find_choice(SAVED, hardware, named, NOTHING_ELSE)
    assert found.solution.timeline.tier_bytes["ssd"] <= 120 * MB
    with pytest.raises(OffloadPlanError):
        find_choice(SAVED, hardware, named - (1 << 20), NOTHING_ELSE)


def test_where_no_drive_is_named_a_refusal_says_that_one_would_do():
    with pytest.raises(OffloadPlanError, match=r"more room in the ram tier, .*, or a directory on a drive, with which"):
        find_choice(SAVED, machine_with("ram", 120 * MB), 10 * MB, NOTHING_ELSE)


def test_without_leave_to_recompute_nothing_is_recomputed():
    # a drive so slow that computing again would be much faster
    footprint = footprint_of([50 * MB] * 6, [0.01] * 6, [1 * MB] * 6)
    channels = {"ssd": Channel(1e8, 1e8)}
    arguments = (footprint, channels, {"ssd": 10**12}, 250 * MB, (Windows(20 * MB, 20 * MB),))
    assert any(one.recomputes for one in solve(Problem(*arguments)).placements.values())
    assert not any(one.recomputes for one in solve(Problem(*arguments, may_recompute=False)).placements.values())


def test_more_memory_never_makes_a_simple_way_slower():
    footprint = footprint_of([50 * MB] * 6, [0.02] * 6, [1 * MB] * 6)
    windows = (Windows(100 * MB, 100 * MB), Windows(50 * MB, 50 * MB))
    problem = Problem(footprint, {"ssd": Channel(2e9, 2e9)}, {"ssd": 10**12}, 0, windows)
    # With the narrow window everything can leave; with the wide one only slower ways fit.
    narrow = uniform(Problem(footprint, problem.channels, problem.room_bytes, 0, windows[1:]), Placement.SSD)
    budget = smallest_budget(narrow.timeline.must_fit_bytes)
    found = solve(Problem(footprint, problem.channels, problem.room_bytes, budget, windows))
    assert found.timeline.step_s <= narrow.timeline.step_s


def test_among_equals_the_drive_is_spared():
    footprint = footprint_of([50 * MB] * 6, [1.0] * 6, [1 * MB] * 6)
    problem = Problem(
        footprint,
        {"ssd": Channel(1e10, 1e10)},
        {"ssd": 10**12},
        smallest_budget(360 * MB),
        (Windows(1 * MB, 1 * MB),),
        may_recompute=False,
    )
    # One tensor alone would come back as soon as backward begins, however small the window: two have to leave.
    assert solve(problem).timeline.moved_bytes == 100 * MB


def test_eighty_layers_are_placed_within_their_budget():
    layers = 80
    footprint = footprint_of([500 * MB] * layers, [0.02] * layers, [100 * MB] * layers)
    channels = {"ram": Channel(20e9, 20e9), "ssd": Channel(3e9, 5e9)}
    problem = Problem(footprint, channels, {"ram": 16 * 10**9, "ssd": 10**12}, 12 * 10**9, (Windows(10**9, 160 * MB),))
    found = solve(problem)
    assert problem.fits(found)
    simple = [uniform(problem, placement) for placement in Placement]
    assert found.timeline.step_s <= min(one.timeline.step_s for one in simple if one and problem.fits(one))


def test_few_units_move_in_narrow_windows_where_nothing_fits_in_wide_ones():
    wide, narrow = Windows(100 * MB, 100 * MB), Windows(1 * MB, 1 * MB)
    footprint = footprint_of([20 * MB] * 12, [0.05] * 12, [1 * MB] * 12)
    problem = Problem(footprint, {"ssd": Channel(1e8, 1e8)}, {"ssd": 10**12}, 0, (wide, narrow))
    kept, moved = (uniform(problem, one).timeline.must_fit_bytes for one in (Placement.KEEP, Placement.SSD))
    narrowly = problem.play(dict.fromkeys(footprint.units, Placement.SSD), narrow).timeline.must_fit_bytes
    assert narrowly < moved - 20 * MB
    problem = dataclasses.replace(problem, budget_bytes=smallest_budget((narrowly + moved) // 2))
    problem = dataclasses.replace(problem, may_recompute=False)
    found = solve(problem)
    assert found.windows == narrow
    assert 0 < sum(placement is Placement.SSD for placement in found.placements.values()) < 12
    assert moved < kept
