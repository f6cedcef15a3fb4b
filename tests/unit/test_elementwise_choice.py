"""Recompute of elementwise operations in plans: a rule says when, and the step with it is another footprint."""

import dataclasses
import random

import pytest

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.choosing import can_hold, choose, least_memory
from hf_offload.plan.footprint import Saved, Segment
from hf_offload.plan.hardware import CARDS, Measurement, describe_hardware
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import make_problem, smallest_budget
from hf_offload.plan.refusal import find_choice
from hf_offload.plan.search import uniform
from hf_offload.plan.state_placement import Allowed
from tests.helpers.handmade_footprints import MB, footprint_of


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


def machine(memory_bandwidth, ssd="500MB/s", pcie="1GB/s"):
    return describe_hardware(gpu="24GB", tflops=80, memory_bandwidth=memory_bandwidth, pcie=pcie, ssd=ssd, ram="64GB")


FAST, SLOW = machine("100GB/s"), machine("3GB/s")


def kept_bytes(step):
    return uniform(make_problem(step, FAST, 10**12), Placement.KEEP).timeline.must_fit_bytes


@pytest.mark.parametrize("gpu", CARDS)
def test_every_card_reads_its_memory_four_times_as_fast_as_its_link(gpu):
    assert describe_hardware(gpu=gpu).repeats_elementwise


@pytest.mark.parametrize(("bandwidth", "repeats"), [("4GB/s", True), ("3.9GB/s", False)])
@pytest.mark.parametrize("links", [{"ssd": "500MB/s", "pcie": "1GB/s"}, {"ssd": "500MB/s", "pcie": "200MB/s,1GB/s"}])
def test_the_fastest_link_counts(bandwidth, repeats, links):
    assert machine(bandwidth, **links).repeats_elementwise is repeats


def test_the_step_with_it_is_the_one_that_was_measured_with_it():
    step = random_step(random.Random(0), 3)
    reduced = step.reduced
    assert (reduced.segments, reduced.saved) == (step.elementwise.segments, step.elementwise.saved)
    assert (reduced.is_reduced, step.plain.is_reduced) == (True, False)
    assert reduced.base_bytes == step.base_bytes


def test_a_block_cannot_run_twice_that_could_not_without():
    step = random_step(random.Random(0), 2)
    blocks = tuple(dataclasses.replace(span, not_twice="it counts") for span in step.blocks)
    step = dataclasses.replace(step, blocks=blocks)
    assert [span.not_twice for span in step.reduced.blocks] == ["it counts"] * 2
    assert step.reduced.recomputable == ()


def test_blocks_that_save_no_less_are_no_choice():
    step = step_of([9 * MB] * 2, [9 * MB] * 2, [1.0] * 2, [0.1] * 2)
    same = dataclasses.replace(step, elementwise=step.plain)
    assert same.reduced is None


@pytest.mark.parametrize("hardware", [FAST, SLOW])
def test_where_nothing_has_to_leave_nothing_is_computed_twice(hardware):
    step = step_of([50 * MB] * 4, [50 * MB] * 4, [0.1] * 4, [0.002] * 4)
    found = choose(step, hardware, smallest_budget(kept_bytes(step)), Allowed())
    assert set(found.solution.placements.values()) == {Placement.KEEP}
    assert not found.problem.footprint.is_reduced


@pytest.mark.parametrize("hardware", [FAST, SLOW])
def test_where_anything_has_to_leave_it_is_on_if_memory_is_fast(hardware):
    step = step_of([50 * MB] * 4, [50 * MB] * 4, [0.1] * 4, [0.002] * 4)
    budget = smallest_budget(kept_bytes(step) - MB)
    found = choose(step, hardware, budget, Allowed(may_recompute=False))
    placed = set(found.solution.placements.values())
    if hardware is FAST:
        assert placed == {Placement.KEEP}
        assert found.problem.footprint.is_reduced
        assert found.step_s == pytest.approx(step.step_s + 4 * 0.002)
    else:
        assert placed <= {Placement.KEEP, Placement.RAM, Placement.SSD}
        assert placed != {Placement.KEEP}


@pytest.mark.parametrize("hardware", [FAST, SLOW])
def test_it_is_on_before_a_budget_is_too_small(hardware):
    step = step_of([20 * MB] * 4, [80 * MB] * 4, [0.1] * 4, [0.002] * 4)
    nowhere = dataclasses.replace(hardware, room_bytes={tier: Measurement(0, "given") for tier in hardware.room_bytes})
    allowed = Allowed(state="none", weights="none", may_recompute=False)
    least = least_memory(step, nowhere, 10**9, allowed)
    budget = smallest_budget(least.solution.timeline.must_fit_bytes)
    assert least.problem.footprint.is_reduced
    found = choose(step, nowhere, budget, allowed)
    assert found.problem.footprint.is_reduced
    assert set(found.solution.placements.values()) == {Placement.KEEP}
    assert can_hold(step, nowhere, budget, allowed)
    assert choose(step.plain, nowhere, budget, allowed) is None
    with pytest.raises(OffloadPlanError) as refused:
        find_choice(step, nowhere, budget - (1 << 20), allowed)
    assert refused.value.smallest_bytes == budget


@pytest.mark.parametrize("seed", range(3))
def test_with_it_a_choice_over_all_kinds_keeps_its_limits(seed):
    draw = random.Random(seed)
    step = random_step(draw, 4)
    budget = smallest_budget(int(100 * MB + draw.uniform(0.3, 0.9) * (kept_bytes(step) - 100 * MB)))
    found = choose(step, FAST, budget, Allowed())
    assert found.problem.fits(found.solution)
    assert found.problem.footprint.is_reduced
    again = found.problem.play(found.solution.placements, found.solution.windows).timeline
    assert again.must_fit_bytes <= found.problem.limit_bytes
    assert again.step_s == found.step_s
