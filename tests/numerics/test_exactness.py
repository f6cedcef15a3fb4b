"""Losses, gradients and weights are the same bits with and without offloading, and the bytes moved are those to be moved."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, attach, offload_activations
from tests.helpers.controlled_tier import wait_for_stores
from tests.helpers.tables import rows
from tests.helpers.tiny_models import NAMES, gradients, tiny_batch, tiny_model, weights

STEPS = 2
pytestmark = pytest.mark.usefixtures("one_thread")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    attention: str = "sdpa"
    autocast: bool = False
    checkpointing: str | None = None
    accumulation: int = 1
    compiled: bool = False
    # Backward waits until every store has ended and nothing is read ahead, so that all of it comes from the tier.
    settled: bool = True


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory is filled with NaN: bytes that were never loaded cannot pass for what was there before."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


# -- training, plain and offloaded -----------------------------------------------------------------------------------------


def build(case: Case) -> nn.Module:
    model = tiny_model(case.name, attention=case.attention)
    assert model.config._attn_implementation == case.attention
    if case.checkpointing is not None:
        # The older name is a deprecated alias where the newer one exists.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": case.checkpointing == "reentrant"})
    return model


def train(
    case: Case,
    model: nn.Module,
    around_forward: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    before_backward: Callable[[], None] = lambda: None,
    end_step: Callable[[], None] = lambda: None,
) -> dict[str, torch.Tensor]:
    """A few optimizer steps; returns every loss, every gradient and every weight on the way."""
    forward = torch.compile(model, backend="aot_eager") if case.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trace: dict[str, torch.Tensor] = {}
    torch.manual_seed(7)
    for step in range(STEPS):
        for micro in range(case.accumulation):
            batch = tiny_batch(case.name, seed=10 * step + micro)
            with around_forward(), torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                loss = forward(**batch).loss
            trace[f"step {step}: loss {micro}"] = loss.detach()
            before_backward()
            (loss / case.accumulation).backward()
        trace |= {f"step {step}: gradient of {name}": value for name, value in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
        trace |= {f"step {step}: weight {name}": value for name, value in weights(model).items()}
        end_step()
    return trace


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    assert expected.keys() == found.keys()
    return [what for what, value in expected.items() if not torch.equal(value, found[what])]


# -- an independent count --------------------------------------------------------------------------------------------------


class MovableBytes:
    """Counts what offloading has to move, from what autograd saves and nothing else.

    Each version of a storage counts once, as a whole, or as the part that a view spans if that is less than half of it
    (from the multiple of 512 below its first byte). Weights do not count: neither what lies in a parameter's or a
    buffer's memory, nor what has the values of a parameter cast to bfloat16, as autocast makes them. Everything that was
    seen stays alive, so that no address comes twice.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._weights: list[torch.Tensor] = []
        self._casts: list[torch.Tensor] = []
        self._seen: list[torch.Tensor] = []
        self._pieces: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._total = 0
        self.steps: list[int] = []

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        parameters = [parameter.detach() for parameter in self._model.parameters()]
        self._weights = parameters + list(self._model.buffers())
        self._casts = [parameter.to(torch.bfloat16).flatten() for parameter in parameters]
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def end_step(self) -> None:
        self.steps.append(self._total - sum(self.steps))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        self._seen.append(plain)
        if not self._is_weight(plain):
            self._count(plain, tensor._version)
        return plain

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        if any(storage._cdata == weight.untyped_storage()._cdata for weight in self._weights):
            return True
        if tensor.dtype is not torch.bfloat16:
            return False
        values = torch.empty(0, dtype=tensor.dtype).set_(storage)
        return any(torch.equal(values, cast) for cast in self._casts)

    def _count(self, tensor: torch.Tensor, version: int) -> None:
        storage = tensor.untyped_storage()
        item = tensor.element_size()
        places = torch.arange(storage.nbytes() // item).as_strided(
            tensor.size(), tensor.stride(), tensor.storage_offset()
        )
        begin, end = (int(places.min()) * item, (int(places.max()) + 1) * item) if places.numel() else (0, 0)
        pieces = self._pieces.setdefault((storage._cdata, version), [])
        if any(first <= begin and end <= last for first, last in pieces):
            return
        piece = (begin - begin % 512, end) if 2 * (end - begin) < storage.nbytes() else (0, storage.nbytes())
        pieces.append(piece)
        self._total += piece[1] - piece[0]


def assert_exact(case: Case, config: OffloadConfig, scoped: bool = False) -> Any:
    """Train three times: plainly, counting, and offloaded; returns the statistics and the tier of the last."""
    plain = train(case, build(case))

    model = build(case)
    movable = MovableBytes(model)
    counted = train(case, model, movable.counting, end_step=movable.end_step)
    assert differences(plain, counted) == []
    assert all(nbytes > 0 for nbytes in movable.steps)
    del model

    model = build(case)
    if case.settled:
        config = dataclasses.replace(config, read_ahead_bytes=0)
    session = attach(model, config)
    transfer = session._engine.transfer

    def settle() -> None:
        if case.settled:
            wait_for_stores(transfer)

    with session.scope() if scoped else contextlib.nullcontext():
        offloaded = train(case, model, before_backward=settle, end_step=session.end_step)
    assert differences(plain, offloaded) == []
    assert [step.offloaded_bytes for step in session.stats.steps] == movable.steps

    total = session.stats.total
    assert total.refused_bytes == 0
    if case.checkpointing != "reentrant":  # its recompute saves inside backward, where nothing is moved
        assert total.kept_bytes == 0
    if case.settled:
        assert total.loaded_bytes > total.offloaded_bytes // 4
    transfer.reap()
    assert transfer.live_records == 0
    assert transfer.ledger.resident_bytes == 0
    assert transfer.ledger.ahead_bytes == 0
    stats = session.stats
    tier = transfer.tier
    session.detach()
    return stats, tier


@pytest.fixture
def on_ssd(tmp_path):
    return OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0)


@pytest.mark.parametrize(
    ("name", "attention", "autocast"),
    rows(
        itertools.product(NAMES, ("sdpa", "eager"), (False, True)),
        quick=[(name, *way) for name, way in zip(NAMES, itertools.cycle([("sdpa", False), ("eager", True)]))],
    ),
)
def test_same_bits_from_the_disk(name, attention, autocast, on_ssd):
    assert_exact(Case(name=name, attention=attention, autocast=autocast), on_ssd)


@pytest.mark.parametrize(
    ("name", "checkpointing", "autocast"),
    rows(
        itertools.product(NAMES, ("non-reentrant", "reentrant"), (False, True)),
        quick=[
            (name, *way) for name, way in zip(NAMES, itertools.cycle([("reentrant", True), ("non-reentrant", False)]))
        ],
    ),
)
def test_same_bits_with_activation_checkpointing(name, checkpointing, autocast, on_ssd):
    assert_exact(Case(name=name, checkpointing=checkpointing, autocast=autocast), on_ssd)


@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant"])
def test_a_recompute_inside_the_scope_moves_nothing(checkpointing, on_ssd):
    stats, _ = assert_exact(Case(name="gpt2", checkpointing=checkpointing), on_ssd, scoped=True)
    assert (stats.total.kept_bytes > 0) == (checkpointing == "reentrant")


@pytest.mark.parametrize(
    ("name", "accumulation"),
    rows(itertools.product(NAMES, (1, 3)), quick=[("gpt2", 1), ("llama", 3), ("t5", 3), ("mixtral", 3)]),
)
def test_same_bits_while_stores_and_loads_are_on_their_way(name, accumulation, on_ssd):
    assert_exact(Case(name=name, accumulation=accumulation, settled=False), on_ssd)


@pytest.mark.parametrize("checkpointing", [None, "non-reentrant"])
def test_same_bits_when_compiled(checkpointing, on_ssd):
    torch.compiler.reset()
    assert_exact(Case(name="llama", checkpointing=checkpointing, compiled=True), on_ssd)


def test_same_bits_from_ram():
    _, tier = assert_exact(Case(name="gpt2", accumulation=3), OffloadConfig(tier="ram", min_bytes=0))
    assert tier.stats.written_bytes > 0


def test_same_bits_when_ram_spills_to_the_disk(tmp_path):
    budget_bytes = 128 << 10
    config = OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0, ram_budget=budget_bytes)
    stats, tier = assert_exact(Case(name="gpt2"), config)
    assert 0 < tier.first.stats.peak_used_bytes <= budget_bytes
    assert tier.then.stats.written_bytes > 0
    assert tier.then.stats.read_bytes > 0
    assert stats.total.offloaded_bytes > 2 * budget_bytes
    assert stats.total.written_bytes > 0
    assert stats.total.read_bytes > 0


def test_same_bits_with_checksums_on_striped_directories(tmp_path):
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    assert_exact(Case(name="gpt2"), OffloadConfig(tier="ssd", directory=directories, min_bytes=0, verify="checksum"))


# -- single operations -----------------------------------------------------------------------------------------------------


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 300)
        self.register_buffer("scale", torch.rand(300) + 0.5)


def test_parts_versions_and_buffers(on_ssd):
    torch.manual_seed(0)
    model, inputs = _Scaled(), torch.randn(32, 16)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        rows = model.layer(inputs) * model.scale
        # Two parts that span less than half of the storage each, one inside the first, and one that spans more.
        parts = rows[3:5].exp().sum() + rows[3:5].sin().sum() + rows[4:5, 7:].cos().sum() + rows[20:].sin().sum()
        whole = rows[5:].sin().sum()
        other = model.layer(inputs)
        unused = other.sin()  # saves the version before the next line; backward never comes here
        other.mul_(3)
        return parts + whole + other.sin().sum(), unused

    movable = MovableBytes(model)
    with movable.counting():
        forward()
    movable.end_step()

    loss, _ = forward()
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    with offload_activations(model, dataclasses.replace(on_ssd, read_ahead_bytes=0)) as session:
        loss, unused = forward()
        wait_for_stores(session._engine.transfer)
        loss.backward()
        del unused
        assert session.stats.total.offloaded_bytes == movable.steps[0]
        assert session.stats.total.loaded_bytes > 0
    assert differences(expected, gradients(model)) == []


class _Square(torch.autograd.Function):
    """Squares; backward notes how the saved tensor lies in its storage."""

    found: list[tuple[int, int]]

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (value,) = ctx.saved_tensors
        _Square.found.append((value.storage_offset(), value.untyped_storage().nbytes()))
        return 2 * value * gradient


def test_a_loaded_tensor_lies_in_its_storage_as_the_saved_one_did(on_ssd):
    _Square.found = []
    layer = nn.Linear(8, 158)
    with offload_activations(layer, dataclasses.replace(on_ssd, read_ahead_bytes=0)) as session:
        loss = layer(torch.randn(4, 8))
        expected = [(loss.storage_offset(), loss.untyped_storage().nbytes())] * 8
        for _ in range(8):
            loss = _Square.apply(loss.sin())
        loss = loss.sum()
        wait_for_stores(session._engine.transfer)
        loss.backward()
        assert session.stats.total.loaded_bytes > 0
    assert _Square.found == expected


def _gru() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    module, sequence = nn.GRU(32, 64), torch.randn(5, 16, 32)
    return module, lambda: module(sequence)[0].sum()


def _lstm_cell() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    module, inputs = nn.LSTMCell(32, 64), torch.randn(16, 32)
    return module, lambda: sum(state.sum() for state in module(inputs))


def _unsafe_chunk() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    module, inputs = nn.Linear(32, 1024), torch.randn(64, 32)

    def loss() -> torch.Tensor:
        gate, value = module(inputs).unsafe_chunk(2, 1)
        return (gate.sigmoid_() * value.tanh_()).sum()

    return module, loss


@pytest.mark.parametrize("make", [_unsafe_chunk, _lstm_cell, _gru])
def test_parts_of_a_storage_with_version_counters_of_their_own(make, on_ssd):
    found = []
    for offload in (False, True):
        torch.manual_seed(0)
        module, loss = make()
        if not offload:
            loss().backward()
        else:
            with offload_activations(module, dataclasses.replace(on_ssd, read_ahead_bytes=0)) as session:
                transfer = session._engine.transfer
                store = transfer.store

                def store_at_once(record: Any, *arguments: Any, store: Any = store) -> None:
                    store(record, *arguments)
                    concurrent.futures.wait([record.future])

                transfer.store = store_at_once
                loss().backward()
            assert session.stats.total.loaded_bytes > 0
        found.append(gradients(module))
    assert differences(*found) == []
