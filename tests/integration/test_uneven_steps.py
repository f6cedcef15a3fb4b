"""Steps of a run with a budget that are not like those before: of micro-batches of other lengths, or broken off."""

import gc
import logging
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_offload import OffloadConfig, attach
from hf_offload.engine.hooks import Engine
from hf_offload.errors import OffloadPlanError
from hf_offload.planning.batch_shape import shape_of
from hf_offload.planning.measuring import StepMeter
from hf_offload.planning.shapes import OverBudget
from hf_offload.state.gradients import has_gradient_here
from hf_offload.state.optimizer import streaming_of
from tests.helpers.tables import rows
from tests.helpers.train import copied
from tests.helpers.training_steps import end_step, weight_bytes

WIDTH, ROWS = 64, 64
_STEPS = 16


class Block(GradientCheckpointingLayer):
    def __init__(self, inner=256):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(F.gelu(self.up(hidden)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


class Trouble(Exception):
    pass


@pytest.fixture(autouse=True)
def known_machine(machine_with_drive):
    """Plans do not depend on how busy the machine is."""
    machine_with_drive(1e9)


def net():
    torch.manual_seed(0)
    return Net()


def batch(length=ROWS):
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(length))


def attached(model, tmp_path, share=100, optimizer=None):
    """A session with a budget that is this multiple of the weights' bytes."""
    budget = int(share * weight_bytes(model))
    config = OffloadConfig(
        tier="auto", directory=tmp_path, memory_budget=budget, min_bytes=4096, recompute_elementwise="off"
    )
    session = attach(model, config)
    if optimizer is not None:
        session.prepare_optimizer(optimizer)
    return session


def streamed(model, tmp_path, optimizer):
    """All of its weights' gradients and state are on a drive. Activations stay: what is on its way differs by run."""
    session = attach(model, OffloadConfig(tier="none", optimizer="ssd", directory=tmp_path, min_bytes=64))
    session.prepare_optimizer(optimizer)
    return session


def raising(error):
    def hook(*args):
        raise error

    return hook


def break_off(model, place, error, holds=False, length=ROWS):
    """A micro-batch that raises in the middle of its forward or backward. The error ``holds`` its graph, or lets go of it."""
    block = model.blocks[2]
    hook = raising(error)
    handle = block.up.weight.register_hook(hook) if place == "backward" else block.up.register_forward_hook(hook)
    with pytest.raises(type(error)):
        model(batch(length)).backward()
    handle.remove()
    model.zero_grad()
    if not holds:
        error.__traceback__ = None
        gc.collect()


def footprint_of(session):
    """What was measured of the micro-batch, but for times and what was on its way."""
    footprint = session.planned.footprint
    saved = sorted((one.unit, one.nbytes) for one in footprint.saved)
    return saved, sorted(one.name for one in footprint.blocks), footprint.gradient_bytes


@pytest.mark.parametrize("error", [Trouble(), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("then", ["repeated", "left out"])
@pytest.mark.parametrize("holds", [False, True])
def test_what_broke_off_is_no_part_of_what_is_measured(place, then, error, holds, tmp_path):
    found = []
    for breaks in (False, True):
        model = net()
        session = attached(model, tmp_path)
        length = ROWS if then == "repeated" else 2 * ROWS
        if breaks:
            break_off(model, place, error, holds)
        model(batch(length)).backward()
        model.zero_grad()
        session.end_step()
        found.append((list(session._automatic._decisions._shapes.plans), footprint_of(session)))
        session.detach()
    assert found[0] == found[1]


def test_a_forward_without_gradients_after_one_that_broke_off_hides_nothing(tmp_path):
    model = net()
    session = attached(model, tmp_path)
    error = KeyboardInterrupt()
    break_off(model, "forward", error, holds=True)
    with torch.no_grad():
        model(batch())
    model(batch()).backward()
    session.end_step()
    assert len(session.planned.shape.forwards) == 1
    session.detach()


def test_what_it_took_until_it_broke_off_is_known(tmp_path):
    model = net()
    session = attached(model, tmp_path)
    break_off(model, "backward", Trouble())
    assert session.most_measured_bytes is None
    model(batch(1))
    assert session.most_measured_bytes > weight_bytes(model)
    session.detach()


def test_weights_that_left_for_a_longer_one_come_back_if_it_breaks_off(tmp_path):
    model = net()
    optimizer = adamw(model)
    session = attached(model, tmp_path, 2.7, optimizer)
    weights, limits = weight_bytes(model), []

    def look(*args):
        limits.append(weights if session.residency is None else session.residency.limit_bytes)

    model.blocks[0].register_forward_pre_hook(look)
    for _ in range(4):
        model(batch()).backward()
        end_step(optimizer, session)
    break_off(model, "forward", Trouble(), length=2 * ROWS)
    model(batch()).backward()
    session.detach()
    assert limits[-3] == limits[-1] > limits[-2]


def test_a_forward_in_a_handler_of_errors_did_not_break_off(tmp_path):
    model = net()
    session = attached(model, tmp_path)
    try:
        raise Trouble
    except Trouble:
        one = model(batch())
        other = model(batch())
        (one + other).backward()
        session.end_step()
    assert len(session.planned.shape.forwards) == 2
    session.detach()


def test_the_engine_shows_the_storages_that_it_holds(tmp_path):
    model = net()
    session = attach(model, OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=4096, read_ahead_bytes=1 << 20))
    seen = []

    def look(gradient):
        storages = {id(one): one.nbytes() for one in session._engine.resident_storages()}
        seen.append((sum(storages.values()), session._engine.resident_bytes()))

    model.blocks[2].up.weight.register_hook(look)
    model(batch()).backward()
    session.detach()
    assert seen[0][0] >= seen[0][1] > 0


def test_what_graphs_hold_that_are_still_alive_is_counted_in_a_step_that_is_measured(tmp_path, monkeypatch):
    kept, peaks = torch.zeros(1 << 20, dtype=torch.uint8), []
    for storages in ([], [kept.untyped_storage()]):
        monkeypatch.setattr(Engine, "resident_storages", lambda engine, storages=storages: storages)
        model = net()
        session = attached(model, tmp_path)
        model(batch()).backward()
        session.end_step()
        peaks.append(session.most_measured_bytes)
        session.detach()
    assert peaks[1] - peaks[0] == pytest.approx(1 << 20, rel=0.3)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_gradients_on_a_tier_stay_there_in_the_next_micro_batch(set_to_none, clips, tmp_path):
    """Also after clipping, which reads and writes them where they are."""
    model = net()
    optimizer = adamw(model)
    weights = weight_bytes(model)
    session = attached(model, tmp_path, 3.2 if clips else 2.5, optimizer)
    seen = []
    model.blocks[0].register_forward_pre_hook(
        lambda *args: seen.append(sum(p.nbytes for p in model.parameters() if has_gradient_here(p)))
    )
    for _ in range(4):
        for _ in range(3):
            model(batch(16)).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        session.end_step()
    assert streaming_of(optimizer) is not None
    assert max(seen) < 0.5 * weights  # the plan lets those of a layer stay
    assert shape_of(model, (batch(16),), {}).gradient_bytes == (0 if set_to_none else weights)
    model(batch(16)).backward()
    assert shape_of(model, (batch(16),), {}).gradient_bytes == weights
    session.detach()


def test_a_zero_that_is_added_to_zeros_is_positive_and_takes_no_zeros(tmp_path, monkeypatch):
    """As autograd adds them. ``-0.0`` is equal to ``0.0``, but not after a division."""
    model = net()
    weight = model.blocks[0].up.weight
    weight.register_hook(lambda gradient: gradient * -0.0)
    optimizer = adamw(model)
    session = streamed(model, tmp_path, optimizer)
    model(batch()).backward()
    signs = [weight.grad.signbit().any()]
    optimizer.zero_grad(set_to_none=False)
    monkeypatch.setattr(torch, "zeros", raising(AssertionError("there is no need for zeros")))
    model(batch()).backward()
    signs.append(weight.grad.signbit().any())
    session.detach()
    assert signs == [True, False]


def test_zeros_in_memory_that_others_hold_stay_theirs(tmp_path):
    model = net()
    weight = model.blocks[0].up.weight
    optimizer = adamw(model)
    session = streamed(model, tmp_path, optimizer)
    model(batch()).backward()
    held = weight.grad
    assert not held._is_view()  # as in memory: another tensor would hold its memory
    optimizer.zero_grad(set_to_none=False)
    assert not held.any()
    assert weight.grad is held
    session.detach()


def test_gradients_of_earlier_micro_batches_are_known_wherever_they_are(tmp_path):
    model = net()
    optimizer = adamw(model)
    session = streamed(model, tmp_path, optimizer)
    meter = StepMeter(model, lambda: 0, lambda: 0.0, lambda: 0)
    meter.begin()
    for _ in range(2):
        meter.begin_forward([batch()], True)
        model(batch()).backward()
    meter.end()
    footprints = [meter.footprint(number) for number in range(2)]
    session.detach()
    assert [one.accumulates for one in footprints] == [False, True]
    assert footprints[1].segments[0].gradient_bytes == 0


def test_gradients_that_are_looked_at_before_the_step_take_no_memory(tmp_path):
    """On a CPU, they are read where they are."""
    live = []
    for clips in (False, True):
        model = net()
        optimizer = adamw(model)
        session = streamed(model, tmp_path, optimizer)
        meter = StepMeter(model, lambda: 0, lambda: 0.0, lambda: 0)
        meter.begin()
        for _ in range(2):
            meter.begin_forward([batch()], True)
            model(batch(1)).backward()
            assert meter._gradients == 0
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        meter.end()
        footprints = [meter.footprint(number) for number in range(2)]
        session.detach()
        assert not footprints[1].looks_at_gradients
        assert footprints[1].gradient_bytes == footprints[1].segments[0].gradient_bytes == 0
        live.append(footprints[0].segments[-1].live_bytes)
    assert live[0] == live[1]


IN_TURN = _STEPS * [(16, 128), (16, 16), (128, 16)]
"""The lengths of each step's micro-batches: the longest one comes in different places."""


def by_chance(seed):
    """The same, at random."""
    rng = random.Random(seed)
    return [(rng.choice((16, 64, 128)), rng.choice((16, 64, 128))) for _ in range(_STEPS)]


def uneven_steps(model, optimizer, lengths, session=None, clips=False):
    """Losses and weights of steps with micro-batches of these lengths."""
    losses = []
    for step in range(_STEPS):
        for length in lengths[step]:
            loss = model(batch(length))
            loss.backward()
            losses.append(loss.item())
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        end_step(optimizer, session)
    return losses, copied(list(model.parameters()))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("budget", "seed"),
    rows(
        [(budget, seed) for budget in (2.7, 3.2, 3.6, 4.2, 5.0) for seed in (0, 1, 2, 3, None)],
        quick=[(2.7, 0), (3.2, 0), (3.6, None), (5.0, 1), (5.0, None)],
    ),
)
def test_the_micro_batch_that_needs_most_says_where_weights_and_state_are(budget, seed, tmp_path, caplog):
    """Small ones have room for them, and would bring them back each time. A ``budget`` is a multiple of the weights."""
    lengths = IN_TURN if seed is None else by_chance(seed)
    model = net()
    expected, weights = uneven_steps(model, adamw(model), lengths)
    model = net()
    optimizer = adamw(model)
    session = attached(model, tmp_path, budget, optimizer)
    with caplog.at_level(logging.INFO, "hf_offload"):
        losses, found = uneven_steps(model, optimizer, lengths, session)
    session.detach()
    assert losses == expected
    assert all(map(torch.equal, weights, found))
    assert "A step took" not in caplog.text
    assert caplog.text.count("Measuring again") <= 3


def test_what_comes_twice_in_the_first_step_of_its_kind_was_not_known_either():
    warnings = OverBudget(100)
    shape = shape_of(net(), (batch(),), {})
    said = warnings.of_step([(shape, None, 110), (shape, None, 110)])
    assert len(said) == 1
    assert said[0].startswith("The first step of its kind")
    assert warnings.of_step([(shape, None, 110)])[0].startswith("A step took")
    assert not warnings.of_step([(shape, None, 110)])


@pytest.mark.parametrize(
    ("budget", "lengths", "clips"),
    rows(
        [
            *((budget, count * (128,), False) for budget in (3.6, 4.2, 4.6, 5.0) for count in (2, 3, 4)),
            *((budget, (16,), True) for budget in (2.6, 3.0, 3.4)),
        ],
        quick=[(4.6, 3 * (128,), False), (5.0, 4 * (128,), False), (2.6, (16,), True), (3.4, (16,), True)],
    ),
)
def test_micro_batches_that_are_all_alike_keep_the_budget(budget, lengths, clips, tmp_path, caplog):
    """What is measured of the second one has the gradients of the first one, once. Clipping looks at gradients."""
    model = net()
    optimizer = adamw(model)
    session = attached(model, tmp_path, budget, optimizer)
    with caplog.at_level(logging.INFO, "hf_offload"):
        uneven_steps(model, optimizer, _STEPS * [lengths], session, clips)
    session.detach()
    assert "A step took" not in caplog.text
    assert caplog.text.count("Measuring again") <= 2


def test_a_measured_step_does_not_let_any_number_of_bytes_wait_to_be_written(tmp_path, monkeypatch):
    waiting, apply = [], Engine.apply_plan

    def note(engine, plan):
        if not plan.placements:  # all that can be moved is
            waiting.append(plan.write_behind_bytes)
        apply(engine, plan)

    monkeypatch.setattr(Engine, "apply_plan", note)
    model = net()
    optimizer = adamw(model)
    session = attached(model, tmp_path, 3.2, optimizer)
    uneven_steps(model, optimizer, by_chance(1), session)
    session.detach()
    first, *others = waiting[1:]  # after the engine's own, before there is a plan
    assert len(others) > 3
    assert first == session.config.memory_budget // 16
    assert max(others) < session.config.memory_budget // 2


class Tied(nn.Module):
    """A model whose embedding, which is its head as well, takes more than a third of its weights."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(512, WIDTH)
        self.blocks = nn.ModuleList(Block(2 * WIDTH) for _ in range(3))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        scores = F.linear(hidden, self.embedding.weight)
        return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("kib", rows(range(900, 1160, 20), quick=[980, 1020]))
def test_nothing_goes_back_to_where_a_step_has_shown_that_it_does_not_fit(kib, tmp_path):
    """A budget that is too small is refused in the first steps, not after weights have come and gone several times."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = adamw(model)
    session = attached(model, tmp_path, (kib << 10) / weight_bytes(model), optimizer)
    steps = 0
    try:
        while steps < 12:
            steps += 1
            for length in (64, 32):
                model(torch.randint(512, (2, length))).backward()
            end_step(optimizer, session)
    except OffloadPlanError:
        assert steps <= 4
    session.detach()
