"""What weights, gradients and optimizer state do besides their bits: versions, errors, bytes that are read and written."""

import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint_sequential

from hf_offload.errors import OffloadConfigError
from hf_offload.planning.measuring import StepMeter
from hf_offload.state.gradients import parked_gradient
from hf_offload.state.optimizer import check_streamable, state_per_weight, streaming_of
from hf_offload.state.parked import Where
from hf_offload.state.registry import parked_of
from hf_offload.state.units import stepping
from tests.faults.failing_calls import Hang
from tests.helpers.parked import in_memory, leave_memory, parked
from tests.helpers.train import Run, adamw, batch, mlp, same, stream_in_parts, train
from tests.usages.models import quantised

# -- changes and errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("foreach", "parts", "params"), [(None, False, "none"), (True, False, "ssd"), (None, True, "ssd")]
)
def test_a_streamed_step_counts_as_many_changes_as_in_memory(foreach, parts, params, tmp_path, monkeypatch):
    if parts:
        stream_in_parts(monkeypatch)
    found = []
    for run in (Run("none", tmp_path), Run("ssd", tmp_path, params=params)):
        model = mlp()
        optimizer = adamw(run, model, foreach=foreach)
        versions = []
        for _ in range(2):
            loss = model(torch.ones(4, 96)).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            loss = model(torch.ones(4, 96)).square().mean()  # which an update has waited for
            versions.append([weight._version for weight in model.parameters()])
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            optimizer.zero_grad()
        found.append(versions)
    assert found[0] == found[1]


class CountsItsSteps(torch.optim.SGD):
    """With a step of its own, which is not known to take one parameter at a time."""

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        return super().step(closure)


def test_state_that_a_step_as_a_whole_makes_begins_to_leave_memory(tmp_path):
    model, run = mlp(), Run("ssd", tmp_path)
    optimizer = run.prepare(model, CountsItsSteps(model.parameters(), lr=0.01, momentum=0.9))
    train(run, model, optimizer, steps=1)
    buffers = [state["momentum_buffer"] for p, state in optimizer.state.items() if p.nbytes >= 4096]
    assert len(buffers) > 1
    moved = [parked_of(buffer) for buffer in buffers]
    # What is still being written as the step ends stays for code of the user, and is due to leave.
    assert all(one is not None and (one.is_away or one.write_was_cancelled) for one in moved)


def _of_lists(name, weight):
    """Call a function of lists with whatever it takes."""
    function, other = getattr(torch, name), torch.full_like(weight, 0.5)
    for more in ((), (0.5,), ([other],), ([other], 0.5), ([other], [other]), (0.5, 0.25)):
        try:
            return function([weight], *more)
        except (RuntimeError, TypeError):
            continue
    raise AssertionError(f"nothing that {name} takes was found")


def test_a_measured_step_counts_what_functions_of_lists_change():
    """Fused and foreach optimizers call them."""
    for name in sorted(name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")):
        versions = []
        for is_measured in (False, True):
            model = mlp()
            weight = next(model.parameters())
            meter = StepMeter(model, lambda: 0, lambda: 0.0, lambda: 0)
            if is_measured:
                meter.begin()
                meter.begin_forward([torch.ones(1)], True)
            with torch.no_grad():
                _of_lists(name, weight)
            if is_measured:
                meter.end()
            versions.append(weight._version)
        assert versions[0] == versions[1] > 0, name


def test_an_update_that_is_an_error_is_one_of_its_step(tmp_path):
    """Its state has another dtype than the weights since. No weight is stepped, then or later."""
    found = []
    for run in (Run("none", tmp_path), Run("ssd", tmp_path, params="ssd", defers=False)):
        model = mlp()
        optimizer = adamw(run, model, foreach=False)
        for dtype in (torch.float32, torch.float64):
            model.to(dtype)
            model(torch.ones(4, 96, dtype=dtype)).square().mean().backward()
            if dtype == torch.float32:
                optimizer.step()
                optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="expected dtype"):
            optimizer.step()
        found.append([model(torch.ones(4, 96, dtype=torch.float64)), *model.parameters()])
    assert same(*found)


@pytest.mark.parametrize("place", ["none", "ram"])
def test_an_update_of_memory_that_overlaps_is_an_error_of_its_step(place):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1, 64).expand(32, 64))
    optimizer = Run(place, None).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (torch.ones(2, 64) @ model.weight.t()).sum().backward()
    with pytest.raises(RuntimeError, match="single memory location"):
        optimizer.step()


def _with_own_step(model):
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step = lambda closure=None: None
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: (torch.jit.script(model), torch.optim.SGD(model.parameters())), "TorchScript"),
        (lambda model: (model, _with_own_step(model)), "was replaced"),
    ],
    ids=["TorchScript", "own step"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_cannot_be_streamed_is_refused(make, message, tmp_path):
    model, optimizer = make(mlp())
    with pytest.raises(OffloadConfigError, match=message):
        Run("ssd", tmp_path).prepare(model, optimizer)


class ComputesItself(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def test_only_what_overrides_nothing_is_known():
    def is_known(optimizer):
        try:
            check_streamable(optimizer)
        except OffloadConfigError as error:
            return "not known to step each weight by itself" not in str(error)
        return True

    parameters = list(mlp().parameters())
    assert is_known(torch.optim.AdamW(parameters))
    assert not is_known(ComputesItself(parameters))
    assert not is_known(torch.optim.LBFGS(parameters))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.optim.AdamW, 2.0),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3.0),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (torch.optim.Adafactor, 0.01),
        (ComputesItself, 2.0),
    ],
    ids=["AdamW", "AMSGrad", "SGD", "Adafactor", "not known"],
)
def test_bytes_of_state_are_those_of_a_large_weight(make, expected):
    before = torch.get_rng_state()
    assert state_per_weight(make([nn.Parameter(torch.ones(300, 300))])) == pytest.approx(expected, abs=0.01)
    assert torch.equal(torch.get_rng_state(), before)


# -- where updates are computed, and where bytes are ---------------------------------------------------------------------


def test_updates_wait_where_nobody_holds_the_memory(tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    run, model = Run("ssd", tmp_path), mlp()
    optimizer = adamw(run, model)
    in_parts = {name for name, one in model.named_parameters() if streaming_of(optimizer).spans(one) is not None}
    assert in_parts == {"0.weight", "2.weight", "4.weight"}
    view = model[0].weight.detach()
    for number in range(2):  # the first step makes the state, at once
        model(batch(number)).mean().backward()
        assert all(parked_gradient(p.grad) is not None for p in model.parameters())
        optimizer.step()
    waiting = {record.name for record in streaming_of(optimizer).records if record.update is not None}
    assert waiting == {name for name, _ in model.named_parameters()} - {"0.weight"}
    del view


def test_activations_leave_memory_with_the_optimizer(tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    runs = [Run("none", tmp_path), Run("ssd", tmp_path, tier="ssd", min_bytes=16)]
    for run in runs:
        model = mlp()
        optimizer = adamw(run, model)
        train(run, model, optimizer)
        run.log_all(model, optimizer)
        if run.session is not None:
            assert run.session.stats.total.offloaded_bytes > 0
            model(batch(0)).mean().backward()
            optimizer.step()
            assert all(record.update is not None for record in streaming_of(optimizer).records)
    assert same(runs[0].logged, runs[1].logged)


def test_looking_at_state_without_holding_it_keeps_none_in_memory(tmp_path):
    run, model = Run("ssd", tmp_path), mlp()
    optimizer = adamw(run, model)

    def look(number):
        run.log([state["exp_avg"].norm() for state in optimizer.state.values()])
        assert len(optimizer.state_dict()["state"]) == 6

    train(run, model, optimizer, after=look)
    train(run, model, optimizer, steps=1, first=3)
    with stepping():  # what is on its way when code of the user goes on stays for now
        moved = [parked_of(state["exp_avg"]) for state in optimizer.state.values()]
        streaming_of(optimizer).state_store.settle()
    assert {one.where for one in moved if one is not None} == {Where.AWAY}


def test_state_that_is_being_written_in_parts_is_that_after_the_step(tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    logs = []
    for place in ("none", "ssd"):
        run, model = Run(place, tmp_path), mlp()
        optimizer = adamw(run, model)
        train(run, model, optimizer, steps=2)
        held = optimizer.state[model[0].weight]["exp_avg"]
        train(run, model, optimizer, steps=1, first=2)
        hang = Hang(monkeypatch, "write_once") if place == "ssd" else None
        model[0].weight.sum()  # which completes the step
        if hang is not None:
            threading.Timer(0.1, hang.end).start()
        run.log(held)
        logs.append(run.logged)
    assert same(*logs)


@pytest.mark.filterwarnings("ignore")  # of bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantised_weights_are_written_once_and_stay_no_longer_than_they_are_used(kind, tmp_path):
    """Reentrant checkpoints, for bitsandbytes keeps views of what is in 4 bits on ``ctx``."""
    model = quantised(kind).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    words = torch.ones(2, 8, dtype=torch.long)
    model(input_ids=words, labels=words).loss.backward()
    session = parked(model, tmp_path)
    largest = len([name for name, _ in model.named_parameters() if ".layers.0." in name])
    loss = model(input_ids=words, labels=words).loss
    leave_memory(session)
    loss.backward()
    assert len(in_memory(session)) <= largest
    leave_memory(session)
    stats = session.residency.store.tier.stats
    written, read = stats.written_bytes, stats.read_bytes
    model(input_ids=words)
    leave_memory(session)
    assert (stats.written_bytes, stats.read_bytes > read) == (written, True)


def test_weights_of_checkpoints_leave_memory_while_backward_is_in_another(tmp_path):
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(12)])
    session = parked(model, tmp_path)
    session.residency.limit_bytes = limit = 3 * model[0].weight.nbytes
    session.residency.begin_run()
    checkpoint_sequential(model, 12, torch.ones(4, 32, requires_grad=True), use_reentrant=False).sum().backward()
    assert 0 < session.residency.most_bytes <= limit


def test_where_all_weights_stay_autograd_saves_as_without_offloading(tmp_path):
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    session, hooks = parked(model, tmp_path), []
    session.residency.limit_bytes = 1 << 20
    model(torch.ones(4, 32))
    model[1].register_forward_hook(
        lambda *_: hooks.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
    )
    model(torch.ones(4, 32))
    session.residency.limit_bytes = 1
    model(torch.ones(4, 32))
    assert hooks == [False, True]


@pytest.mark.parametrize("tier", ["none", "ram"])
def test_weights_that_a_graph_has_saved_while_all_stayed_stay_until_its_backward(tier, tmp_path):
    gradients = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)])
        session = parked(model, tmp_path, tier=tier) if offloads else None
        if session is not None:
            session.residency.limit_bytes = 1 << 20
            model(torch.ones(4, 32)).sum().backward()
            model.zero_grad()
            assert len(in_memory(session)) == 8  # they have come, and stay
        loss = model(torch.ones(4, 32)).sum()
        if session is not None:
            session.residency.limit_bytes = 1
            # The input of the first one has no gradient, and the unit that was used last stays as a whole.
            assert in_memory(session) == {"1.0.weight", "2.0.weight", "3.0.weight", "3.0.bias"}
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert same(*gradients)


# -- fast paths ----------------------------------------------------------------------------------------------------------


class FastPaths(TorchDispatchMode):
    """Counts layers that compute in one operation."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._transformer_encoder_layer_fwd.default
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(
    ("frozen", "needs_gradient", "attaches_again"),
    [(True, False, False), (True, False, True), (True, True, False), (False, False, False)],
)
def test_a_fast_path_is_taken_with_gradients_enabled_where_nothing_needs_one(
    frozen, needs_gradient, attaches_again, tmp_path
):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2).eval()
    model.requires_grad_(not frozen)
    inputs = torch.randn(2, 5, 32, requires_grad=needs_gradient)
    padding = torch.tensor([5 * [False], 3 * [False] + 2 * [True]])
    with FastPaths() as in_memory:
        expected = model(inputs, src_key_padding_mask=padding)
    session = parked(model, tmp_path)
    model(inputs)
    if attaches_again:
        session.detach()
        parked(model, tmp_path)
    with FastPaths() as found:
        assert torch.equal(model(inputs, src_key_padding_mask=padding), expected)
    assert found.count == in_memory.count == (0 if needs_gradient or not frozen else 2)
