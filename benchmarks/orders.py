"""Which peak the order of a step's operations gives, and how far it is from what no order can beat.

ROAM (Shu et al. 2023, arXiv 2310.19295) looks for the order with the lowest peak. Autograd's own order frees every tensor as
soon as it can; what is left to gain is gradients that wait for the optimizer, and operations that are larger than they need
to be. This report says how much that is.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape

from hf_offload.cli.console import clear_errors, make_table, print_table, spinner, write_json
from hf_offload.cli.options import Json, Overrides
from hf_offload.forecast.workload import Workload, count_workload
from hf_offload.forecast.workload_sources import find_workload
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware, describe_hardware
from hf_offload.plan.plan import Placement
from hf_offload.plan.simulate import simulate
from hf_offload.plan.timeline import Timeline, Windows

_ORDERS: Mapping[str, Mapping[str, Any]] = {
    "autograd's order": {},
    "update in backward": {"update_in_backward": True},
    "tiled loss": {"tiled_loss": "on"},
    "tiled loss and MLP": {"tiled_loss": "on", "tiled_mlp": "on"},
    "all of them": {"tiled_loss": "on", "tiled_mlp": "on", "update_in_backward": True},
}


@dataclasses.dataclass(frozen=True)
class Order:
    """One way to run the step, with everything kept in memory.

    Attributes:
        name: What was changed.
        bound_bytes: No order of these operations has a lower peak: weights and optimizer state, and the largest operation's
            operands and results, or the gradients that the optimizer finds.
        timeline: The step as it runs, with its memory curve.
    """

    name: str
    bound_bytes: int
    timeline: Timeline


def compare_orders(
    workload: Workload, hardware: Hardware, on_order: Callable[[str], None] = lambda name: None
) -> list[Order]:
    """Every order, counted. Raises :class:`~hf_offload.errors.OffloadPlanError` if the model cannot be counted."""
    found = []
    for name, changes in _ORDERS.items():
        on_order(name)
        footprint = count_workload(workload.changed(**changes), hardware)
        placements = dict.fromkeys(footprint.units, Placement.KEEP)
        timeline = simulate(footprint, placements, {}, Windows(0, 0), details=True)
        found.append(Order(name, _bound_bytes(footprint), timeline))
    return found


def _bound_bytes(footprint: Footprint) -> int:
    at_the_end = footprint.gradient_bytes + footprint.optimizer_step_bytes
    return footprint.base_bytes + max(footprint.largest_operation_bytes, at_the_end)


def orders(
    model: Annotated[str, typer.Argument(help="A model, as `hf-offload plan` takes it.")],
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option(help="A card, as `hf-offload plan` takes it.")] = "l4",
    batch: Annotated[int | None, typer.Option(help="Rows of a micro-batch. Default: the recipe's, or 1.")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a row. Default: the recipe's, or 2048.")] = None,
    json: Json = False,
) -> None:
    """Compare orders of a step's operations without offloading: the peak of each, and what no order can beat."""
    with clear_errors():
        workload = find_workload(model, overrides or [], batch=batch, sequence=sequence)
        with spinner("Counting") as show:
            found = compare_orders(workload, describe_hardware(gpu), lambda name: show(f"Counting: {name}"))
    if json:
        rows = [
            {"order": one.name, "bound_bytes": one.bound_bytes, "peak_bytes": one.timeline.peak_bytes,
             "peak_unit": one.timeline.peak_unit, "step_s": one.timeline.step_s}
            for one in found
        ]  # fmt: skip
        write_json({"model": workload.name, "orders": rows})
        return
    table = make_table(
        f"{workload.name}, {workload.shape}, no offloading",
        ("", "no order beats", "peak", "of the first", "peak in"),
        "GiB, predicted. No order beats: weights, optimizer state, and the largest operation's operands and results, or the "
        "gradients that wait for the optimizer.",
    )
    first = found[0].timeline.peak_bytes
    for one in found:
        peak, bound = one.timeline.peak_bytes, one.bound_bytes
        sizes = (f"{bound / 2**30:.2f}", f"{peak / 2**30:.2f}", f"{peak / first:.3f}")
        table.add_row(one.name, *sizes, escape(one.timeline.peak_unit))
    print_table(table)
