"""The same step through the engine and the simulation: both hold the same bytes, record by record, at every moment."""

import dataclasses
import itertools
import random

import pytest

from hf_offload.forecast.counting import count_footprint
from hf_offload.forecast.fake import fake_mode
from hf_offload.methods.protocol import OptimizerBytes
from hf_offload.plan import rules
from hf_offload.plan.footprint import Footprint, Saved, Segment
from hf_offload.plan.plan import Keeping, Placement, Plan
from hf_offload.plan.simulate import _Player, simulate
from hf_offload.plan.timeline import Channel, Windows
from tests.helpers.activation_heavy_models import batch, build
from tests.helpers.handmade_footprints import footprint_of
from tests.helpers.virtual_time import stage

KB = 1 << 10
RING = 64 * KB


def channels_of(draw, on_host):
    def rate():
        return draw.uniform(20, 400) * KB

    if on_host:
        return {"ssd": Channel(rate(), rate())}
    link = draw.choice((0.3, 1, 4)) * rate()
    return {
        "ram": Channel(link, 4 * rate(), link_bytes_per_s=link),
        "ssd": Channel(rate(), rate(), link_bytes_per_s=link, ring_bytes=RING),
    }


def random_footprint(draw):
    """Several tensors a unit, some of them also held by others, asked for in groups and in no strict order."""
    units = [f"layers.{index}" for index in range(draw.randint(3, 7))]
    saved_by = {unit: draw.randint(0, 4) for unit in units}
    segments, packed = [], []
    for unit in units:
        segments.append(Segment(unit, False, 0, 0, draw.uniform(0.01, 0.3)))
        for _ in range(saved_by[unit]):
            if draw.random() < 0.7:
                segments.append(Segment(unit, False, 0, 0, draw.uniform(0.01, 0.3)))
            packed.append((unit, len(segments)))
    end_of_forward = len(segments)
    times = {}
    order = list(range(len(packed)))[::-1]
    for place in range(len(order) - 1):
        if draw.random() < 0.2:
            order[place], order[place + 1] = order[place + 1], order[place]
    segments.append(Segment(units[-1], True, 0, 0, draw.uniform(0.01, 0.3)))
    for number in order:
        if draw.random() < 0.7 or number == order[0]:
            segments.append(Segment(packed[number][0], True, 0, 0, draw.uniform(0.01, 0.4)))
        times[number] = len(segments) - 1
    segments += [Segment(units[0], True, 0, 0, 0.1)] * 2
    saved = []
    for number, (unit, begin) in enumerate(packed):
        begin, needed = min(begin, end_of_forward), times[number]
        released = needed + draw.randint(1, 2)
        gone = draw.choice([begin, begin, begin + draw.randint(0, 2), released])
        saved.append(Saved(unit, draw.randint(1, 40) * KB + draw.randint(0, 9), begin, gone, needed, released))
    return Footprint(
        segments=tuple(segments),
        saved=tuple(saved),
        blocks=(),
        units=dict.fromkeys(units),
        classes=dict.fromkeys(units, "Block"),
        parameters=0,
        base_bytes=0,
        gradient_bytes=0,
        optimizer_step_bytes=0,
        optimizer_step_s=0.0,
        source="counted",
    )


def counted_footprint(name):
    with fake_mode():
        model, inputs = build(name, 0.1), batch()
    return count_footprint(
        model,
        inputs,
        cost=lambda flops, moved, dtype: flops / 1e10 + moved / 1e9,
        optimizer=OptimizerBytes(0, 0, 0),
        min_bytes=4096,
        as_on_cuda=False,
    )


def both(footprint, placements, channels, windows):
    """What the engine holds, and what the simulation says that it holds; and when each of them ends."""
    on_host = "ram" not in channels
    kept = {unit: nbytes for unit, nbytes in footprint.saved_bytes.items() if placements[unit] is Placement.KEEP}
    plan = Plan(
        default=Placement.KEEP,
        placements=placements,
        min_bytes=1,
        read_ahead_bytes=windows.read_ahead_bytes,
        write_behind_bytes=windows.write_behind_bytes,
        keeping=Keeping(kept, 0, 1 << 40),
        reason="a test",
    )
    with stage(plan, channels, on_host) as real:
        real.play(footprint)  # the engine learns the order
        held, end_s = real.play(footprint)
    simulated = Watched(footprint, placements, channels, windows, details=True)
    timeline = simulated.play()
    return held, simulated.held, end_s, timeline


class Watched(_Player):
    """Notes which saved bytes, by their numbers, the engine would hold in each segment."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.held = []

    def _compute(self, begin, end):
        moving = {item.number for item in self._schedule.items}
        for index in range(begin, end):
            super()._compute(index, index + 1)
            staying = (
                number
                for number, one in enumerate(self._footprint.saved)
                if number not in moving and one.packed <= index < one.released
            )
            self.held.append({*staying, *(item.number for item in self._schedule.items if item.held)})


def check(footprint, placements, channels, windows):
    held, simulated, end_s, timeline = both(footprint, placements, channels, windows)
    for index, (real, said) in enumerate(zip(held, simulated, strict=True)):
        assert real == said, f"moment {index}: only the engine holds {real - said}, only the simulation {said - real}"
    assert end_s == pytest.approx(timeline.step_s - footprint.optimizer_step_s)
    assert timeline.resident_bytes >= max(sum(footprint.saved[number].nbytes for number in moment) for moment in held)
    # Without details, moments in which nothing happens are played at once.
    assert simulate(footprint, placements, channels, windows) == dataclasses.replace(timeline, memory=(), intervals=())
    return held


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    monkeypatch.setattr(rules, "RING_BYTES", RING)
    monkeypatch.setattr(rules, "_CHUNK_BYTES", 16 * KB)


WINDOWS = [
    Windows(0, 0),
    Windows(0, 30 * KB),
    Windows(50 * KB, 20 * KB),
    Windows(60 * KB, 0),
    Windows(120 * KB, 1 << 40),
]


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "staged"])
@pytest.mark.parametrize(
    "windows", WINDOWS, ids=lambda windows: f"{windows.read_ahead_bytes}-{windows.write_behind_bytes}"
)
def test_a_random_step_holds_the_same_bytes_in_both(windows, on_host):
    moved = 0
    for seed in range(12):
        draw = random.Random(seed)
        footprint = random_footprint(draw)
        channels = channels_of(draw, on_host)
        places = [Placement.KEEP, *(Placement(tier) for tier in channels), Placement("ssd")]
        placements = {unit: draw.choice(places) for unit in footprint.units}
        held = check(footprint, placements, channels, windows)
        moved += any(number not in now for now in held for number in range(len(footprint.saved)))
    assert moved


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "staged"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_a_model_holds_the_same_bytes_in_both(name, on_host):
    footprint = counted_footprint(name)
    average = rules.window_bytes(sum(footprint.saved_bytes.values()), len(footprint.saved), 1)
    draw = random.Random(name)
    channels = channels_of(draw, on_host)
    step_s = sum(segment.seconds for segment in footprint.segments)
    # As fast as it takes to move all of it in the time of the step.
    scale = sum(footprint.saved_bytes.values()) / step_s / channels["ssd"].store_bytes_per_s
    fields = ("store_bytes_per_s", "load_bytes_per_s", "link_bytes_per_s")
    channels = {
        tier: dataclasses.replace(
            one, **{field: getattr(one, field) and getattr(one, field) * scale for field in fields}
        )
        for tier, one in channels.items()
    }
    for windows, place in itertools.product((Windows(6 * average, 8 * average), Windows(average, average)), channels):
        check(footprint, dict.fromkeys(footprint.units, Placement(place)), channels, windows)


def test_what_has_not_left_an_accelerator_when_backward_comes_near_stays():
    # The first is copied from 1.1 to 3.1 s, the second until 5.1 s; backward begins at 3.3 s, with the third.
    footprint = footprint_of([10 * KB, 10 * KB, 20 * KB], [1.1] * 3, [0] * 3)
    slow = Channel(5 * KB, 50 * KB, link_bytes_per_s=5 * KB)
    placements = dict.fromkeys(footprint.units, Placement.RAM)
    held = check(footprint, placements, {"ram": slow}, Windows(25 * KB, 1 << 40))
    second = [1 in now for now in held]
    assert second == [False, False, True, True, True, False]
