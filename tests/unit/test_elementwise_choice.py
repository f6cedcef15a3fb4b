"""Recompute of elementwise operations as a choice of the plan: how steps are put together, and when it is chosen."""

import dataclasses
import random

import pytest

from hf_offload.plan import search
from hf_offload.plan.choosing import choose
from hf_offload.plan.footprint import Footprint, Saved, Segment, UnitWeights
from hf_offload.plan.hardware import describe_hardware
from hf_offload.plan.places import Allowed, problem_of
from hf_offload.plan.plan import Placement
from hf_offload.plan.planner import make_problem
from hf_offload.plan.problem import Choices, Problem, smallest_budget
from hf_offload.plan.search import smallest, solve, uniform
from hf_offload.plan.timeline import Channel, Windows
from tests.helpers.handmade_footprints import MB, footprint_of


@pytest.fixture(autouse=True)
def short_search(monkeypatch):
    """What is said of the choice does not depend on how long it is looked for."""
    monkeypatch.setattr(search, "_SEARCH_WORK", 1500)


def step_of(kept, less, seconds, more_s):
    """A block saves one tensor of ``kept`` bytes and, unless it recomputes it at once in backward, one of ``less``."""

    def step(reduced):
        plain = footprint_of(kept, seconds, [MB] * len(kept), boundary=MB)
        count = len(kept)
        segments, saved, spans = list(plain.segments[:count]), [], []
        for index in reversed(range(count)):
            name = f"layers.{index}"
            begin = len(segments)
            segments += [Segment(name, True, MB, 0, seconds[index])] * 2
            segments += [Segment(name, True, MB, 0, more_s[index])] * reduced
            saved.append(Saved(name, kept[index], index + 1, index + 1, begin, len(segments)))
            if not reduced:
                saved.append(Saved(name, less[index], index + 1, index + 1, begin + 1, begin + 2))
            spans.append(dataclasses.replace(plain.blocks[index], backward=begin))
        saved.sort(key=lambda one: one.packed)
        return dataclasses.replace(plain, segments=tuple(segments), saved=tuple(saved), blocks=tuple(reversed(spans)))

    return dataclasses.replace(step(False), elementwise=step(True))


def random_step(draw, count):
    seconds = [draw.uniform(0.005, 0.05) for _ in range(count)]
    return step_of(
        [draw.randint(5, 60) * MB for _ in range(count)],
        [draw.randint(5, 60) * MB for _ in range(count)],
        seconds,
        [draw.uniform(0.01, 0.5) * one for one in seconds],
    )


def random_problem(seed, count=4):
    draw = random.Random(seed)
    footprint = random_step(draw, count)
    channels = {"ssd": Channel(draw.uniform(0.3, 4) * 1e9, draw.uniform(0.3, 4) * 1e9)}
    windows = (Windows(draw.randint(1, 80) * MB, draw.randint(1, 80) * MB),)
    problem = Problem(footprint.plain, channels, {"ssd": 10**12}, 0, windows, mixed=footprint.mixed)
    most = uniform(problem, Placement.KEEP).timeline.peak_bytes
    least = smallest(problem).timeline.must_fit_bytes
    return dataclasses.replace(problem, budget_bytes=smallest_budget(least + int((most - least) * draw.uniform(0, 1))))


def same(one: Footprint, other: Footprint):
    return (one.segments, one.saved, one.blocks) == (other.segments, other.saved, other.blocks)


def test_all_and_none_of_the_blocks_are_the_two_steps_themselves():
    step = random_step(random.Random(0), 3)
    assert step.mixed.blocks == ("layers.0", "layers.1", "layers.2")
    assert same(step.mixed.step(frozenset()), step)
    assert same(step.mixed.step(frozenset(step.mixed.blocks)), step.elementwise)


@pytest.mark.parametrize("seed", range(8))
def test_each_block_is_as_in_the_step_it_comes_from(seed):
    draw = random.Random(seed)
    step = random_step(draw, 4)
    chosen = frozenset(name for name in step.mixed.blocks if draw.random() < 0.5)
    found = step.mixed.step(chosen)
    for span in found.blocks:
        own = step.elementwise if span.name in chosen else step
        (usual,) = [one for one in own.blocks if one.name == span.name]
        moved = span.backward - usual.backward
        saved = [one for one in own.saved if one.unit == span.name]
        later = [dataclasses.replace(one, needed=one.needed + moved, released=one.released + moved) for one in saved]
        assert [one for one in found.saved if one.unit == span.name] == later
        assert found.backward_s[span.name] == pytest.approx(own.backward_s[span.name])
        assert all(found.segments[one.needed].unit == span.name for one in later)
    assert len(found.saved) == sum(len([one for one in found.saved if one.unit == name]) for name in found.units)


def test_what_clocks_say_does_not_make_more_compute_faster():
    step = step_of([9 * MB] * 2, [9 * MB] * 2, [1.0] * 2, [0.1] * 2)
    fast = step.elementwise.at_pace(0.5)
    found = dataclasses.replace(step, elementwise=fast).mixed.step(frozenset(["layers.1"]))
    assert found.step_s == pytest.approx(step.step_s)


def test_a_block_that_saves_no_less_is_no_choice():
    step = step_of([9 * MB] * 2, [9 * MB] * 2, [1.0] * 2, [0.1] * 2)
    assert dataclasses.replace(step, elementwise=step.plain).mixed.blocks == ()
    with_choice = make_problem(dataclasses.replace(step, elementwise=step.plain), describe_hardware(gpu="l4"), 10**12)
    assert uniform(with_choice, Placement.ELEMENTWISE) is None


def test_the_choice_makes_no_step_slower_and_keeps_its_limits():
    reduced = 0
    for seed in range(10):
        problem = random_problem(seed)
        usual, found = solve(problem.plain), solve(problem)
        assert found is not None
        again = dataclasses.replace(problem).play(dict(found.placements), found.windows, "again").timeline
        assert again.must_fit_bytes <= problem.limit_bytes
        assert again.step_s == found.timeline.step_s
        if usual is not None:
            assert found.timeline.step_s <= usual.timeline.step_s
        reduced += any(one.elementwise for one in found.placements.values())
    assert reduced > 2  # it is worth it in some of them


def test_a_cheap_recompute_takes_the_place_of_a_slow_drive_and_of_whole_blocks():
    """Half of what is saved is worth a hundredth of the compute, and the drive takes ten times as long as that."""
    step = step_of([50 * MB] * 4, [50 * MB] * 4, [0.1] * 4, [0.002] * 4)
    problem = Problem(step.plain, {"ssd": Channel(2e8, 2e8)}, {"ssd": 10**12}, 0, (Windows(0, 0),), mixed=step.mixed)
    kept = uniform(problem, Placement.KEEP).timeline.must_fit_bytes
    problem = dataclasses.replace(problem, budget_bytes=smallest_budget(kept - 150 * MB))
    found = solve(problem)
    assert sum(one is Placement.ELEMENTWISE for one in found.placements.values()) == 3
    assert found.timeline.step_s == pytest.approx(step.step_s + 3 * 0.002)
    assert solve(problem.plain).timeline.step_s > step.step_s + 0.1


def test_it_is_tried_before_a_budget_is_too_small():
    step = step_of([20 * MB] * 4, [80 * MB] * 4, [0.1] * 4, [0.002] * 4)
    problem = Problem(step.plain, {}, {}, 0, (Windows(0, 0),), may_recompute=False, mixed=step.mixed)
    reduced = uniform(problem, Placement.ELEMENTWISE).timeline.must_fit_bytes
    problem = dataclasses.replace(problem, budget_bytes=smallest_budget(reduced))
    assert solve(problem.plain) is None
    found = solve(problem)
    assert set(found.placements.values()) == {Placement.ELEMENTWISE}
    assert smallest(problem).timeline.must_fit_bytes == reduced


@pytest.mark.parametrize("seed", range(3))
def test_a_choice_over_all_kinds_is_no_slower_with_it(seed):
    draw = random.Random(seed)
    step = random_step(draw, 4)
    hardware = describe_hardware(gpu="24GB", tflops=80, pcie="1GB/s", ssd="500MB/s", ram="64GB")
    kept = uniform(make_problem(step, hardware, 10**12), Placement.KEEP).timeline.must_fit_bytes
    budget = smallest_budget(int(100 * MB + draw.uniform(0.3, 0.9) * (kept - 100 * MB)))
    usual, found = (choose(one, hardware, budget, Allowed()) for one in (step.plain, step))
    assert found.problem.fits(found.solution)
    assert usual is None or found.step_s <= usual.step_s


def with_weights(step, weight):
    """``step`` with gradients, and with as much state as weights."""

    def one(step):
        count = len(step.units)
        return dataclasses.replace(
            step, base_bytes=2 * weight * count, gradient_bytes=weight * count, state_bytes=weight * count,
            weights=dict.fromkeys(step.units, UnitWeights(weight, weight, weight)),
        )  # fmt: skip

    return dataclasses.replace(one(step), elementwise=one(step.elementwise))


def test_it_is_chosen_where_all_would_fit_but_weights_and_state_are_waited_for():
    step = with_weights(step_of([20 * MB] * 4, [20 * MB] * 4, [0.01] * 4, [0.005] * 4), 80 * MB)
    hardware = describe_hardware("24GB", tflops=80, pcie="5GB/s", ssd="3GB/s", ram="64GB")
    allowed = Allowed(state="ssd", weights="ssd")
    found = choose(step, hardware, 600 * MB, allowed)
    problem = problem_of(step, hardware, 600 * MB, found.held, allowed)
    kept = problem.play(Choices(problem).uniform(Placement.KEEP), problem.windows[0], "keep")
    assert problem.fits(kept)
    assert found.step_s < kept.timeline.step_s
    assert all(one.elementwise for one in found.solution.placements.values())


def test_steps_that_go_through_other_blocks_are_not_put_together():
    step = random_step(random.Random(0), 3)
    skipping = dataclasses.replace(step.elementwise, blocks=step.elementwise.blocks[:2])
    assert dataclasses.replace(step, elementwise=skipping).mixed.blocks == ("layers.0", "layers.1")
    names = list(step.units)
    other = dict(zip(names, reversed(names), strict=True))
    reverse = dataclasses.replace(
        step.elementwise,
        segments=tuple(dataclasses.replace(one, unit=other[one.unit]) for one in step.elementwise.segments),
        saved=tuple(dataclasses.replace(one, unit=other[one.unit]) for one in step.elementwise.saved),
        blocks=tuple(dataclasses.replace(one, name=other[one.name]) for one in step.elementwise.blocks),
    )
    assert dataclasses.replace(step, elementwise=reverse).mixed.blocks == ()
