"""Cells one after the other, each in a process of its own, and how their results differ."""

import contextlib
import dataclasses
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.cells import PEER_TIMEOUT_S, Result, run_cell
from benchmarks.kernel import limit_memory, memory_group, swap_file
from benchmarks.state.cell import Cell, weights_in
from benchmarks.state.peers import LIMITED, PEERS, SWAP
from benchmarks.state.ways import IN_MEMORY, LAZY
from hf_offload.errors import OffloadError


def run_round(names: Sequence[str], base: Cell, folder: Path, begin: Callable[[str], object]) -> dict[str, Result]:
    """Run each way once: first the one in memory, last those with a limit.

    Args:
        names: the ways, with the one in memory; with the lazy one, too, where a way has a limit of memory.
        base: their shapes.
        folder: an empty one for their files.
        begin: called with each name before it runs.

    Returns:
        what each way took, and ``same_bits``, ``loss_difference`` and ``weight_difference``: whether losses and weights
        are those of the run in memory, and the largest differences; or the ``error`` of a peer.
    """
    grouped = not set(LIMITED).isdisjoint(names)
    results: dict[str, Result] = {}
    for name in sorted(names, key=lambda name: (name != IN_MEMORY, name in LIMITED)):
        begin(name)
        directory = folder / name
        directory.mkdir()
        cell = dataclasses.replace(base, way=name, directory=str(directory))
        try:
            result = _run_in_group(cell, results) if grouped else _run(cell)
        except (OSError, OffloadError, subprocess.TimeoutExpired) as error:
            if name not in PEERS:
                raise
            result = {"error": f"{type(error).__name__}: {error}"}
        results[name] = result
        if "error" not in result:
            result |= _differences(result, directory, results[IN_MEMORY], folder / IN_MEMORY)
        if name != IN_MEMORY:
            shutil.rmtree(directory)
    return results


def _run_in_group(cell: Cell, results: dict[str, Result]) -> Result:
    with contextlib.ExitStack() as stack:
        group = None
        if cell.way in LIMITED:
            group = stack.enter_context(memory_group())
            limit_memory(group, results[LAZY]["group_peak"])
            if cell.way == SWAP:
                n_bytes = 2 * max(results[IN_MEMORY]["peaks"])
                stack.enter_context(swap_file(Path(cell.directory), n_bytes))
        else:
            # Where there are no groups, the ways with a limit say so.
            with contextlib.suppress(OSError):
                group = stack.enter_context(memory_group())
        return _run(dataclasses.replace(cell, group=None if group is None else str(group)))


def _run(cell: Cell) -> Result:
    group = None if cell.group is None else Path(cell.group)
    return run_cell("benchmarks.state.cell", cell, group, PEER_TIMEOUT_S if cell.way in PEERS else None)


def _differences(own: Result, directory: Path, reference: Result, reference_directory: Path) -> Result:
    one, other = (torch.load(weights_in(path), mmap=True) for path in (directory, reference_directory))
    loss_difference = max(abs(a - b) for a, b in zip(own["losses"], reference["losses"], strict=True))
    pairs = list(zip(one, other, strict=True))
    return {
        "loss_difference": loss_difference,
        "weight_difference": max((a - b).abs().max().item() for a, b in pairs),
        "same_bits": loss_difference == 0
        and all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs),
    }
