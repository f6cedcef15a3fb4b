"""MeZO on models of one's own: the bits of a second implementation, in memory and on a tier, and what is refused."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, OffloadConfigError, OffloadError, attach
from hf_offload.optimizers.mezo import MeZO
from tests.numerics.test_mezo import ReferenceMeZO

INPUTS = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))
CLASSES = torch.arange(8) % 4
EPS, STEPS = 1e-2, 4


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


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.states, self.last = nn.LSTM(16, 16, 2, dropout=0.3, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.states(x[:, None].repeat(1, 3, 1))[0][:, -1])


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.pixels = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.pixels(x.view(8, 4, 2, 2).repeat(1, 1, 2, 2)).mean((2, 3)))


def made(kind):
    torch.manual_seed(0)
    model = kind()
    next(model.parameters()).requires_grad_(kind is not Recurrent)
    return model


def groups_of(model):
    trained = [one for one in model.parameters() if one.requires_grad]
    return [
        {"params": trained[::2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": trained[1::2], "lr": 2e-2, "weight_decay": 0},
    ]


def loss_of(model, step):
    return nn.functional.cross_entropy(model(INPUTS + step), CLASSES)


@pytest.mark.parametrize("restore", ["reference", "pristine"])
@pytest.mark.parametrize("tier", [None, "ram"])
@pytest.mark.parametrize("kind", [normed, Tied, Odd, Recurrent, Convolved])
def test_models_of_ones_own_have_the_bits_of_a_second_implementation(kind, tier, restore):
    """With schedule, decay, and a forward pass in train mode between the steps."""
    ours, theirs = made(kind), made(kind)
    if tier:
        attach(ours, OffloadConfig(tier="none", params=tier, min_bytes=256, memory_budget="1KiB"))
    optimizer = MeZO(groups_of(ours), ours, eps=EPS, restore=restore)
    groups = groups_of(theirs)
    reference = ReferenceMeZO(theirs, groups, EPS, restore)
    for step in range(STEPS):
        for mine, other in zip(optimizer.param_groups, groups, strict=True):
            mine["lr"] = other["lr"] = other["lr"] * 0.9
        found = optimizer.step(lambda step=step: loss_of(ours, step))
        row = optimizer.log.rows[-1]
        expected = reference.step(row.seed, lambda model, step=step: loss_of(model, step))
        assert (found.item(), row.gradient) == expected
        for model in (ours, theirs):
            torch.manual_seed(step)
            with torch.no_grad():
                model(INPUTS)
    state = {name: one.clone() for name, one in ours.state_dict().items()}
    assert all(torch.equal(state[name], one) for name, one in theirs.state_dict().items())


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": True}, "eps=True: give a number above 0"),
        ({"seed": 1.5}, r"seed=1\.5: give a whole number"),
        ({"seed": 1 << 64}, "give a whole number of 64 bits"),
        ({"lr": float("inf")}, "lr=inf of group 0"),
        ({"lr": "1e-3"}, "lr='1e-3' of group 0"),
        ({"weight_decay": None}, "weight_decay=None of group 0"),
    ],
)
def test_options_of_another_kind_are_refused(options, message):
    model = nn.Linear(2, 2)
    with pytest.raises(OffloadConfigError, match=message):
        MeZO(model.parameters(), model, **options)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda: nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn)), "weight is torch.float8_e4m3fn"),
        (lambda: nn.Parameter(torch.eye(3).to_sparse()), "weight is torch.sparse_coo"),
        (lambda: nn.Parameter(torch.ones(1).expand(4)), "weight has elements that share memory"),
        (nn.UninitializedParameter, "weight has no shape yet"),
    ],
)
def test_weights_that_cannot_move_are_refused(weight, message):
    model = nn.Module()
    model.weight = weight()
    with pytest.raises(OffloadConfigError, match=message):
        MeZO(model.parameters(), model)


def test_what_is_no_model_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(OffloadConfigError, match="was given function"):
        MeZO(model.parameters(), lambda: model(torch.ones(2)))


def another_weight(model, optimizer):
    model.weight = nn.Parameter(torch.zeros(2, 2))


def another_dtype(model, optimizer):
    model.double()


def no_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = float("nan")


def a_rate_below_0(model, optimizer):
    optimizer.param_groups[0]["lr"] = -1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_weight, "weight is another weight than when MeZO was made"),
        (another_dtype, "or has another shape, dtype or device"),
        (no_rate, "lr=nan of group 0"),
        (a_rate_below_0, r"lr=-0\.001 of group 0"),
    ],
)
def test_what_has_changed_since_the_last_step_is_refused_before_weights_move(change, message):
    model = nn.Linear(2, 2)
    optimizer = MeZO(model.parameters(), model)
    optimizer.step(lambda: model(torch.ones(2)).sum())
    change(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(OffloadError, match=message):
        optimizer.step(lambda: model(torch.ones(2)).sum())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert len(optimizer.log.rows) == 1


def test_a_rate_that_changes_between_losses_and_update_is_refused():
    model = nn.Linear(2, 2)
    optimizer = MeZO(model.parameters(), model)
    optimizer.evaluate(lambda: model(torch.ones(2)).sum())
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(OffloadConfigError, match="lr=nan of group 0"):
        optimizer.step()
    assert not any(one.isnan().any() for one in model.parameters())


@pytest.mark.parametrize(
    ("closure", "message"),
    [
        (lambda model, optimizer: optimizer.step(lambda: torch.ones(())), r"A closure of MeZO has called its step\(\)"),
        (lambda model, optimizer: model.weight.sum().sign() * 3e38, "differ by more than their dtype can hold"),
        (lambda model, optimizer: torch.tensor(True), "return the loss, a tensor of one number"),
        (lambda model, optimizer: torch.eye(1).to_sparse(), "return the loss, a tensor of one number"),
        (lambda model, optimizer: [], "returned list"),
    ],
)
def test_closures_that_give_no_loss_are_refused_and_weights_go_back(closure, message):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = MeZO(model.parameters(), model, restore="pristine")
    with pytest.raises(OffloadError, match=message):
        optimizer.step(lambda: closure(model, optimizer))
    assert not model.weight.any()
    assert not any(row.updates for row in optimizer.log.rows)
    optimizer.step(lambda: model.weight.sum())  # it goes on


def test_micro_batches_are_averaged():
    found = []
    for closure in (
        lambda model: [loss_of(model, 0), loss_of(model, 1)],
        lambda model: loss_of(model, 0) / 2 + loss_of(model, 1) / 2,
    ):
        model = made(Tied)
        optimizer = MeZO(model.parameters(), model, lr=1e-2)
        found.append(
            (optimizer.step(lambda model=model, closure=closure: closure(model)), optimizer.projected_gradient)
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("call", [copy.deepcopy, copy.copy, pickle.dumps])
def test_it_is_not_copied_without_its_log(call):
    model = nn.Linear(2, 2)
    with pytest.raises(OffloadError, match=r"make one for the other model, and load state_dict\(\)"):
        call(MeZO(model.parameters(), model))
