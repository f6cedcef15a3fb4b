"""How far each batch shape of a run has come, from unknown to corrected."""

import pytest

from hf_offload.plan.choosing import Choice
from hf_offload.plan.hardware import describe_hardware
from hf_offload.plan.problem import make_problem
from hf_offload.plan.state_placement import IN_MEMORY
from hf_offload.planning.batch_shape import BatchShape
from hf_offload.planning.shape_plan import ShapePlan
from hf_offload.planning.shapes import Shapes, Stage
from tests.helpers.handmade_footprints import MB, footprint_of

STEP = footprint_of([MB] * 2, [1.0] * 2, [MB] * 2)


def shape_of(length, forwards=1):
    return BatchShape(((("hidden", (length,)),),) * forwards, 1, 0, 0, "", training=True)


def plan_for(shape):
    problem = make_problem(STEP, describe_hardware("rtx4090"), 1 << 30)
    return ShapePlan.made_of(shape, STEP, Choice(IN_MEMORY, problem, problem.kept), MB)


def test_a_shape_goes_through_all_stages_and_back_where_something_else_is_in_memory():
    shapes, shape = Shapes(), shape_of(4)
    seen = [shapes.stage(shape)]
    plan = plan_for(shape)
    shapes.planned(plan)
    seen.append(shapes.stage(shape))
    assert not shapes.is_to_be_checked(plan)  # its first step is not like others
    plan.steps = 1
    assert shapes.is_to_be_checked(plan)
    shapes.checked(plan)
    seen.append(shapes.stage(shape))
    plan.steps = 2
    assert not shapes.is_to_be_checked(plan)
    shapes.corrected(plan_for(shape))
    seen.append(shapes.stage(shape))
    assert seen == list(Stage)
    shapes.forget()
    assert shapes.stage(shape) is Stage.UNKNOWN
    assert shapes.plan_for(shape) is None


def test_what_is_not_planned_is_neither_checked_nor_corrected():
    shapes, plan = Shapes(), plan_for(shape_of(4))
    with pytest.raises(AssertionError, match="UNKNOWN does not become CORRECTED"):
        shapes.corrected(plan)
    shapes.want(plan.shape)
    with pytest.raises(AssertionError, match="UNKNOWN does not become CHECKED"):
        shapes.checked(plan)


def test_a_shape_that_went_on_without_a_plan_is_measured_when_it_comes_again():
    shapes, begins, longer = Shapes(), shape_of(4), shape_of(4, forwards=2)
    shapes.planned(plan_for(begins))
    assert not shapes.is_wanted(begins)
    shapes.want(longer)
    assert shapes.is_wanted(begins)
    shapes.planned(plan_for(longer))
    assert not shapes.is_wanted(begins)
    assert shapes.plan_for(begins).shape == longer  # how many forwards come is not known


def test_a_smaller_batch_runs_under_the_plan_of_the_smallest_that_it_fits_into():
    shapes = Shapes()
    for length in (16, 8):
        shapes.planned(plan_for(shape_of(length)))
    assert shapes.plan_for(shape_of(4)).shape == shape_of(8)
    assert shapes.plan_for(shape_of(12)).shape == shape_of(16)
    assert shapes.plan_for(shape_of(32)) is None
