"""The accelerator's path on a real GPU: exactness while streams are stalled, memory that really falls, real overlap."""

import dataclasses

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, offload_activations
from hf_offload.plan.rules import WRITE_BEHIND_BYTES

pytestmark = pytest.mark.gpu

_STALL_CYCLES = 200_000_000  # about a tenth of a second


def network(width: int = 512, depth: int = 8) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)]
    return nn.Sequential(*blocks).cuda()


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture(params=["ram", "ssd"])
def config(request, tmp_path):
    directory = str(tmp_path) if request.param == "ssd" else None
    return OffloadConfig(tier=request.param, directory=directory, min_bytes=0)


def stall(stream: torch.Stream) -> None:
    """Keep one of the engine's streams busy. Entered by an object of its own, as the engine does it: it remembers what was
    current, and is not for two at once.
    """
    entered = torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
    with entered:
        torch.cuda._sleep(_STALL_CYCLES)


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_exact(config, dtype):
    model = network().to(dtype)
    x = torch.randn(1024, 512, device="cuda", dtype=dtype)
    expected = gradients(model, x)
    with offload_activations(model, config) as session:
        for _ in range(4):
            assert_equal(gradients(model, x), expected)
    assert session.stats.total.loaded_bytes > 0


@pytest.mark.parametrize("stream", ["store_stream", "load_stream"])
def test_a_stalled_stream_costs_time_not_correctness(config, stream):
    model = network()
    x = torch.randn(1024, 512, device="cuda")
    expected = gradients(model, x)
    with offload_activations(model, config) as session:
        for _ in range(2):
            stall(getattr(session._engine.transfer.mover, stream))
            assert_equal(gradients(model, x), expected)


def test_memory_is_not_reused_under_a_copy(config):
    """Blocks freed early are handed out again at once, and overwritten while the stalled copy still has to read them."""
    model = network()
    x = torch.randn(1024, 512, device="cuda")
    expected = gradients(model, x)
    with offload_activations(model, config) as session:
        model.zero_grad()
        stall(session._engine.transfer.mover.store_stream)
        y = model(x).square().sum()
        waste = [torch.full((1024, 2048), float("nan"), device="cuda") for _ in range(32)]
        y.backward()
        assert_equal([parameter.grad for parameter in model.parameters()], expected)
        del waste


def test_the_users_own_stream(config):
    model = network()
    x = torch.randn(1024, 512, device="cuda")
    expected = gradients(model, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with offload_activations(model, config), torch.cuda.stream(stream):
        found = gradients(model, x)
    torch.cuda.synchronize()
    assert_equal(found, expected)


def test_the_peak_falls(config):
    """To what has to be alive at once, whatever the depth: what leaves, what is read ahead, and what is computed with."""
    depth, width, rows = 16, 512, 8192
    model = network(width, depth)
    x = torch.randn(rows, width, device="cuda")
    narrow, wide, weight = rows * width * 4, rows * 4 * width * 4, 4 * width * width * 4
    config = dataclasses.replace(config, read_ahead_bytes=2 * wide)

    def peak() -> int:
        model.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).square().sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    gradients(model, x)
    kept = peak()
    with offload_activations(model, config):
        gradients(model, x)
        offloaded = peak()
    # A block saves its input, that of GELU and what GELU makes of it.
    assert kept >= depth * (narrow + 2 * wide)
    # Forward: what backward needs first stays, as much as the window holds; of what leaves, as much as may wait and the
    # record that is packed beyond it; the operation's input and output are alive anyway. In backward nothing leaves any
    # more, and what is in use is a saved tensor, the gradients on both sides of it, and those of weights before they are
    # added up. The loss's squares are as narrow as its input.
    window, leaving, in_use = 2 * wide, WRITE_BEHIND_BYTES + wide, 3 * wide + 2 * narrow + 2 * weight
    assert offloaded <= window + leaving + in_use < kept / 3


def test_copies_run_on_streams_of_their_own(config):
    from torch.profiler import ProfilerActivity, profile

    model = network()
    x = torch.randn(4096, 512, device="cuda")
    with offload_activations(model, config):
        gradients(model, x)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            gradients(model, x)
            torch.cuda.synchronize()
    streams: dict[str, set[int]] = {"copy": set(), "compute": set()}
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if "Memcpy DtoH" in name or "Memcpy HtoD" in name:
            streams["copy"].add(event.device_resource_id())
        elif "gemm" in name.lower() or "nvjet" in name:  # cuBLAS's own kernels, before and since Hopper
            streams["compute"].add(event.device_resource_id())
    assert streams["copy"]
    assert streams["compute"]
    assert not streams["copy"] & streams["compute"]


def test_a_budget_is_kept_and_changes_no_gradient(tmp_path):
    model = network()
    x = torch.randn(4096, 512, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected = gradients(model, x)
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(model, x)
    keep = torch.cuda.max_memory_allocated()
    model.zero_grad()
    budget = before + (keep - before) // 2
    config = OffloadConfig(tier="auto", memory_budget=budget, directory=str(tmp_path), min_bytes=0)
    with offload_activations(model, config) as session:
        for _ in range(8):
            torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            model(x).square().sum().backward()
            peak = torch.cuda.max_memory_allocated()
            assert_equal([parameter.grad for parameter in model.parameters()], expected)
            optimizer.step()
            session.end_step()
    assert peak <= 1.05 * budget


def test_what_is_captured_stays_where_it_is(config):
    """A replay would neither move it nor wait for it."""
    model = network()
    x = torch.randn(1024, 512, device="cuda")
    expected = gradients(model, x)
    with offload_activations(model, config) as session:
        # As torch.cuda.graph wants it: what libraries allocate once is allocated on a stream of its own beforehand.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        model.zero_grad(set_to_none=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            model(x).square().sum().backward()
        assert session.stats.step.offloaded_bytes == 0
        for _ in range(2):
            model.zero_grad(set_to_none=False)
            graph.replay()
            assert_equal([parameter.grad for parameter in model.parameters()], expected)
