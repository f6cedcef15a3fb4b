"""A step on one of several GPUs that share a model."""

import pytest

from hf_offload.forecast.sharding import Sharding, shard
from hf_offload.plan.footprint import BlockSpan, Footprint, Saved, Segment, UnitWeights

# An embedding of 40 bytes, two blocks of 100, a head of 40; all of them trained, with state of twice their size.
SIZES = {"embed": 40, "h.0": 100, "h.1": 100, "head": 40}
TOTAL = sum(SIZES.values())
ORDER = [("embed", False), ("h.0", False), ("h.1", False), ("head", False)]
ORDER += [(unit, True) for unit, _ in reversed(ORDER)]
LIVE = 7
BUFFERS = 5


def step(trained=1.0, head_is_tied=False):
    segments, gradients = [], 0
    for unit, backward in ORDER:
        gradients += round(SIZES[unit] * trained) * backward
        segments.append(Segment(unit, backward, LIVE + gradients, gradients, 1.0))
    weights = {
        unit: UnitWeights(nbytes, round(nbytes * trained), round(2 * nbytes * trained))
        for unit, nbytes in SIZES.items()
    }
    total = TOTAL
    if head_is_tied:
        weights["head"] = UnitWeights(0, 0, 0, borrowed=(("embed", 0),))
        total -= SIZES["head"]
    return Footprint(
        segments=tuple(segments),
        saved=(Saved("h.0", 50, 2, 2, 6, 7),),
        blocks=(BlockSpan("h.0", 1, (1, 2), 6), BlockSpan("h.1", 1, (2, 3), 5)),
        units={"embed": None, "h.0": "h.0", "h.1": "h.1", "head": None},
        classes={},
        parameters=total // 2,
        base_bytes=BUFFERS + total + round(2 * total * trained),
        gradient_bytes=round(total * trained),
        optimizer_step_bytes=round(total * trained),
        optimizer_step_s=8.0,
        state_bytes=round(2 * total * trained),
        source="counted",
        weights=weights,
    )


def how(kind, master_ratio=1.0, gpus=2, rate=1e9):
    return Sharding(kind, gpus, rate, 2, master_ratio)


def whole(found, unit, backward):
    """What is in memory in addition to activations and gradients."""
    segment = found.segments[ORDER.index((unit, backward))]
    return segment.live_bytes - segment.gradient_bytes - LIVE


def test_with_ddp_every_gpu_has_everything_and_a_copy_of_its_gradients():
    found = shard(step(), how("ddp"))
    assert found.base_bytes == step().base_bytes + TOTAL
    assert found.weights == step().weights
    assert found.gradient_bytes == TOTAL


@pytest.mark.parametrize("gpus", [2, 4])
def test_with_fsdp2_every_gpu_has_its_part_of_all_and_groups_are_gathered(gpus):
    found = shard(step(), how("fsdp2", gpus=gpus))
    assert found.base_bytes == BUFFERS + round(3 * TOTAL / gpus)
    assert found.state_bytes == round(2 * TOTAL / gpus)
    assert found.gradient_bytes == round(TOTAL / gpus)
    assert found.optimizer_step_bytes == round(TOTAL / gpus)
    assert found.optimizer_step_s == 8.0 / gpus
    assert whole(found, "h.0", False) == 200  # its own weights, and the next block's meanwhile
    assert whole(found, "embed", False) == 140
    assert whole(found, "h.0", True) == 400  # gradients, too, until they have been reduced
    assert found.segments[-1].gradient_bytes == round(TOTAL / gpus)


def test_a_tied_weight_is_whole_all_the_time():
    found = shard(step(head_is_tied=True), how("fsdp2"))
    assert whole(found, "h.0", False) == 240
    assert whole(found, "embed", False) == whole(found, "head", False) == 140


def test_under_mixed_precision_fsdp2_has_weights_gradients_and_state_in_32_bits():
    found = shard(step(), how("fsdp2", master_ratio=2.0))
    assert found.base_bytes == BUFFERS + 3 * TOTAL
    assert found.gradient_bytes == TOTAL
    assert whole(found, "h.0", False) == 200  # gathered in 16 bits all the same


def test_frozen_weights_have_no_copies_in_32_bits():
    found = shard(step(trained=0.1), how("fsdp2", master_ratio=2.0))
    assert found.base_bytes == BUFFERS + (TOTAL + 28 + 4 * 28) // 2
    assert found.gradient_bytes == 28


def test_with_zero_2_weights_are_whole_and_masters_and_state_are_in_parts():
    found = shard(step(), how("zero2", master_ratio=2.0))
    assert found.base_bytes == BUFFERS + TOTAL + (2 * TOTAL + 4 * TOTAL) // 2
    assert found.gradient_bytes == TOTAL // 2
    assert found.weights["h.0"].weight_bytes == 100
    assert whole(found, "h.0", False) == 0
    assert whole(found, "h.0", True) == TOTAL  # a bucket, which has room for all


def test_with_zero_3_weights_are_in_parts_and_as_many_whole_as_its_limit_allows():
    found = shard(step(), how("zero3", master_ratio=2.0))
    assert found.base_bytes == BUFFERS + (TOTAL + 2 * TOTAL + 4 * TOTAL) // 2
    assert whole(found, "h.0", False) == TOTAL
    assert whole(found, "h.0", True) == 2 * TOTAL


def test_what_compute_hides_takes_no_time():
    assert shard(step(), how("fsdp2")).step_s == pytest.approx(step().step_s - 4.0)
    assert shard(step(), how("ddp")).step_s == pytest.approx(step().step_s)


def test_a_slow_link_is_waited_for():
    # Half of each group, in forward and in backward with its gradients, of which compute of the group before hides a second.
    sent = [20 - 0, 50 - 1, 50 - 1, 20 - 1, 40 - 0, 100 - 1, 100 - 1, 40 - 1]
    found = shard(step(), how("fsdp2", rate=1.0))
    assert found.step_s == pytest.approx(len(ORDER) + 4.0 + sum(sent))
    assert shard(step(), how("ddp", rate=1.0)).step_s == pytest.approx(len(ORDER) + 8.0 + TOTAL - 4.0)
    zero2 = shard(step(), how("zero2", rate=1.0))
    assert zero2.step_s == pytest.approx(len(ORDER) + 4.0 + 20 + 49 + 49 + 19 + TOTAL / 2)
