"""What the search takes for granted without playing a step is never better than what a played step does."""

import dataclasses
import itertools

import pytest

from hf_offload.plan.bounds import Bounds
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import Choices
from hf_offload.plan.timeline import Channel
from tests.unit.test_elementwise_choice import random_problem as random_problem_with_elementwise
from tests.unit.test_placement import random_problem

# One of a step whose blocks may recompute their elementwise operations, and one of a step whose blocks may not.
PROBLEMS = pytest.mark.parametrize("make_problem", [random_problem, random_problem_with_elementwise])


def of_one_kind(problem, placement):
    """Every step in which some units are placed so, and the others kept."""
    choices = Choices(problem)
    for chosen in itertools.product((Placement.KEEP, placement), repeat=len(choices.units)):
        for windows in problem.windows:
            placements = choices.place(dict(zip(choices.units, chosen, strict=True)))
            yield problem.play(placements, windows, "all of them")


@PROBLEMS
@pytest.mark.parametrize("slower", [1, 10])
@pytest.mark.parametrize("seed", range(1, 20))
def test_a_step_that_fits_takes_no_less_than_said(make_problem, seed, slower):
    problem = make_problem(seed)
    channels = {
        tier: Channel(one.store_bytes_per_s / slower, one.load_bytes_per_s / slower)
        for tier, one in problem.channels.items()
    }
    problem = dataclasses.replace(problem, channels=channels)
    choices = Choices(problem)
    bounds = Bounds(problem, choices)
    for placement in choices.options:
        fitting = [one.timeline.step_s for one in of_one_kind(problem, placement) if problem.fits(one)]
        assert bounds.least_s(placement) <= min(fitting, default=float("inf")) + 1e-9


@PROBLEMS
@pytest.mark.parametrize("grain", [1, 2])
@pytest.mark.parametrize("seed", range(1, 20))
def test_what_stays_has_to_fit(make_problem, seed, grain):
    problem = make_problem(seed)
    choices = Choices(problem)
    bounds = Bounds(problem, choices)
    nothing_leaves = problem.play(choices.uniform(Placement.KEEP), problem.windows[0], "").timeline
    for order, placement in itertools.product((choices.units, choices.units[::-1]), choices.options[1:]):
        least = list(bounds.least_bytes(order, grain, placement))
        assert least[0] == nothing_leaves.must_fit_bytes
        assert least == sorted(least, reverse=True)
        for part, said in enumerate(least):
            placements = choices.place(dict.fromkeys(order[: part * grain], placement))
            played = problem.play(placements, problem.windows[0], "").timeline
            assert said <= played.must_fit_bytes
            if placement is Placement.ELEMENTWISE:  # nothing moves
                assert said == played.must_fit_bytes


@PROBLEMS
@pytest.mark.parametrize("seed", range(1, 4))
def test_what_is_computed_again_takes_its_time(make_problem, seed):
    problem = make_problem(seed)
    choices = Choices(problem)
    for placement in choices.options:
        for step in of_one_kind(problem, placement):
            assert problem.least_s(step.placements) <= step.timeline.step_s + 1e-9


def test_the_bounds_of_blocks_that_recompute_a_part_leave_something_out():
    """They are not what holds of every step."""
    said = [
        (Bounds(problem, Choices(problem)).least_s(placement), problem.footprint.step_s)
        for problem in map(random_problem_with_elementwise, range(1, 8))
        for placement in Choices(problem).options
        if placement.elementwise
    ]
    assert sum(least_s > step_s + 1e-6 for least_s, step_s in said) > len(said) // 2
