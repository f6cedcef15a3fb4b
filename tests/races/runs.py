"""One seed: some training steps over random graphs, through the real engine, compared with plain autograd bit by bit."""

import dataclasses
import random
from collections.abc import Iterator
from unittest.mock import patch

import torch

from hf_offload.plan import rules
from hf_offload.storage.ram import RamTier
from tests.helpers.controlled_tier import ControlledTier, Rig
from tests.helpers.seeded_scheduler import Workers
from tests.helpers.simulated_device import SimulatedDevice
from tests.races.graphs import Graph

SCENARIOS = ("once", "once", "once", "again", "dropped", "stumbling", "two")


@dataclasses.dataclass(frozen=True)
class Scene:
    """What one training step does with one or two graphs."""

    scenario: str
    graphs: tuple[Graph, ...]
    seed: int


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that a seed decides, but for the order in which things happen."""

    streams: int
    ram: bool
    room_bytes: int
    ring_bytes: int
    read_ahead_bytes: int | None
    write_behind_bytes: int
    failing_writes: float
    scenes: tuple[Scene, ...]

    @classmethod
    def random(cls, rng: random.Random) -> "Case":
        """Any case at all."""
        streams = rng.choice((1, 1, 2, 3))
        scenes = []
        for _ in range(rng.randint(2, 4)):
            scenario = rng.choice(SCENARIOS)
            count = 2 if scenario == "two" else 1
            graphs = tuple(Graph.random(rng, streams, stumbles=scenario == "stumbling") for _ in range(count))
            scenes.append(Scene(scenario, graphs, rng.randrange(1 << 30)))
        return cls(
            streams=streams,
            ram=rng.random() < 0.4,
            room_bytes=rng.choice((1 << 30, 1 << 30, 8 << 10)),
            ring_bytes=rng.choice((1 << 10, 6 << 10, 1 << 20)),
            read_ahead_bytes=rng.choice((None, 0, 2 << 10, 1 << 20)),
            write_behind_bytes=rng.choice((0, 1 << 10, 4 << 10, 1 << 20)),
            failing_writes=rng.choice((0.0, 0.0, 0.2)),
            scenes=tuple(scenes),
        )


def play(scene: Scene, device: SimulatedDevice, rig: Rig | None) -> Iterator[torch.Tensor]:
    """The gradients of one training step, not yet computed."""
    generator = torch.Generator().manual_seed(scene.seed)
    losses, leaves = [], []
    for graph in scene.graphs:
        values = [torch.rand(graph.size, generator=generator) for _ in range(3)]
        own = [device.launch(lambda output, value=value: output.copy_(value), graph.size) for value in values]
        leaves.append([leaf.requires_grad_() for leaf in own])
    for graph, own in zip(scene.graphs, leaves, strict=True):
        if rig is None:
            losses.append(graph.forward(device, own))
        else:
            with rig:
                losses.append(graph.forward(device, own))

    def backward(index: int, retain: bool = False) -> list[torch.Tensor]:
        loss, own = losses[index], leaves[index]
        ones = device.launch(lambda output: output.fill_(0.7), loss.size())
        return list(torch.autograd.grad(loss, own, ones, retain_graph=retain))

    if scene.scenario == "again":
        yield from backward(0, retain=True)
        yield from backward(0)
    elif scene.scenario == "stumbling":
        try:
            backward(0)
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError("a backward that raises went through")
    elif scene.scenario == "two":
        first = scene.seed % 2
        yield from backward(first)
        yield from backward(1 - first)
    elif scene.scenario == "once":
        yield from backward(0)


def expected(case: Case, seed: int) -> list[torch.Tensor]:
    """Plain autograd, on a device that does everything at once."""
    device = SimulatedDevice(seed, late_compute=True, streams=case.streams, paces=(1.0,))
    found = [gradient for scene in case.scenes for gradient in play(scene, device, None)]
    device.finish()
    assert not device.faults, device.faults
    return [gradient.clone() for gradient in found]


class _FailingTier(ControlledTier):
    """Some writes fail."""

    def __init__(self, rng: random.Random, share: float, room_bytes: int):
        super().__init__(room_bytes)
        self._random, self._share = rng, share

    def write(self, slot, buffer):
        self.fail_writes = self._random.random() < self._share
        return super().write(slot, buffer)


def random_case(seed: int) -> Case:
    """The case of ``seed``."""
    return Case.random(random.Random(seed))


def run(seed: int, trace: list[str] | None = None) -> list[str]:
    """What went wrong with ``seed``: nothing, as a rule. What ran, in its order, is appended to ``trace``."""
    rng = random.Random(seed)
    case = Case.random(rng)
    oldest = torch.ones((), requires_grad=True) * 1
    reference = expected(case, seed)
    workers = Workers(rng)
    device = SimulatedDevice(seed, late_compute=True, streams=case.streams)
    with workers.installed(), patch.object(rules, "RING_BYTES", case.ring_bytes):
        if case.ram:
            tier = RamTier(budget_bytes=case.room_bytes, arena_bytes=32 << 10)
        else:
            tier = _FailingTier(rng, case.failing_writes, case.room_bytes)
        rig = Rig(
            tier, read_ahead_bytes=case.read_ahead_bytes, write_behind_bytes=case.write_behind_bytes, device=device
        )
        rig.transfer.lock = workers.lock()
        device.every_turn = workers.turn
        device.trace = workers.trace = trace
        found = []
        for scene in case.scenes:
            found += play(scene, device, rig)
        device.finish()
        problems = [
            f"gradient {index} of {len(found)} differs"
            for index, (one, other) in enumerate(zip(found, reference, strict=True))
            if not torch.equal(one, other)
        ]
        # What a backward that raised had still to do, autograd keeps until a backward of something older has ended.
        oldest.backward()
        workers.finish()
        rig.transfer.reap()
        if (
            rig.transfer.live_records
            or rig.transfer.ledger.resident_bytes
            or rig.transfer.ledger.own_bytes
            or tier.stats.used_bytes
        ):
            problems.append("records or bytes are left")
        elif any(getattr(rig.transfer.mover, name) for name in ("_rescued", "_in_use", "_last_copy")):
            problems.append("the mover remembers slots that are free")
        else:
            rig.engine.close()
    problems += sorted({*device.faults, *workers.faults})
    if problems:
        problems.append(f"with {case}")
    return problems
