"""MeZO: its bits next to those of a second implementation, its log, and what it refuses."""

import copy
import gzip
import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, OffloadConfigError, OffloadError, attach
from hf_offload.errors import StorageError
from hf_offload.methods.mezo import MeZO, MezoLog, replay, trajectory
from hf_offload.methods.mezo.directions import checksum
from tests.helpers.live_bytes import peak_live_bytes
from tests.helpers.tables import rows
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights
from tests.helpers.train import assert_same, saved_and_loaded

STEPS = 4
EPS = 1e-2
NAME = "model.embed_tokens.weight"


class ReferenceMeZO:
    """As the authors wrote it, out of place, with groups."""

    def __init__(self, model, groups, eps):
        self.model, self.groups, self.eps = model, groups, eps
        ids = {id(p): group for group in groups for p in group["params"]}
        self.parameters = [(p, ids[id(p)]) for p in model.parameters() if id(p) in ids and p.requires_grad]

    def directions(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for p, group in self.parameters:
            yield p, group, torch.normal(mean=0, std=1, size=p.data.size(), dtype=p.dtype, generator=generator)

    def perturb(self, seed, scaling_factor):
        for p, _, z in self.directions(seed):
            p.data = p.data + scaling_factor * z * self.eps

    @torch.no_grad()
    def step(self, seed, loss_of):
        training = self.model.training
        self.model.eval()
        self.perturb(seed, 1)
        loss1 = loss_of(self.model)
        self.perturb(seed, -2)
        loss2 = loss_of(self.model)
        self.perturb(seed, 1)
        self.model.train(training)
        gradient = ((loss1 - loss2) / (2 * self.eps)).item()
        for p, group, z in self.directions(seed):
            step = gradient * z + group["weight_decay"] * p.data if group["weight_decay"] else gradient * z
            p.data = p.data - group["lr"] * step
        return loss1.item(), gradient


def groups_of(model):
    """Three, each with a rate and a decay of its own, not in the model's order."""
    trained = [one for one in model.parameters() if one.requires_grad]
    options = [(3e-3, 0.0), (1e-3, 0.1), (2e-3, 0.01)]
    return [{"params": trained[2 - n :: 3], "lr": lr, "weight_decay": decay} for n, (lr, decay) in enumerate(options)]


def loss_of(model, step, name="llama"):
    return model(**tiny_batch(name, seed=step)).loss.float()


def run(model, optimizer, first=0, steps=STEPS, loss=loss_of):
    """Steps with a rate that falls; their losses."""
    losses = []
    for step in range(first, first + steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        losses.append(optimizer.step(lambda step=step: loss(model, step)).item())
    return losses


def made(**options):
    """A model and its optimizer."""
    model = tiny_model("llama")
    return model, MeZO(model.parameters(), model, **{"eps": EPS, "lr": 1e-2} | options)


def check_against_the_reference(ours, theirs, loss):
    """Steps of both, with groups and a schedule, have the same losses, gradients and weights."""
    optimizer, groups = MeZO(groups_of(ours), ours, eps=EPS), groups_of(theirs)
    reference = ReferenceMeZO(theirs, groups, EPS)
    for step in range(STEPS):
        for mine, other in zip(optimizer.param_groups, groups, strict=True):
            mine["lr"] = other["lr"] = other["lr"] * 0.9
        found = optimizer.step(lambda step=step: loss(ours, step))
        row = optimizer.log.rows[-1]
        assert (found.item(), row.gradient) == reference.step(row.seed, lambda model, step=step: loss(model, step))
        for model in (ours, theirs):  # a forward in training mode comes in between
            torch.manual_seed(step)
            with torch.no_grad():
                loss(model, step)
    assert len({row.seed for row in optimizer.log.rows}) == STEPS
    assert any(row.gradient for row in optimizer.log.rows)
    assert_same({key: one.clone() for key, one in ours.state_dict().items()}, dict(theirs.state_dict()))
    assert ours.training
    assert all(one.grad is None for one in ours.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", rows(["gpt2", "bert", "t5", "llama"], quick=["gpt2", "t5", "llama"]))
def test_bits_of_a_second_implementation(name, dtype):
    ours, theirs = tiny_model(name).to(dtype), tiny_model(name).to(dtype)
    for model in (ours, theirs):
        next(iter(model.parameters())).requires_grad_(name != "t5")
    check_against_the_reference(ours, theirs, lambda model, step: loss_of(model, step, name))


# -- models of one's own ------------------------------------------------------------------------------------------------

INPUTS = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))


def normed():
    """Its buffers are statistics of training, which no step of MeZO changes."""
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(self.first(x).relu()))


class Odd(nn.Module):
    """A number, no number, a transposed weight, one that is not used, and one of another dtype."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.transposed = nn.Parameter(torch.randn(32, 16).t())
        self.unused = nn.Linear(40, 40)
        self.last = nn.Linear(32, 4).double()

    def forward(self, x):
        return self.last((x @ self.transposed * self.scale).double())


@pytest.mark.parametrize("tier", [None, "ram"])
@pytest.mark.parametrize("kind", [normed, Tied, Odd])
def test_models_of_ones_own_have_the_bits_of_a_second_implementation(kind, tier):
    torch.manual_seed(0)
    ours = kind()
    theirs = copy.deepcopy(ours)
    if tier:
        attach(ours, OffloadConfig(tier="none", params=tier, min_bytes=256, memory_budget="1KiB"))
    classes = torch.arange(8) % 4
    loss = lambda model, step: nn.functional.cross_entropy(model(INPUTS + step), classes)  # noqa: E731
    check_against_the_reference(ours, theirs, loss)


# -- directions, modes and random numbers -------------------------------------------------------------------------------


def test_losses_are_computed_in_eval_mode_without_a_graph_and_modes_come_back():
    model = tiny_model("gpt2", dropout=0.5)
    model.transformer.h[1].eval()
    before = [one.training for one in model.modules()]
    seen = []

    def closure():
        loss = model(**tiny_batch("gpt2", seed=0)).loss
        seen.append((loss.requires_grad, any(one.training for one in model.modules())))
        return loss

    MeZO(model.parameters(), model).step(closure)
    assert seen == [(False, False)] * 2
    assert [one.training for one in model.modules()] == before


def test_an_autocast_around_the_step_does_not_reuse_casts_of_other_weights():
    found = []
    for inside in (True, False):
        model, optimizer = made()
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):

            def closure(model=model, inside=inside):
                with torch.autocast("cpu", torch.bfloat16) if inside else torch.no_grad():
                    return loss_of(model, 0)

            optimizer.step(closure)
        found.append((optimizer.projected_gradient, weights(model)))
    assert found[0][0] != 0
    assert_same(found[1], found[0])


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(()), random.random, np.random.rand], ids=["torch", "python", "numpy"]
)
def test_both_losses_draw_the_same_numbers_and_the_next_step_draws_others(draw):
    model = nn.Linear(4, 4)
    optimizer = MeZO(model.parameters(), model)
    losses = []
    for _ in range(2):
        losses.append(optimizer.evaluate(lambda: model.weight.sum() * 0 + draw()).item())
        assert optimizer.projected_gradient == 0.0
    assert losses[0] != losses[1]


def test_micro_batches_are_averaged():
    found = []
    for closure in (
        lambda model: [loss_of(model, 0), loss_of(model, 1)],
        lambda model: loss_of(model, 0) / 2 + loss_of(model, 1) / 2,
    ):
        model, optimizer = made()
        loss = optimizer.step(lambda model=model, closure=closure: closure(model))
        found.append((loss, optimizer.projected_gradient))
    assert found[0] == found[1]


def test_a_step_needs_a_piece_of_a_direction():
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2)))
    optimizer = MeZO(model.parameters(), model, weight_decay=0.1)
    step = lambda: optimizer.step(lambda: torch.ones(()))  # noqa: E731
    step()
    assert peak_live_bytes(step) < 1024 * 1024 * 4 * 3 / 4


# -- log and resuming ---------------------------------------------------------------------------------------------------


def test_the_log_gives_every_step_and_survives_files(tmp_path):
    model = tiny_model("llama")
    initial = weights(model)
    optimizer = MeZO(groups_of(model), model, eps=EPS, seed=7)
    after = []
    for step in range(STEPS):
        run(model, optimizer, step, 1)
        after.append(weights(model))
    optimizer.save_log(tmp_path / "log")
    log = MezoLog.load(tmp_path / "log")
    assert log.rows == optimizer.log.rows
    assert log.setup == optimizer.log.setup
    for count in (1, 3, STEPS):
        rebuilt = copy.deepcopy(initial)
        replay(log, rebuilt, count)
        assert_same(rebuilt, after[count - 1])
    log.final = (log.final[0] + 1, *log.final[1:])
    with pytest.raises(OffloadError, match=r"after the last step. Something other than MeZO has changed them"):
        replay(log, copy.deepcopy(initial))


def test_a_weight_that_forwards_change_trains_like_the_reference_and_its_log_says_so():
    """``max_norm`` scales rows of an embedding in place when they are looked up."""
    model, expected = tiny_model("gpt2"), tiny_model("gpt2")
    for each in (model, expected):
        each.transformer.wpe.max_norm = 0.05
    initial = weights(model)
    optimizer = MeZO(model.parameters(), model, eps=EPS, lr=1e-2)
    loss = lambda model, step: loss_of(model, step, "gpt2")  # noqa: E731
    run(model, optimizer, steps=2, loss=loss)
    groups = [{"params": list(expected.parameters()), "lr": 1e-2, "weight_decay": 0}]
    reference = ReferenceMeZO(expected, groups, EPS)
    for step, row in enumerate(optimizer.log.rows):
        groups[0]["lr"] = row.rates[0]
        reference.step(row.seed, lambda model, step=step: loss(model, step))
    assert_same(weights(model), weights(expected))
    with pytest.raises(OffloadError, match=r"transformer.wpe.weight, are not what they were after the last step"):
        replay(MezoLog.from_state(optimizer.state_dict()), initial)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped_and_other_weights_are_refused():
    whole, optimizer = made()
    run(whole, optimizer, steps=2)
    model_state, state = saved_and_loaded([whole.state_dict(), optimizer.state_dict()])
    run(whole, optimizer, first=2, steps=2)
    again = tiny_model("llama", seed=3)
    other = MeZO(again.parameters(), again, eps=EPS, lr=1e-2)
    other.load_state_dict(state)
    again.load_state_dict(model_state | {NAME: model_state[NAME].flip(0)})
    before = weights(again)
    with pytest.raises(OffloadConfigError, match=rf"other weights than the model has: 1 of \d+ differ, such as {NAME}"):
        run(again, other, first=2, steps=1)
    assert_same(weights(again), before)
    again.load_state_dict(model_state)
    run(again, other, first=2, steps=2)
    assert other.log.rows == optimizer.log.rows
    assert_same(weights(again), weights(whole))
    initial = weights(tiny_model("llama"))
    replay(other.log, initial)
    assert_same(initial, weights(whole))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda log: gzip.compress(log[:-9]), "cannot be read as a log of MeZO"),
        (lambda log: log[:-9], "cannot be read as a log of MeZO"),
        (lambda log: b"", "cannot be read as a log of MeZO"),
        (lambda log: gzip.compress(b"[]"), "was not saved by MeZO, or is damaged"),
        *(
            (lambda log, name=name: without(log, name), f"damaged .*{name}")
            for name in ("setup", "rows", "initial", "final")
        ),
    ],
)
def test_a_damaged_log_is_refused(change, message, tmp_path):
    model, optimizer = made()
    run(model, optimizer, steps=2)
    path = tmp_path / "log"
    optimizer.save_log(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(OffloadConfigError, match=message):
        MezoLog.load(path)


def without(log, name):
    values = json.loads(gzip.decompress(log))
    del values["mezo"][name]
    return gzip.compress(json.dumps(values).encode())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: {}, f"weights=None, and the log has .*{NAME}"),
        (
            lambda weights: {name: one.double() for name, one in weights.items()},
            f"{NAME}.*float64.* the log has .*float32",
        ),
        (lambda weights: weights | {NAME: weights[NAME].to("meta")}, "'meta'.*draw other numbers"),
        (
            lambda weights: weights | {NAME: weights[NAME].flip(0)},
            f"1 of .* such as {NAME}, are not what they were before",
        ),
    ],
)
def test_a_replay_of_other_weights_is_refused(change, message):
    model, optimizer = made()
    initial = weights(model)
    run(model, optimizer, steps=1)
    with pytest.raises(OffloadConfigError, match=message):
        replay(optimizer.log, change(initial))


# -- errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 2])
def test_weights_come_back_whatever_the_closure_raises_and_the_log_knows_it(call):
    model, optimizer = made()
    initial = weights(model)
    calls = []

    def closure():
        calls.append(None)
        if len(calls) == call:
            raise KeyboardInterrupt
        return loss_of(model, 0)

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    after = weights(model)
    assert all(torch.allclose(one, after[key], rtol=0, atol=5e-7) for key, one in initial.items())
    assert model.training
    with pytest.raises(OffloadError, match="no losses to work with"):
        optimizer.step()
    run(model, optimizer, steps=2)
    assert [row.updates for row in optimizer.log.rows] == [False, True, True]
    replay(optimizer.log, initial)
    assert_same(initial, weights(model))


def test_weights_that_an_error_has_kept_from_moving_do_so_before_they_are_read(monkeypatch):
    """In memory, such as when a direction finds no memory."""
    found = []
    for fails in (False, True):
        model, optimizer = made()
        run(model, optimizer, steps=1)
        memory_for, calls = trajectory.memory_for, []

        def fail(*args, fails=fails, memory_for=memory_for, calls=calls):
            calls.append(None)
            if fails and len(calls) >= 3:
                raise torch.OutOfMemoryError
            return memory_for(*args)

        with monkeypatch.context() as patched:
            patched.setattr(trajectory, "memory_for", fail)
            with pytest.raises(torch.OutOfMemoryError if fails else KeyboardInterrupt):
                optimizer.step(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        after = {name: one.clone() for name, one in model.state_dict().items()}
        run(model, optimizer, first=1, steps=1)
        found.append((after, weights(model)))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("move", [0, 2])
def test_an_error_while_weights_change_is_not_forgotten(move, monkeypatch):
    """In the first move, and in the update, of the second weight."""
    model, optimizer = made()
    names = [name for name, _ in model.named_parameters()]
    make_moves, calls = trajectory.make_moves, []

    def fail(weight, *args):
        calls.append(weight)
        if len(calls) == move * len(names) + 2:
            weight.add_(1)
            raise StorageError("the drive has gone")
        make_moves(weight, *args)

    monkeypatch.setattr(trajectory, "make_moves", fail)
    with pytest.raises(StorageError):
        optimizer.step(lambda: torch.ones(()))
    monkeypatch.undo()
    for call in (
        lambda: optimizer.step(lambda: torch.ones(())),
        lambda: optimizer.save_log("unused"),
        lambda: model.state_dict()[names[1]].sum(),
        lambda: loss_of(model, 0),
    ):
        with pytest.raises(OffloadError, match=f"An earlier error came while MeZO changed the weight {names[1]}"):
            call()


# -- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made(eps=0.0), r"eps=0\.0: give a number of 0 or more, and above 0 for eps"),
        (lambda: made(lr=-1.0), r"lr=-1\.0"),
        (lambda: made(lr=float("inf")), "lr=inf"),
        (lambda: made(weight_decay=-1.0), r"weight_decay=-1\.0"),
        (
            lambda: moving(nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn))),
            r"weight \(torch.float8_e4m3fn",
        ),
        (lambda: moving(nn.Parameter(torch.eye(3).to_sparse())), "torch.sparse_coo"),
        (lambda: moving(nn.Parameter(torch.ones(2, device="meta"))), "weight .* on meta.* is not a whole weight"),
        (lambda: moving(nn.UninitializedParameter()), "is not a whole weight with data of its own"),
        (lambda: moving(nn.Parameter(torch.ones(2), requires_grad=False)), "0 require gradients: .*unfreeze"),
        (lambda: MeZO([nn.Parameter(torch.ones(2))], tiny_model("llama")), "1 parameters are not the model's"),
        (lambda: made()[1].add_param_group({"params": [nn.Parameter(torch.ones(2))]}), "parameters are fixed"),
        (
            lambda: made()[1].load_state_dict(made(eps=0.5)[1].state_dict()),
            r"saved with eps=0\.5, .* optimizer has 0\.01",
        ),
        (lambda: made()[1].load_state_dict(made(eps=0.5, seed=1)[1].state_dict()), "eps=.*; seed=1"),
        (
            lambda: made()[1].load_state_dict(MeZO((one := tiny_model("gpt2")).parameters(), one).state_dict()),
            "with weights=",
        ),
        (lambda: made()[1].load_state_dict(torch.optim.SGD([torch.ones(1)]).state_dict()), "not saved by MeZO"),
    ],
)
def test_what_cannot_be_trained_and_other_states_are_refused(make, message):
    with pytest.raises(OffloadConfigError, match=message):
        make()


def moving(weight):
    model = nn.Module()
    model.weight = weight
    return MeZO(model.parameters(), model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.weight.requires_grad_(False), "weight was frozen after MeZO was made"),
        (lambda model: setattr(model, "weight", nn.Parameter(torch.zeros(2, 2))), "or is another weight"),
        (lambda model: model.double(), "or has another shape, dtype or device"),
        (
            lambda model: model(torch.ones(2)).sum().backward(),
            "has a gradient, which MeZO does not use: pass a closure",
        ),
    ],
)
def test_what_has_changed_since_the_last_step_is_refused_before_weights_move(change, message):
    model = nn.Linear(2, 2)
    optimizer = MeZO(model.parameters(), model)
    optimizer.step(lambda: model(torch.ones(2)).sum())
    change(model)
    before = weights(model)
    with pytest.raises(OffloadError, match=message):
        optimizer.step(lambda: model(torch.ones(2)).sum())
    assert_same(weights(model), before)
    assert len(optimizer.log.rows) == 1


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model: torch.tensor(torch.nan), "the losses are nan .* not finite.*all are -100"),
        (lambda model: model.weight.sum().sign() * 3e38, "differ by more than their dtype can hold"),
        (lambda model: torch.tensor(True), "return the loss, a tensor of one number"),
        (lambda model: torch.zeros(2), r"returned a tensor of shape \(2,\)"),
        (lambda model: None, "returned NoneType"),
        (lambda model: [], "returned list"),
    ],
)
def test_closures_that_give_no_loss_are_refused_and_weights_go_back(loss, message):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = MeZO(model.parameters(), model)
    with pytest.raises(OffloadError, match=message):
        optimizer.step(lambda: loss(model))
    assert model.weight.abs().max() < 1e-6
    assert not any(row.updates for row in optimizer.log.rows)
    optimizer.step(lambda: model.weight.sum())  # it goes on


def test_a_loss_with_few_digits_is_noticed_once(caplog):
    model, optimizer = made()
    for _ in range(2):
        optimizer.step(lambda: model.lm_head.weight.sum().to(torch.bfloat16))
    assert caplog.text.count("the loss is torch.bfloat16, which has too few digits") == 1


def test_checksums_see_every_bit_and_the_order():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        one = torch.randn(40, 50).to(dtype)
        other = one.clone()
        assert checksum(one) == checksum(other) == checksum(one.T.contiguous().T)
        assert len({checksum(each) for each in (one, one.flip(0), one.flip(1), one.T)}) == 4
        other.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[one.element_size()])[3, 4] ^= 1
        assert checksum(one) != checksum(other)


# -- a session's optimizer ----------------------------------------------------------------------------------------------


def test_a_session_gives_an_optimizer_with_the_decays_and_the_schedule_of_the_scripts():
    ours, theirs = tiny_model("llama"), tiny_model("llama")
    decays = lambda model: [  # noqa: E731
        {"params": [one for one in model.parameters() if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in model.parameters() if one.dim() == 1], "weight_decay": 0.0},
    ]
    session = attach(ours, OffloadConfig(tier="none", memory_mode="mezo", memory_mode_kwargs={"eps": EPS}))
    given = torch.optim.SGD(decays(ours), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(given, 0.5)
    optimizer = session.prepare_optimizer(given)
    direct = MeZO(decays(theirs), theirs, eps=EPS)
    for step in range(STEPS):
        optimizer.step(lambda step=step: loss_of(ours, step))
        for group in direct.param_groups:
            group["lr"] = 1e-2 * 0.5**step
        direct.step(lambda step=step: loss_of(theirs, step))
        scheduler.step()
    assert [row.rates for row in optimizer.log.rows] == [row.rates for row in direct.log.rows]
    assert_same(weights(ours), weights(theirs))
    with pytest.raises(OffloadError, match="memory_mode='mezo' has no gradients, and backward has computed one"):
        loss_of(ours, 0).backward()
    with pytest.raises(OffloadError, match=r"no gradients, which clip_grad_norm_\(\) works on"):
        session.clip_grad_norm_(1.0)
    session.detach()
    ours.zero_grad()
    loss_of(ours, 0).backward()
