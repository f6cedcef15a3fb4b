"""What the search takes for granted without playing a step is never better than what a played step does."""

import dataclasses
import itertools

import pytest

from hf_offload.plan.bounds import Bounds
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import Choices
from hf_offload.plan.timeline import Channel
from tests.unit.test_placement import random_problem


def of_one_kind(problem, placement):
    """Every step in which some units are placed so, and the others kept."""
    choices = Choices(problem)
    for chosen in itertools.product((Placement.KEEP, placement), repeat=len(choices.units)):
        for windows in problem.windows:
            placements = choices.place(dict(zip(choices.units, chosen, strict=True)))
            yield problem.play(placements, windows, "all of them")


@pytest.mark.parametrize("slower", [1, 10])
@pytest.mark.parametrize("seed", range(1, 20))
def test_a_step_that_fits_takes_no_less_than_said(seed, slower):
    problem = random_problem(seed)
    channels = {
        tier: Channel(one.store_bytes_per_s / slower, one.load_bytes_per_s / slower)
        for tier, one in problem.channels.items()
    }
    problem = dataclasses.replace(problem, channels=channels)
    choices = Choices(problem)
    bounds = Bounds(problem)
    for placement in choices.options:
        fitting = [one.timeline.step_s for one in of_one_kind(problem, placement) if problem.fits(one)]
        assert bounds.least_s(placement) <= min(fitting, default=float("inf")) + 1e-9


@pytest.mark.parametrize("grain", [1, 2])
@pytest.mark.parametrize("seed", range(1, 20))
def test_what_stays_has_to_fit(seed, grain):
    problem = random_problem(seed)
    choices = Choices(problem)
    bounds = Bounds(problem)
    nothing_leaves = problem.play(choices.uniform(Placement.KEEP), problem.windows[0], "").timeline
    for order, placement in itertools.product((choices.units, choices.units[::-1]), choices.options[1:]):
        least = list(bounds.least_bytes(order, grain, placement))
        assert least[0] == nothing_leaves.must_fit_bytes
        assert least == sorted(least, reverse=True)
        for part, said in enumerate(least):
            placements = choices.place(dict.fromkeys(order[: part * grain], placement))
            played = problem.play(placements, problem.windows[0], "").timeline
            assert said <= played.must_fit_bytes


@pytest.mark.parametrize("seed", range(1, 4))
def test_what_is_computed_again_takes_its_time(seed):
    problem = random_problem(seed)
    choices = Choices(problem)
    for placement in choices.options:
        for step in of_one_kind(problem, placement):
            assert problem.least_s(step.placements) <= step.timeline.step_s + 1e-9
