"""Which peak the order of a step's operations gives, and how far it is from what no order can beat.

ROAM (Shu et al. 2023, arXiv 2310.19295) looks for the order with the lowest peak. Autograd's own order frees every tensor as
soon as it can; what is left to gain is gradients that wait for the optimizer, and operations that are larger than they need
to be. This report says how much that is.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hf_offload.forecast.workload import Workload, count_workload
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
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
        footprint = count_workload(dataclasses.replace(workload, **changes), hardware)
        placements = dict.fromkeys(footprint.units, Placement.KEEP)
        timeline = simulate(footprint, placements, {}, Windows(0, 0), details=True)
        found.append(Order(name, _bound_bytes(footprint), timeline))
    return found


def _bound_bytes(footprint: Footprint) -> int:
    at_the_end = footprint.gradient_bytes + footprint.optimizer_step_bytes
    return footprint.base_bytes + max(footprint.largest_operation_bytes, at_the_end)
