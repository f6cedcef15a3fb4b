"""What other offloaders got wrong, one test each. Gradients are compared bit by bit with plain autograd."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from hf_offload.errors import OffloadError, SavedTensorModifiedError
from hf_offload.state.saved import KeptTensor
from tests.helpers.controlled_tier import ControlledTier, Rig


def leaf(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=dtype).requires_grad_()


def compare(function, *leaves: torch.Tensor, rig: Rig | None = None) -> Rig:
    """Gradients of ``function(*leaves)`` with and without the engine are equal to the bit. Returns the rig."""
    expected = torch.autograd.grad(function(*leaves), leaves)
    rig = rig or Rig()
    with rig:
        result = function(*leaves)
    rig.settle()  # so that everything really is gone from memory before backward asks for it
    found = torch.autograd.grad(result, leaves)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    del result
    rig.assert_nothing_left()
    assert rig.stats.offloaded_bytes > 0
    return rig


# -- identity ----------------------------------------------------------------------------------------------------------


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


def test_a_view_outside_a_recorded_span_gets_its_own_record():
    def two_spans(x):
        h = x * 2
        return h[:8].sin().sum() + h[-8:].sin().sum() + h[2:4].cos().sum()

    rig = compare(two_spans, leaf(64, 64))
    assert rig.stats.deduplicated_bytes == 2 * 64 * 4  # the third view lies inside the first


def test_two_versions_of_one_storage_are_two_records():
    w = leaf(8, 8, seed=1)

    def run():
        h = leaf(8, 8).detach() * 2
        first = (h * w).sum()
        h.add_(1)
        second = (h * w).sum()
        return first, second

    first, second = run()
    # plain autograd keeps one h, so only the second product has a gradient there; it is the reference
    expected = torch.autograd.grad(second, w)[0]
    rig = Rig()
    with rig:
        first, second = run()
    rig.settle()
    assert torch.equal(torch.autograd.grad(second, w)[0], expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_dtypes(dtype):
    compare(lambda x: ((x * 2) * (x * 2).conj()).abs().sum(), leaf(16, 16, dtype=dtype))


def test_conjugate_and_negative_bits_survive():
    def function(x):
        h = torch.complex(x, x * 2)
        return (h.conj() * (h * (3 + 2j))).imag.square().sum() + (h.conj().imag * (x * 5)).sum()

    compare(function, leaf(16, 16))


def test_empty_and_zero_dimensional_tensors():
    def function(x):
        h = x * 2
        return (h[:0].sin().sum() + (h.sum() * 3).sin()) + h.sin().sum()

    compare(function, leaf(16, 16))


# -- modified after saving ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("alive", [False, True], ids=["loaded", "alias"])
def test_an_unpacked_tensor_changed_by_a_backward_is_found_out(alive):
    class Scribble(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return x.mul_(grad)

    x = leaf(64, 64)

    def run():
        h = x * 2
        return h, (h.sin() + Scribble.apply(h)).sum()

    h, y = run()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    rig = Rig()
    with rig:
        h, y = run()
    if not alive:
        del h
    rig.settle()
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


# -- lifetimes ---------------------------------------------------------------------------------------------------------


def test_records_die_with_the_graph_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        rig = Rig(min_bytes=256)
        with rig:
            h = leaf(64, 64) * 2
            small = h[:1, :8].tanh()  # kept, and the output of what saves it; the rest is offloaded
            y = (h.sin() * small.sum()).sum()
            kept = [weakref.ref(h), weakref.ref(small)]
        rig.settle()
        del h, small, y
        rig.assert_nothing_left()
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()


def test_tensors_that_are_never_unpacked_leave_nothing():
    rig = Rig()
    x = leaf(64, 64)
    with rig:
        used = (x * 2).sin().sum()
        unused = (x * 3).cos().sum()
    used.backward()
    del used, unused
    rig.assert_nothing_left()


def test_a_forward_that_raises_leaves_nothing():
    rig = Rig()
    x = leaf(64, 64)
    with rig, pytest.raises(ZeroDivisionError):
        y = (x * 2).sin()
        y = y.sum() / (1 // 0)
    y = None
    gc.collect()
    rig.assert_nothing_left()
    compare(lambda x: (x * 2).sin().sum(), x, rig=rig)


def test_retain_graph_twice_then_release():
    x = leaf(64, 64)
    rig = Rig()
    with rig:
        y = (x * 2).sin().sum()
    rig.settle()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    second = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, second)
    assert torch.equal(first, torch.autograd.grad((x * 2).sin().sum(), x)[0])
    del y
    rig.assert_nothing_left()


def test_copies_do_not_pile_up_under_retain_graph():
    x = leaf(64, 64)
    rig = Rig(read_ahead_bytes=0)
    with rig:
        h = x
        for _ in range(50):
            h = h.sin()
        y = h.sum()
        del h
    rig.settle()
    one = 64 * 64 * 4
    for _ in range(2):
        torch.autograd.grad(y, x, retain_graph=True)
        assert rig.transfer.ledger.resident_bytes <= 4 * one
    torch.autograd.grad(y, x)
    del y
    rig.assert_nothing_left()


def test_double_backward():
    def gradient_penalty(x):
        (gradient,) = torch.autograd.grad((x * 2).sin().pow(3).sum(), x, create_graph=True)
        return gradient.square().sum()

    x = leaf(32, 32)
    expected = torch.autograd.grad(gradient_penalty(x), x)[0]
    rig = Rig()
    with rig:
        y = (x * 2).sin().pow(3).sum()
        rig.settle()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        penalty = gradient.square().sum()
    assert torch.equal(torch.autograd.grad(penalty, x)[0], expected)
    del y, gradient, penalty
    rig.assert_nothing_left()


def test_several_forwards_before_their_backwards_in_any_order():
    x = leaf(32, 32)
    functions = [
        lambda x: (x * 2).sin().sum(),
        lambda x: (x * 3).cos().exp().sum(),
        lambda x: (x + 1).square().tanh().sum(),
    ]
    expected = [torch.autograd.grad(function(x), x)[0] for function in functions]
    rig = Rig()
    for order in ([0, 1, 2], [2, 0, 1]):
        with rig:
            results = [function(x) for function in functions]
        rig.settle()
        for index in order:
            assert torch.equal(torch.autograd.grad(results[index], x)[0], expected[index])
        del results
    rig.assert_nothing_left()


def test_a_session_that_ended_serves_the_graphs_that_are_left():
    x = leaf(64, 64)
    expected = torch.autograd.grad((x * 2).sin().sum(), x)[0]
    rig = Rig()
    with rig:
        y = (x * 2).sin().sum()
        rig.settle()
        rig.engine.close()
        offloaded_bytes = rig.stats.offloaded_bytes
        late = (x * 5).sin().sum()  # packed after the end: only detached
        assert rig.stats.offloaded_bytes == offloaded_bytes
    (last,) = [thread for thread in threading.enumerate() if thread.name == "hf_offload-outlive"]
    assert rig.tier.live
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    late.backward()
    del y
    last.join(60)
    assert not last.is_alive()
    assert not rig.tier.live


def test_finalizers_take_no_lock():
    rig = Rig()
    with rig:
        y = (leaf(64, 64) * 2).sin().sum()
    rig.settle()
    graphs = [y]
    del y
    with rig.transfer.lock:
        thread = threading.Thread(target=graphs.clear, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "a finalizer waits for a lock that this thread holds"
    rig.assert_nothing_left()


def test_a_record_that_is_gone_cannot_be_found_again():
    """By an I/O thread, say, whose write has ended at that moment: it would count the bytes a second time."""
    rig = Rig()
    with rig:
        y = (leaf(64, 64) * 2).sin().sum()
    rig.settle()
    references = [reference for one in rig.engine._records._identities.values() for reference in one.records]
    assert all(reference() is not None for reference in references)
    found = []

    class Finalized:
        def put(self, cleanup):
            found.append([reference() for reference in references])

    for reference in references:
        record = reference()
        record.cleanup = type(record.cleanup)(record, Finalized())
        del record
    cleanups = [reference().cleanup for reference in references]
    del y
    assert len(cleanups) == 1
    assert found == [[None]]


# -- states ------------------------------------------------------------------------------------------------------------


def test_a_store_in_flight_is_forwarded_from_memory():
    x = leaf(64, 64)
    expected = torch.autograd.grad((x * 2).sin().sum(), x)[0]
    tier = ControlledTier()
    tier.write_gate.clear()
    rig = Rig(tier)
    with rig:
        y = (x * 2).sin().sum()
    assert tier.writes_begun.acquire(timeout=60)
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)  # would hang if it waited for the store
    assert rig.stats.forwarded_bytes == 64 * 64 * 4
    assert rig.stats.loaded_bytes == 0
    tier.write_gate.set()
    del y
    rig.assert_nothing_left()


def test_a_store_that_has_not_begun_is_cancelled():
    x = leaf(64, 64)
    tier = ControlledTier()
    tier.write_gate.clear()
    rig = Rig(tier)
    with rig:
        y = (x * 2).sin().cos().sum()
    assert tier.writes_begun.acquire(timeout=60)  # the first is under way, the second waits in the queue
    torch.autograd.grad(y, x, retain_graph=True)  # or the end of the records would cancel their stores
    tier.write_gate.set()
    rig.settle()
    assert rig.stats.written_bytes == 64 * 64 * 4
    del y
    rig.assert_nothing_left()


def test_a_store_that_ends_does_not_drop_what_backward_has_kept():
    x = leaf(64, 64)
    tier = ControlledTier()
    tier.write_gate.clear()
    rig = Rig(tier)
    with rig:
        y = (x * 2).sin().sum()
    assert tier.writes_begun.acquire(timeout=60)
    torch.autograd.grad(y, x, retain_graph=True)
    tier.write_gate.set()
    rig.settle()
    assert rig.stats.written_bytes == 64 * 64 * 4
    torch.autograd.grad(y, x)
    assert rig.stats.loaded_bytes == 0
    del y
    rig.assert_nothing_left()


def test_an_original_that_is_still_alive_is_used():
    x = leaf(64, 64)
    rig = Rig()
    with rig:
        h = x * 2
        y = h.sin().sum()
    rig.settle()
    y.backward()
    assert rig.stats.loaded_bytes == 0
    assert rig.stats.aliased_bytes == 64 * 64 * 4
    assert torch.equal(x.grad, torch.autograd.grad((x * 2).sin().sum(), x)[0])


def test_backpressure_bounds_memory_and_a_slow_disk_only_costs_time():
    one = 64 * 64 * 4
    tier = ControlledTier()
    tier.write_gate.clear()
    rig = Rig(tier, write_behind_bytes=2 * one)
    x = leaf(64, 64)
    done = threading.Event()
    results = []

    def forward():
        with rig:
            h = x
            for _ in range(20):
                h = (h * 1.01).sin()
            results.append(h.sum())
        done.set()

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    assert tier.writes_begun.acquire(timeout=60)
    assert not done.wait(0.5), "forward ran on although nothing was written"
    tier.write_gate.set()
    assert done.wait(60)
    assert rig.stats.peak_resident_bytes <= 4 * one
    assert rig.stats.store_stall_s > 0
    results[0].backward()


def test_a_full_tier_keeps_tensors_and_says_so_once(caplog):
    one = 64 * 64 * 4
    rig = compare(lambda x: x.sin().cos().exp().tanh().sum(), leaf(64, 64), rig=Rig(ControlledTier(room_bytes=2 * one)))
    assert rig.stats.offloaded_bytes == 2 * one
    assert rig.stats.refused_bytes > 0
    assert len([record for record in caplog.records if "refused" in record.message]) == 1
    (room,) = [record.message for record in caplog.records if "This forward saved" in record.message]
    assert "saved 64.00 KiB" in room
    assert "took 32.00 KiB" in room


def test_a_failed_store_keeps_the_tensor(caplog):
    tier = ControlledTier()
    tier.fail_writes = True
    rig = compare(lambda x: (x * 2).sin().cos().sum(), leaf(64, 64), rig=Rig(tier))
    assert rig.stats.loaded_bytes == 0
    assert len([record for record in caplog.records if "No space left" in record.message]) == 1


def test_a_failed_store_gives_its_room_back():
    tier = ControlledTier()
    tier.fail_writes = True
    rig = Rig(tier)
    with rig:
        y = (leaf(64, 64) * 2).sin().sum()
    rig.settle()
    assert not tier.live
    assert rig.transfer.ledger.own_bytes == 0
    assert rig.transfer.ledger.resident_bytes == 64 * 64 * 4
    y.backward()


@pytest.mark.parametrize("side", ["store", "load"])
def test_nobody_waits_under_the_lock(side):
    tier = ControlledTier()
    rig = Rig(tier, write_behind_bytes=0)
    if side == "store":
        tier.write_gate.clear()

    def step():
        with rig:
            y = (leaf(64, 64) * 2).sin().cos().sum()
        rig.settle()
        tier.read_gate.clear()
        y.backward()

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    if side == "store":
        assert tier.writes_begun.acquire(timeout=60)
    else:
        while not tier.started:
            thread.join(0.01)
    thread.join(0.1)  # until it waits
    free = rig.transfer.lock.acquire(timeout=60)
    assert free, "a thread that waits for a transfer holds the lock"
    rig.transfer.lock.release()
    tier.write_gate.set()
    while thread.is_alive():
        tier.read_gate.set()
        thread.join(0.01)


def test_a_failed_load_names_file_offset_and_module_and_can_be_repeated():
    tier = ControlledTier()
    rig = Rig(tier)
    x = leaf(64, 64)
    with rig:
        rig.engine.unit = "transformer.h.3"
        y = (x * 2).sin().sum()
    rig.settle()
    tier.fail_reads = True
    with pytest.raises(OffloadError, match=r"transformer\.h\.3.*no weight was changed.*/test/file at offset 4096"):
        torch.autograd.grad(y, x, retain_graph=True)
    tier.fail_reads = False
    assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad((x * 2).sin().sum(), x)[0])
    del y
    gc.collect()  # the error and the frames it came through
    rig.assert_nothing_left()


# -- reading ahead -----------------------------------------------------------------------------------------------------


def test_backward_reads_ahead_and_learns_the_order_it_really_has():
    x = leaf(64, 64)

    def odd_order(x):
        # The branch that is packed last is needed last: reverse packing order is wrong here.
        early, late = x * 2, x * 3
        return sines(early, 6), sines(late, 6)

    rig = Rig(read_ahead_bytes=3 * 64 * 64 * 4)
    urgent = []
    for _ in range(2):
        rig.tier.started.clear()
        with rig:
            a, b = odd_order(x)
        rig.settle()
        a.backward()
        b.backward()
        urgent.append(rig.tier.started.count("urgent"))
        del a, b
    assert "ahead" in rig.tier.started
    assert urgent == [2, 0]  # the first of each branch; once the order is known, what comes first does not even leave
    rig.assert_nothing_left()


# -- what is not moved -------------------------------------------------------------------------------------------------


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


def test_tensors_of_a_subclass_pass_through(distributed):
    x = leaf(16, 16)

    def function(x):
        return (distributed(x) * 2).sin().to_local().sum()

    expected = torch.autograd.grad(function(x), x)[0]
    rig = Rig()
    with rig:
        y = function(x)
    rig.settle()
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    assert rig.stats.offloaded_bytes == 0


def test_what_is_not_plain_passes_through():
    x = leaf(8, 8)
    sparse = torch.eye(8).to_sparse()
    rig = Rig()
    with rig:
        y = (torch.sparse.mm(sparse, x * 2).sin()).sum()
    rig.settle()
    y.backward()
    assert torch.equal(x.grad, torch.autograd.grad(torch.sparse.mm(sparse, x * 2).sin().sum(), x)[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # prototype, says torch
def test_nested_tensors_pass_through():
    x, y = leaf(8, 8), leaf(4, 8)

    def function(x, y):
        return torch.nested.as_nested_tensor([x * 2, y * 3]).sin().to_padded_tensor(0.0).sum()

    expected = torch.autograd.grad(function(x, y), (x, y))
    with Rig():
        found = torch.autograd.grad(function(x, y), (x, y))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_small_tensors_and_kept_units_stay():
    x = leaf(64, 64)
    rig = Rig(min_bytes=64 * 64 * 4 + 1)
    with rig:
        (x * 2).sin().sum().backward()
    assert rig.stats.offloaded_bytes == 0
    assert rig.stats.kept_bytes > 0
    rig = Rig(keep_units=frozenset({"last"}))
    with rig:
        rig.engine.unit = "last"
        (x * 2).sin().sum().backward()
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


def test_torch_func_refuses_saved_tensor_hooks():
    with Rig(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: x.sin().sum())(torch.randn(3))


def test_wrappers_of_torch_func_pass_through():
    rig, handles = Rig(), []
    torch.func.vmap(lambda one: handles.append(rig.pack(one)) or one)(torch.ones(8, 64))
    assert isinstance(handles[0], KeptTensor)


def test_several_threads_unpack_at_once():
    rig = Rig()
    x = [leaf(64, 64, seed=seed) for seed in range(6)]
    with rig:
        shared = [(one * 2).sin().cos() for one in x]
        results = [one.sum() for one in shared]
        del shared
    rig.settle()
    threads = [threading.Thread(target=result.backward) for result in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for one in x:
        assert torch.equal(one.grad, torch.autograd.grad((one * 2).sin().cos().sum(), one)[0])


def test_several_threads_ask_for_one_record():
    rig = Rig()
    with rig:
        handle = rig.pack(leaf(64, 64).detach() * 2)
    rig.settle()
    # Whoever begins a load waits a little for the other, so that both would begin one if nothing kept them apart.
    both = threading.Barrier(2)
    allocate = rig.engine._device.allocate

    def slow(nbytes, phase):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return allocate(nbytes, phase)

    rig.engine._device.allocate = slow
    found = []
    threads = [threading.Thread(target=lambda: found.append(rig.engine.unpack(handle))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(one, leaf(64, 64) * 2) for one in found)
    assert rig.stats.loaded_bytes == 64 * 64 * 4


def sines(x, count, during_backward=None):
    """``count`` saved tensors in a row, each needed by one step of backward, after which ``during_backward`` is called."""
    h = x
    for _ in range(count):
        h = h.sin()
        if during_backward is not None:
            h.register_hook(during_backward)
    return h.sum()


def test_what_backward_asks_for_at_once_does_not_leave():
    rig = Rig(read_ahead_bytes=3 * 64 * 64 * 4)
    x = leaf(64, 64)
    written = []
    for _ in range(3):
        with rig:
            y = sines(x, 20)
        rig.settle()
        written.append(rig.tier.stats.written_bytes)
        y.backward()
        del y
    one = x.nbytes
    assert written == [20 * one, 37 * one, 54 * one]  # the first step had nothing to go by
    assert rig.stats.offloaded_bytes == 60 * one
    assert rig.stats.forwarded_bytes >= 6 * one
    rig.assert_nothing_left()


def test_a_record_larger_than_the_window_is_read_ahead_alone():
    rig = Rig(read_ahead_bytes=64)
    x = leaf(64, 64)
    with rig:
        y = sines(x, 10)
    rig.settle()
    y.backward()
    assert rig.tier.started[:2] == ["urgent", "ahead"]


@pytest.mark.parametrize(("read_ahead_bytes", "records"), [(None, 6), (2 * 64 * 64 * 4, 2), (7 * 64 * 64 * 4, 7)])
def test_the_window_is_six_usual_records_unless_it_is_given(read_ahead_bytes, records):
    rig = Rig(read_ahead_bytes=read_ahead_bytes)
    x = leaf(64, 64)
    ahead = []
    with rig:
        y = sines(x, 20, lambda _: ahead.append(rig.transfer.ledger.own_bytes))
    rig.settle()
    y.backward()
    assert max(ahead) == records * x.nbytes


def test_a_window_of_records_that_are_still_leaving_keeps_them_all():
    """They are in memory in any case: writing them would only cost the disk."""
    rig = Rig(read_ahead_bytes=3 * 64 * 64 * 4)
    x = leaf(64, 64)
    kept = []
    rig.tier.write_gate.clear()
    with rig:
        y = sines(x, 4, lambda _: kept.append(rig.stats.forwarded_bytes))
    y.backward()
    rig.tier.write_gate.set()
    assert kept[1] == 4 * x.nbytes  # as soon as backward has asked for one of them


def test_what_is_still_on_its_way_out_fills_the_window():
    """It is memory as much as what has been read ahead is."""
    one = 64 * 64 * 4
    rig = Rig(read_ahead_bytes=2 * one)
    x, z = leaf(64, 64), leaf(64, 64)
    with rig:
        y = sines(x, 10)
    rig.settle()
    rig.tier.write_gate.clear()
    with rig:
        other = sines(z, 2)  # its stores cannot end
    y.backward()
    assert "ahead" not in rig.tier.started
    rig.tier.write_gate.set()
    other.backward()
    assert torch.equal(x.grad, torch.autograd.grad(sines(x, 10), x)[0])


def test_a_batch_of_another_length_follows_the_order_that_was_learned():
    rig = Rig(read_ahead_bytes=3 * 64 * 64 * 4)

    def urgent_loads(rows):
        a, b = leaf(rows, 64), leaf(rows, 64)
        with rig:
            first, second = sines(a, 6), sines(b, 6)
        rig.settle()
        before = len(rig.tier.started)
        first.backward()  # packed first and needed first: not the reverse order that is assumed at the beginning
        second.backward()
        return rig.tier.started[before:].count("urgent")

    assert urgent_loads(64) > 1
    assert urgent_loads(48) == 0
