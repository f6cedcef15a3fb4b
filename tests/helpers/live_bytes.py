"""Bytes that are alive during some work, counted by somebody else than the planner."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.measure import peak_bytes
from hf_offload.training.gauges import choose_gauge


def peak_live_bytes(work: Callable[[], Any]) -> int:
    """Most bytes that ``work`` had allocated at once, above what was there when it began, as PyTorch's profiler sees it.

    The profiler sees what the calling thread and backward's do, and not what I/O threads free: with offloading it counts
    too much.
    """
    return peak_bytes(work, torch.device("cpu"))


def live_bytes_of_steps(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Bytes of weights, buffers and AdamW's state, and the most that a step has alive on top of them, all in memory."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    fixed = sum(one.nbytes for one in {*model.parameters(), *model.buffers()})
    fixed += sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
    return fixed, peak_live_bytes(step)


def saved_bytes(forward: Callable[[], Any], model: torch.nn.Module) -> int:
    """Bytes of the storages that a forward saves, each once; weights left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)  # held: an address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(nbytes for nbytes, _ in seen.values())


def peak_bytes_in_use(work: Callable[[], Any]) -> int | None:
    """The same of all threads, as the C allocator counts it, sampled; None where the allocator does not tell."""
    gauge = choose_gauge(torch.device("cpu"))
    gauge.settle()
    before = gauge.in_use()
    if before is None:
        return None
    most = [before]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.0005):
            most[0] = max(most[0], gauge.in_use() or 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        over.set()
        watcher.join()
    return most[0] - before
