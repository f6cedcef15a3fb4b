"""What a plan keeps in memory: counted, shared with what moves, and moved after all where there is no room for it."""

import pytest
import torch

from hf_offload.engine.record import State
from hf_offload.plan.plan import Keeping, Placement, Plan
from hf_offload.plan.problem import Problem, plan_of
from hf_offload.plan.search import solve
from hf_offload.plan.timeline import Channel, Windows
from tests.helpers.controlled_tier import Rig
from tests.helpers.handmade_footprints import MB, footprint_of

ONE = 64 * 64 * 4  # bytes of each tensor that is saved
PLENTY = 1 << 40


def leaf() -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def chain(x: torch.Tensor, length: int = 8) -> torch.Tensor:
    for _ in range(length):
        x = x.sin()  # saves its input
    return x.sum()


def kept(spare: int = PLENTY, resident: int = PLENTY, planned: int = 0) -> Rig:
    """Everything that the unit saves is to be kept."""
    return Rig(keep_units=frozenset(("the model",)), keeping=Keeping({"the model": planned}, spare, resident))


def run(rig: Rig, function=chain) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, with its graph, and what its gradient has to be."""
    x = leaf()
    (expected,) = torch.autograd.grad(function(x), x)
    with rig:
        result = function(x)
    rig.settle()
    result.backward()
    assert torch.equal(x.grad, expected)
    return result


def test_what_is_kept_is_counted_and_not_moved():
    rig = kept()
    result = run(rig)
    assert rig.stats.kept_bytes == 8 * ONE
    assert rig.stats.written_bytes == rig.stats.offloaded_bytes == 0
    assert rig.stats.peak_resident_bytes == 8 * ONE
    del result
    rig.assert_nothing_left()


def test_what_one_unit_moves_is_not_pinned_by_another_that_keeps():
    rig = Rig(keep_units=frozenset(("keeper",)))
    x = leaf()
    with rig:
        h = x * 2
        rig.engine.unit = "mover"
        moved = h.sin()
        rig.engine.unit = "keeper"
        result = (moved + h.cos()).sum()
    del h, moved
    rig.settle()
    assert rig.transfer.ledger.resident_bytes == 0, "the cosine's unit holds what the sine's has moved"
    assert rig.stats.deduplicated_bytes == ONE
    assert rig.stats.kept_bytes == 0
    result.backward()
    expected = leaf()
    (expected * 2).sin().add((expected * 2).cos()).sum().backward()
    assert torch.equal(x.grad, expected.grad)


@pytest.mark.parametrize(("planned", "spare", "moved"), [(8, 0, 0), (5, 0, 3), (5, 2, 1), (0, 0, 8)])
def test_what_a_unit_saves_beyond_its_plan_is_moved(planned, spare, moved):
    rig = kept(planned=planned * ONE, spare=spare * ONE)
    result = run(rig)
    assert rig.stats.kept_bytes == (8 - moved) * ONE
    assert rig.stats.offloaded_bytes == moved * ONE
    del result
    rig.assert_nothing_left()


@pytest.mark.parametrize("limit", [3, 5, 7])
def test_what_was_kept_leaves_where_there_is_no_room_for_more(limit):
    rig = kept(resident=limit * ONE)
    result = run(rig)
    assert rig.stats.peak_resident_bytes <= limit * ONE
    assert rig.stats.written_bytes == (8 - limit) * ONE
    del result
    rig.assert_nothing_left()


def test_what_backward_needs_last_leaves_first():
    rig = kept(resident=6 * ONE)
    x = leaf()
    with rig:
        result = chain(x)
    rig.settle()
    states = [record().state for record in rig.engine.prefetch.tape.records]
    assert states == [State.STORED] * 2 + [State.RESIDENT] * 6
    result.backward()


def test_where_nothing_can_leave_forward_goes_on():
    rig = Rig(keeping=Keeping({}, 0, ONE), write_behind_bytes=PLENTY)
    rig.tier.room_bytes = 0
    result = run(rig)
    assert rig.stats.refused_bytes == 8 * ONE
    del result
    rig.assert_nothing_left()


def plan_for(sizes: list[int], budget: int) -> Plan:
    footprint = footprint_of(sizes, [1.0] * len(sizes), [5 * MB] * len(sizes))
    windows = (Windows(0, 10 * MB),)
    problem = Problem(footprint, {"ssd": Channel(1e9, 1e9)}, {"ssd": PLENTY}, budget, windows, may_recompute=False)
    like = Plan(
        default=Placement.SSD,
        min_bytes=0,
        read_ahead_bytes=None,
        write_behind_bytes=0,
        reason="everything moves",
    )
    return plan_of(problem, solve(problem), like, "a test")


def test_units_that_the_plan_does_not_name_move_what_they_save():
    plan = plan_for([10 * MB, 10 * MB, 0], 130 * MB)
    assert "layers.2" not in plan.placements  # it saved nothing when it was measured: a layer that was skipped
    assert plan.placement("layers.2") is Placement.SSD
    assert plan.placement("layers.1") is Placement.KEEP


def test_a_plan_says_how_much_it_counts_with():
    plan = plan_for([10 * MB] * 6, 150 * MB)
    assert plan.keeping is not None
    kept = [unit for unit, placement in plan.placements.items() if placement is Placement.KEEP]
    assert 0 < len(kept) < 6
    assert plan.keeping.unit_bytes == dict.fromkeys(kept, 10 * MB)
    assert plan.keeping.resident_bytes >= plan.keeping.spare_bytes + 10 * MB * len(kept)
    assert plan.keeping.resident_bytes <= 50 * MB


def test_a_run_that_would_fit_with_twice_as_much_is_not_looked_at():
    assert plan_for([10 * MB] * 3, 1000 * MB).keeping is None
    assert plan_for([10 * MB] * 3, 150 * MB).keeping is not None


def test_what_stays_of_a_smaller_batch_is_no_more_of_a_larger_one():
    rig = Rig(read_ahead_bytes=2 * ONE)
    small = leaf()[:16].detach().requires_grad_()
    with rig:
        result = chain(small)  # eight records of a quarter each fit into the window
    rig.settle()
    result.backward()
    del result
    with rig:
        result = chain(leaf())
    staying = [record for reference in rig.engine.prefetch.tape.records if (record := reference()) and record.wanted]
    assert 0 < sum(record.nbytes for record in staying) <= 2 * ONE
    rig.settle()
    result.backward()
