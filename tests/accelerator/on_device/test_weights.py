"""Weights that leave the device between uses: the bits of the run that keeps them there, whatever its streams do first."""

import copy
import gc
import io
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from hf_offload import OffloadConfig, attach, create_from_config
from hf_offload.errors import OffloadConfigError
from tests.accelerator.on_device.training import Case, batch, build, park, train_on_tiers
from tests.helpers.parked import let_weights_leave
from tests.helpers.tables import rows
from tests.helpers.tiny_models import NAMES
from tests.helpers.train import assert_same

pytestmark = pytest.mark.usefixtures("nothing_stays_behind")
SETTINGS = {
    "ram": {"params": "ram"},
    "ssd": {"params": "ssd"},
    "all": {"params": "ssd", "optimizer": "ssd", "tier": "ssd"},
}
# Every model and every setting, and for each pair of them a test among the slow ones.
SAMPLE = set(zip([*NAMES, "whisper"], itertools.cycle(SETTINGS), strict=False))
PAIRS = [
    pytest.param(*pair, marks=() if pair in SAMPLE else pytest.mark.full)
    for pair in itertools.product([*NAMES, "whisper"], SETTINGS)
]


@pytest.mark.parametrize(("name", "settings"), PAIRS)
def test_every_architecture_has_the_same_bits(late, name, settings):
    case = Case(name=name)
    expected = train_on_tiers(case)
    gc.collect()
    late.reseed(len(name))
    assert_same(expected, train_on_tiers(case, **SETTINGS[settings]))
    gc.collect()


RECOMPUTED = list(itertools.product((False, True), (None, "reentrant", "not reentrant")))


@pytest.mark.parametrize(("frozen", "checkpointing"), rows(RECOMPUTED, quick=RECOMPUTED[::2]))
def test_frozen_weights_accumulation_and_recomputation_have_the_same_bits(late, frozen, checkpointing):
    case = Case(name="llama", accumulation=2, checkpointing=checkpointing)
    expected = train_on_tiers(case, frozen=frozen)
    for seed, settings in enumerate(SETTINGS.values()):
        gc.collect()
        late.reseed(seed)
        assert_same(expected, train_on_tiers(case, frozen=frozen, **settings))
    gc.collect()


def test_weights_leave_the_device(late):
    model = build(Case())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    gc.collect()
    before = torch.accelerator.memory_allocated("late:0")
    session = park(model, params="ram")
    with torch.no_grad():
        model(**batch(Case(), 0))
    let_weights_leave(session)
    gc.collect()
    assert before - torch.accelerator.memory_allocated("late:0") > 0.9 * weights
    session.detach()


# -- what else reads weights ------------------------------------------------------------------------------------------------

LLAMA = Case(name="llama")


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    return model(**batch(LLAMA, seed)).loss


def step(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def generated(model: nn.Module) -> list[torch.Tensor]:
    words = batch(LLAMA, 0)["input_ids"][:, :4]
    with torch.no_grad():
        return [model.eval().generate(words, max_new_tokens=4, do_sample=False, pad_token_id=0)]


def saved(model: nn.Module) -> list[torch.Tensor]:
    """What was saved is as of then, also once the model has been trained."""
    file = io.BytesIO()
    state = model.state_dict()
    torch.save(state, file)
    found = list(torch.load(io.BytesIO(file.getvalue()), map_location="cpu").values())
    loss_of(model).backward()
    step(model)
    torch.__future__.set_swap_module_params_on_conversion(False)  # as on other accelerators
    try:
        model.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(True)
    return [*found, loss_of(model)]


def pickled(model: nn.Module) -> list[torch.Tensor]:
    """Storages are written after all tensors were pickled."""
    file = io.BytesIO()
    torch.save(list(model.parameters()), file)
    return torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=False)


def of_storages(model: nn.Module) -> list[torch.Tensor]:
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    loss_of(model)
    return [torch.empty(0, device="late:0").set_(storage) for storage in storages]


def copied(model: nn.Module) -> list[torch.Tensor]:
    copies = [copy.deepcopy(parameter) for parameter in model.parameters()]
    assert {type(one) for one in copies} == {nn.Parameter}
    whole = copy.deepcopy(model)
    return [*copies, loss_of(whole)]


def averaged(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        average = [torch.zeros_like(parameter) for parameter in model.parameters()]
        torch._foreach_lerp_(average, list(model.parameters()), 0.5)
        loss_of(model)
        torch._foreach_lerp_(average, list(model.parameters()), 0.5)
    return average


def aliased(model: nn.Module) -> list[torch.Tensor]:
    aliases = [parameter.data for parameter in model.parameters()]
    loss_of(model).backward()
    step(model)
    for alias in aliases:
        alias.mul_(1.5)
    return [*aliases, loss_of(model)]


def written_to(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
            parameter.data.add_(0.01)
        loss_of(model)
        for parameter in model.parameters():
            parameter.data[0] = 0.25
    return [loss_of(model)]


def stepped_by_a_fused_optimizer(model: nn.Module) -> list[torch.Tensor]:
    """Which counts no new versions."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for seed in range(2):
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss_of(model), *model.parameters()]


def regularized(model: nn.Module) -> list[torch.Tensor]:
    """A graph outside of the model's forwards saves weights, too, some of which are in memory by chance."""
    penalty = sum((parameter**2).sum() for parameter in model.parameters())
    loss = loss_of(model) + 0.01 * penalty
    loss_of(model, 1)
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters())]


def with_a_head_outside(model: nn.Module) -> list[torch.Tensor]:
    hidden = model.model(**{k: v for k, v in batch(LLAMA, 0).items() if k != "labels"}).last_hidden_state
    loss = functional.linear(hidden, model.lm_head.weight).logsumexp(-1).mean()
    loss_of(model, 1)
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters())]


def transformed(model: nn.Module) -> list[torch.Tensor]:
    weights = dict(model.named_parameters())
    inputs = batch(LLAMA, 0)

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (), inputs).loss

    found = torch.func.grad(loss)(weights)
    return [found[name] for name in weights]


def flattened(model: nn.Module) -> list[torch.Tensor]:
    return [nn.utils.parameters_to_vector(model.parameters())]


def without_a_forward_of_the_model(model: nn.Module) -> list[torch.Tensor]:
    hidden = model.model.embed_tokens(batch(LLAMA, 0)["input_ids"])
    first = model.lm_head(hidden).sum()
    loss_of(model, 1)
    first.backward()
    return [first, model.lm_head.weight.grad]


def of_two_forwards(model: nn.Module) -> list[torch.Tensor]:
    (loss_of(model) * loss_of(model, 1)).backward()
    return [parameter.grad for parameter in model.parameters()]


def differentiated_twice(model: nn.Module) -> list[torch.Tensor]:
    weights = list(model.parameters())
    first = torch.autograd.grad(loss_of(model), weights, create_graph=True)
    return list(torch.autograd.grad(sum((one**2).sum() for one in first), weights))


def accumulated_and_scaled(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("late", init_scale=1024.0)
    norms = []
    for number in range(2):
        scaler.scale(loss_of(model, number)).backward()
        scaler.scale(loss_of(model, number + 2)).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=number == 0)
    return [*norms, *model.parameters()]


USAGES: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    usage.__name__: usage
    for usage in (
        generated, saved, pickled, of_storages, copied, averaged, aliased, written_to, regularized,
        stepped_by_a_fused_optimizer, with_a_head_outside, transformed,
        flattened, without_a_forward_of_the_model, of_two_forwards, differentiated_twice,
        accumulated_and_scaled,
    )
}  # fmt: skip


@pytest.mark.parametrize(("usage", "place"), list(zip(USAGES, itertools.cycle(("ram", "ssd")))))
def test_whoever_reads_weights_reads_their_bits(late, usage, place):
    def found(**settings: str) -> list[torch.Tensor]:
        model = build(LLAMA)
        session = park(model, **settings)
        torch.manual_seed(7)
        values = [value.detach().cpu() for value in USAGES[usage](model)]
        session.detach()
        return values

    expected = found()
    gc.collect()
    late.reseed(len(usage))
    assert_same(expected, found(params=place))
    gc.collect()


class CopiesItsWeight(nn.Module):
    """A kernel of the device reads its arguments at once, and a copy when its stream gets there."""

    def __init__(self, value: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4096,), value))

    def forward(self, copied: torch.Tensor) -> None:
        copied.copy_(self.weight, non_blocking=True)


def test_memory_of_a_weight_that_another_stream_uses_is_no_other_one_s_before(late):
    model = nn.Sequential(*(CopiesItsWeight(float(number)) for number in range(4))).to("late:0")
    session = park(model, params="ram")
    here, there = torch.Stream(device="late:0"), torch.Stream(device="late:0")
    late.reseed(0, 0.0)  # each stream as late as it may
    copies = [torch.empty(4096, pin_memory=True) for _ in range(2)]
    with torch.no_grad():
        with here:
            model[0](copies[0])
        with there:
            model[0](copies[1])
        with here:
            for number in (1, 2, 3):
                model[number](torch.empty(4096, pin_memory=True))
    torch.accelerator.synchronize()
    assert [one.abs().max().item() for one in copies] == [0.0, 0.0]
    session.detach()


def test_training_holds_two_blocks_on_the_device(late):
    model = build(Case(name="llama", checkpointing="not reentrant"))
    session = park(model, params="ram")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    weights = session.residency
    here, units = [], weights._units.units
    for seed in range(3):
        weights._units.most_bytes = 0
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        here.append((weights.most_bytes, weights.bytes_in_memory, torch.accelerator.memory_allocated("late:0")))
    largest, second, *others = sorted((unit.nbytes for unit in units), reverse=True)
    most = (
        largest + second + min(others)
    )  # of the norm, whose operation in backward is the last one before those of blocks
    assert all(bytes_at_most <= most for bytes_at_most, _, _ in here)
    assert here[1] == here[2]
    session.detach()
    del optimizer, weights, units


def test_a_compiled_model_is_refused(late):
    model = build(LLAMA)
    model.compile(backend="eager")
    with pytest.raises(OffloadConfigError, match="params='none'"):
        attach(model, OffloadConfig(tier="none", params="ram", min_bytes=0))


def test_weights_of_several_processes_are_refused_before_they_are_made(late, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as launchers do
    config = GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=96, n_positions=32)
    with (
        torch.device("late:0"),
        pytest.raises(OffloadConfigError, match=r"2 train together.*--where fsdp2.*--where zero3"),
    ):
        create_from_config(GPT2LMHeadModel, config, config=OffloadConfig(tier="none", params="ram"))


def test_values_that_only_change_places_are_written(late):
    """Written by an address, without a new version: all rows and columns have the sums that they had."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).to("late:0")
    nn.init.eye_(model[0].weight)
    session = park(model, params="ram")
    let_weights_leave(session)
    model(torch.ones(1, 64, device="late:0"))
    session.residency.limit_bytes = 1 << 20
    weight = model[0].weight
    places = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    weight.data.copy_(torch.eye(64)[places])
    session.residency.limit_bytes = 1
    let_weights_leave(session)
    assert torch.equal(weight.detach().cpu(), torch.eye(64)[places])
    session.detach()


@pytest.mark.parametrize("tier", ["none", "ram"])
def test_weights_that_a_graph_has_saved_while_all_stayed_stay_until_its_backward(tier, late):
    gradients = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]).to("late:0")
        session = park(model, params="ram", tier=tier) if offloads else None
        inputs = torch.ones(4, 64, device="late:0")
        if session is not None:
            session.residency.limit_bytes = 1 << 20
            model(inputs).sum().backward()
            model.zero_grad()
        loss = model(inputs).sum()
        if session is not None:
            session.residency.limit_bytes = 1
        loss.backward()
        gradients.append([parameter.grad.cpu() for parameter in model.parameters()])
    assert_same(*gradients)
