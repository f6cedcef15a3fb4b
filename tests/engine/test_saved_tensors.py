"""Tensors that are saved come back as they were: views, versions, dtypes; and those that stay are known."""

import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from hf_offload.errors import SavedTensorModifiedError
from tests.helpers.controlled_tier import Rig, compare, leaf


def test_chunks_of_one_storage_are_told_apart():
    def attention(x):
        q, k, v = (x * 1.5).chunk(3, dim=-1)
        return (q * k * v).sin().sum()

    rig = compare(attention, leaf(8, 96))
    # q, k and v are views of one storage: moved once, not three times
    assert rig.stats.deduplicated_bytes > 0


@pytest.mark.parametrize(
    "view",
    [
        lambda h: h.t(),
        lambda h: h[:, ::2],
        lambda h: h[3:9].transpose(0, 1),
        lambda h: h.view(4, 4, 16).permute(2, 0, 1),
        lambda h: h.as_strided((16, 8), (1, 2)),
        lambda h: h.unfold(1, 4, 2),
        lambda h: h[:, :1].expand(16, 16),
        lambda h: h[5],
    ],
    ids=["transpose", "step", "rows", "permute", "overlapping", "unfold", "expand", "row"],
)
def test_views_keep_size_stride_and_offset(view):
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.layout = (x.size(), x.stride(), x.data_ptr() % 64)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            seen.append((x.size(), x.stride(), x.data_ptr() % 64) == ctx.layout)
            return grad * x

    compare(lambda x: Look.apply(view(x * 2)).sum(), leaf(16, 16))
    assert seen == [True, True]


@pytest.mark.parametrize("offset", range(0, 256, 16))
def test_restored_bytes_lie_at_the_same_address_modulo_64(offset):
    raw = torch.zeros(4096 + 512, dtype=torch.uint8)
    begin = (-raw.data_ptr()) % 4096 % 512 + offset
    memory = memoryview(raw.numpy())[begin : begin + 2048]
    addresses = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, data):
            ctx.save_for_backward(data)
            ctx.address = data.data_ptr() % 64
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (data,) = ctx.saved_tensors
            addresses.append((data.data_ptr() % 64, ctx.address))
            return grad * data.sum(), None

    x = leaf(4)
    rig = Rig()
    with rig:
        data = torch.frombuffer(memory, dtype=torch.float32)
        data.copy_(torch.arange(512.0))
        result = Look.apply(x, data).sum()
        expected = data.sum()
        del data
    rig.settle()
    result.backward()
    assert torch.equal(x.grad, torch.ones(4) * expected)
    assert addresses[0][0] == addresses[0][1]
    assert rig.stats.loaded_bytes > 0


def test_a_small_span_of_a_large_storage_moves_alone():
    rig = compare(lambda x: (x * 2)[3:5].sin().sum(), leaf(64, 64))
    assert rig.stats.offloaded_bytes < 64 * 64 * 4 / 2


def test_a_reused_address_is_not_a_known_storage():
    w = [leaf(32, 32, seed=seed) for seed in range(20)]

    def chain(*weights):
        total = 0
        for index, weight in enumerate(weights):
            h = torch.full((32, 32), float(index + 1))  # dies at once offloaded, and the next one takes its place
            total = total + (h * weight).sum()
            del h
        return total

    expected = torch.autograd.grad(chain(*w), w)
    rig = Rig()
    total = 0
    addresses = set()
    with rig:
        for index, weight in enumerate(w):
            h = torch.full((32, 32), float(index + 1))
            addresses.add(h.data_ptr())
            total = total + (h * weight).sum()
            del h
            rig.settle()
    assert len(addresses) < len(w), "no address was reused, so this proves nothing"
    found = torch.autograd.grad(total, w)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_repeats_are_moved_once():
    rig = compare(lambda x: (lambda h: (h.sin() + h.cos() + h * h).sum())(x * 2), leaf(64, 64))
    assert rig.stats.offloaded_bytes == 64 * 64 * 4
    assert rig.stats.deduplicated_bytes == 3 * 64 * 64 * 4


def test_conjugate_and_negative_bits_survive():
    def function(x):
        h = torch.complex(x, x * 2)
        return (h.conj() * (h * (3 + 2j))).imag.square().sum() + (h.conj().imag * (x * 5)).sum()

    compare(function, leaf(16, 16))


@pytest.mark.parametrize("min_bytes", [0, 1 << 30], ids=["offloaded", "kept"])
def test_a_tensor_modified_after_saving_raises_as_in_autograd(min_bytes):
    x = leaf(8, 8)

    def run():
        h = x * 2
        y = (h * h).sum()
        h.add_(1)
        return y

    with pytest.raises(RuntimeError) as plain:
        run().backward()
    rig = Rig(min_bytes=min_bytes)
    with rig:
        y = run()
    rig.settle()
    with pytest.raises(SavedTensorModifiedError) as ours:
        y.backward()
    beginning = "one of the variables needed for gradient computation has been modified by an inplace operation"
    assert str(plain.value).startswith(beginning)
    assert str(ours.value).startswith(beginning)
    assert "at version 1; expected version 0" in str(ours.value)


def test_a_parameter_modified_after_saving_raises():
    linear = nn.Linear(8, 8)
    rig = Rig(model=linear)
    with rig:
        y = linear(leaf(4, 8)).sum()
    with torch.no_grad():
        linear.weight.add_(1)
    with pytest.raises(SavedTensorModifiedError):
        y.backward()


def test_the_version_probe_holds_no_memory():
    rig = Rig()
    with rig:
        h = leaf(64, 64) * 2
        storage = weakref.ref(h.untyped_storage())
        y = h.sin().sum()
    rig.settle()
    del h
    assert storage() is None
    y.backward()


class Weights(nn.Module):
    def __init__(self, frozen: bool):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.conv1d = nn.Parameter(torch.randn(16, 16))
        self.register_buffer("table", torch.randn(16))
        if frozen:
            self.linear.requires_grad_(False)

    def forward(self, x):
        return (self.linear(x) @ self.conv1d.view(4, 64).view(16, 16).t()) * self.table


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_are_never_moved(autocast, frozen):
    if autocast and frozen:
        pytest.skip("a frozen weight that autocast casts has no graph and looks like an activation (documented)")
    model = Weights(frozen)
    rig = Rig(model=model)
    moved = []
    original = rig.engine._new_record

    def spy(tensor, storage, begin, end, keep):
        moved.append(tuple(tensor.shape))
        return original(tensor, storage, begin, end, keep)

    rig.engine._new_record = spy
    with rig, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(leaf(5, 16)).sum()
    y.backward()
    assert moved
    assert not {(16, 16), (16,)} & set(moved)


class Moved:
    """The tensors whose storages ``rig`` makes records of from now on."""

    def __init__(self, rig: Rig):
        self._storages: list[int] = []
        original = rig.engine._new_record

        def spy(tensor, storage, begin, end, keep):
            self._storages.append(storage.data_ptr())
            return original(tensor, storage, begin, end, keep)

        rig.engine._new_record = spy

    def __contains__(self, tensor: torch.Tensor) -> bool:
        assert self._storages, "nothing was moved at all"
        return tensor.untyped_storage().data_ptr() in self._storages


def test_weights_that_were_replaced_are_known_from_the_next_step_on():
    model = Weights(frozen=False)
    rig = Rig(model=model)
    moved = Moved(rig)
    with rig:
        model(leaf(5, 16)).sum().backward()
    model.table = torch.randn(16)
    with rig:
        model(leaf(5, 16)).sum().backward()
    assert model.table not in moved


@pytest.fixture
def distributed():
    """Makes a DTensor of a tensor, in a group of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda tensor: DTensor.from_local(tensor, mesh, [Replicate()])
    torch.distributed.destroy_process_group()


def test_shards_of_weights_are_never_moved(distributed):
    """What is multiplied is a tensor over the shard's memory, and no Parameter."""
    model = nn.Module()
    model.weight = nn.Parameter(distributed(torch.randn(16, 16)))
    rig = Rig(model=model)
    moved = Moved(rig)
    with rig:
        (leaf(16, 16).sin() @ model.weight.to_local()).sum().backward()
    assert model.weight.to_local() not in moved


class Named(torch.Tensor):
    """As in PyTorch's docs on extending it: a class of one's own, over a plain tensor's bytes."""


@pytest.mark.parametrize("kind", ["a subclass that wraps", "a class of one's own", "sparse"])
def test_what_is_not_plain_passes_through(kind, distributed):
    def function(x):
        if kind == "a subclass that wraps":
            return (distributed(x) * 2).sin().to_local().sum()
        if kind == "sparse":
            return torch.sparse.mm(torch.eye(8).to_sparse(), x).sum()
        return x.as_subclass(Named).sin().sum().as_subclass(torch.Tensor)

    x = leaf(8, 8)
    rig = Rig()
    with rig:
        result = function(x)
    rig.settle()
    assert torch.equal(torch.autograd.grad(result, x)[0], torch.autograd.grad(function(x), x)[0])
    assert rig.stats.offloaded_bytes == 0


@pytest.mark.parametrize("view", [lambda h: h[:, ::32], lambda h: h[:1, :8].expand(64, 8)], ids=["apart", "repeated"])
def test_few_bytes_stay(view):
    few = view(torch.randn(64, 64))
    rig = Rig(min_bytes=1024)
    with rig:
        (few * leaf(*few.shape)).sum().backward()  # saves nothing else
    assert rig.stats.offloaded_bytes == 0
    assert rig.stats.kept_bytes > 0


def test_tensors_without_bytes_stay():
    """They have no memory to tell one from another by."""
    rig = Rig()
    none, x = leaf(0, 64), leaf(8, 64)
    with rig:
        result = (none * none.detach()).sum() + x.sum()
        assert rig.transfer.live_records == 0
        result = result + (x * x.detach()).sum()
        assert rig.transfer.live_records > 0
    result.backward()
    assert torch.equal(x.grad, 1 + x.detach())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_inside_backward_is_not_offloaded(reentrant):
    def block(h):
        return (h * 2).sin().cos()

    def run(x):
        return checkpoint(block, x * 3, use_reentrant=reentrant).sum()

    x = leaf(64, 64)
    expected = torch.autograd.grad(run(x), x)[0] if not reentrant else None
    x.grad = None
    run(x).backward()
    expected = x.grad.clone()
    x.grad = None
    rig = Rig()
    with rig:
        y = run(x)
        rig.settle()
        y.backward()
    assert torch.equal(x.grad, expected)
    # only the boundary moved; `.sum()` saves nothing
    assert rig.stats.offloaded_bytes == 64 * 64 * 4
