"""The tables of ``hf-offload plan``."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from hf_offload.cli.console import make_table
from hf_offload.settings.sizes import format_bytes, format_seconds

if TYPE_CHECKING:
    import torch

    from hf_offload.forecast.compare_modes import ModeComparison
    from hf_offload.forecast.forecast import Forecast
    from hf_offload.forecast.workload import Workload
    from hf_offload.plan.hardware import Hardware


def plan_tables(forecast: "Forecast") -> Iterator[str | Table]:
    """The plan: what is planned, the machine, the placement of every unit, and what other placements would need."""
    workload, footprint = forecast.workload, forecast.problem.footprint
    autocast = "" if workload.autocast is None else f" (autocast {_name(workload.autocast)})"
    yield (
        f"{workload.name}: {footprint.parameters / 1e9:.3g} B parameters in {_name(workload.dtype)}{autocast}, batch "
        f"{workload.shape}, {_mode(workload)}. Weights, gradients and optimizer state: "
        f"{format_bytes(forecast.counted.base_bytes + forecast.counted.gradient_bytes)}. "
        f"Budget: {format_bytes(forecast.problem.budget_bytes)}."
    )
    yield _machine_table(forecast.hardware)
    if forecast.solution is not None:
        yield _kind_table(forecast)
    yield from forecast.remarks
    if forecast.lines:
        yield _unit_table(forecast)
    yield _alternative_table(forecast)
    yield _frontier_table(forecast)


def modes_table(workload: "Workload", hardware: "Hardware", found: "ModeComparison") -> Table:
    """What each memory mode needs."""
    budget = f"{_gib(found.budget_bytes)} GiB"
    columns = ("weights", "gradients", "state", "activations", "peak", "fits", "batch", "recomputed")
    table = make_table(
        f"{workload.name}: {workload.shape} in {_name(workload.dtype)} on {hardware.name}, budget {budget}",
        ("memory mode", *columns),
        f"GiB, predicted. none: {workload.optimizer}. state: the optimizer's. activations: the rest of the peak without "
        "offloading, or what the optimizer's step needs. batch, recomputed: the largest batch that fits, without offloading "
        "and with activation checkpointing.",
    )
    for row in found.rows:
        parts = (row.weights_bytes, row.gradient_bytes, row.state_bytes, row.activation_bytes, row.peak_bytes)
        largest = (str(row.largest_batch), str(row.largest_batch_recomputed))
        table.add_row(row.mode, *map(_gib, parts), _yes(row.fits), *largest)
    for mode in found.refused:
        table.add_row(mode, *["-"] * len(columns))
    return table


def _mode(workload: "Workload") -> str:
    if workload.mode is None:
        return f"{workload.optimizer}, all weights trained"
    settings = json.dumps(dict(workload.memory_mode_kwargs)) if workload.memory_mode_kwargs else ""
    return f"memory mode {workload.memory_mode} {settings}".strip()


def _machine_table(hardware: "Hardware") -> Table:
    table = make_table(hardware.name, ("what", "value", "from"), left=("from",))
    table.add_row("memory", format_bytes(hardware.memory_bytes.value), hardware.memory_bytes.source)
    for dtype, figure in hardware.flops_per_s.items():
        table.add_row(f"matrix multiplication, {dtype}", f"{figure.value / 1e12:.3g} TFLOP/s", figure.source)
    table.add_row("memory bandwidth", _rate(hardware.memory_bytes_per_s.value), hardware.memory_bytes_per_s.source)
    for tier in hardware.store_bytes_per_s:
        store, load, room = (
            getattr(hardware, name)[tier] for name in ("store_bytes_per_s", "load_bytes_per_s", "room_bytes")
        )
        table.add_row(f"{tier}: store, load", f"{_rate(store.value)}, {_rate(load.value)}", store.source)
        both = hardware.both_bytes_per_s.get(tier)
        if both is not None:
            table.add_row(f"{tier}: both at once", _rate(both.value), both.source)
        table.add_row(f"{tier}: room", format_bytes(room.value), room.source)
    return table


def _kind_table(forecast: "Forecast") -> Table:
    table = make_table(
        "What is where",
        ("", "all", "memory", "tiers", "read", "written", "where"),
        left=("", "where"),
        caption="GiB. all: as in a run that moves nothing. read, written: to and from tiers in a micro-batch with its step. "
        "Activations that are recomputed are nowhere.",
    )
    for category in forecast.categories:
        cells = [category.total_bytes, category.memory_bytes]
        moved = [sum(category.tiers.values()), sum(category.read_bytes.values()), sum(category.written_bytes.values())]
        table.add_row(category.name, *(_gib(cell) for cell in (*cells, *moved)), category.place)
    return table


def _frontier_table(forecast: "Forecast") -> Table:
    from hf_offload.plan.explain import ACTIVATIONS, categories_of
    from hf_offload.plan.state_placement import STATE, WEIGHTS

    columns = ("budget", "step", "ratio", WEIGHTS, STATE, ACTIVATIONS)
    table = make_table(
        "Predicted, for other budgets",
        columns,
        left=columns[3:],
        caption="budget: GiB, from the least that does to what everything fits into. ratio: of the step to one without a "
        "limit. Activations that are recomputed are nowhere.",
    )
    for budget, choice in forecast.frontier:
        where = {
            one.name: one.place
            for one in categories_of(forecast.counted, choice.problem, choice.state_placement, choice.solution)
        }
        ratio = f"{choice.step_s / forecast.step_s:.2f}"
        table.add_row(_gib(budget), format_seconds(choice.step_s), ratio, *(where[name] for name in columns[3:]))
    return table


def _unit_table(forecast: "Forecast") -> Table:
    columns = ("unit", "saves", "compute", "placement", "reason")
    table = make_table("Placement", columns, left=("placement", "reason"))
    footprint = forecast.problem.footprint
    tiled = set(footprint.tiled)
    # A layer belongs to the innermost unit round it.
    sampled = {
        max((unit for unit in footprint.units if name.startswith(f"{unit}.")), key=len) for name in footprint.sampled
    }
    for line in forecast.lines:
        many = f" ({line.count} x)" if line.count > 1 else ""
        many += ", tiled" if tiled & set(line.units) else ""
        many += ", sampled" if sampled & set(line.units) else ""
        table.add_row(
            escape(line.name + many),
            format_bytes(line.saved_bytes),
            format_seconds(line.forward_s + line.backward_s),
            line.placement.value,
            escape(line.reason),
        )
    return table


def _alternative_table(forecast: "Forecast") -> Table:
    over = ["too little"] if any(row.over for row in forecast.rows) else []
    table = make_table(
        "Predicted, with the same placement for every unit, and with the plan (auto)",
        ("", "peak", "fits", "step", "waiting", "moved", "batch", "tokens", *over),
        "peak, moved: GiB. too little: GiB by which the budget of memory, or the room of a tier, is too small. baseline: no "
        "offloading. ram, ssd: everything that is saved is moved there. recompute: activation checkpointing of every block; "
        "+ram, +ssd: the blocks' inputs are moved there. elementwise: recompute of elementwise operations alone, in every "
        "block; +ram, +ssd: what is still saved is moved there. batch, tokens: the largest batch and the longest rows that "
        "fit (*: the model takes no longer ones).",
        left=over,
    )
    for row in forecast.rows:
        timeline = row.timeline
        cells = ["-", "no", "-", "-", "-"]
        if timeline is not None:
            times = (format_seconds(timeline.step_s), format_seconds(timeline.stall_s))
            cells = [_gib(timeline.peak_bytes), _yes(row.fits), *times, _gib(timeline.moved_bytes)]
        length = "?" if row.longest_sequence is None else str(row.longest_sequence)
        if row.longest_sequence is not None and row.longest_sequence == forecast.sequence_limit:
            length += "*"
        why = ", ".join(f"{_gib(nbytes)} {name}" for name, nbytes in row.over.items())
        table.add_row(row.name, *cells, str(row.largest_batch), length, *([why] if over else []))
    return table


def _name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
