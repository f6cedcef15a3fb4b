"""What each memory mode needs for the same model and batch, and how large a batch it leaves room for."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_offload.errors import OffloadConfigError, OffloadPlanError
from hf_offload.forecast.scaling import Family
from hf_offload.forecast.workload import Workload, count_workload
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import BUDGET_SHARE, Hardware
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import make_problem
from hf_offload.plan.search import largest, uniform
from hf_offload.settings.memory_modes import NONE, mode_names

_MOST_ROWS = 1 << 14


@dataclasses.dataclass(frozen=True)
class ModeRow:
    """One mode: bytes, and the largest batch.

    Attributes:
        mode: Its name.
        weights_bytes: Weights and buffers, frozen ones too.
        gradient_bytes: Of all gradients that are there at once, at the end of backward.
        state_bytes: The optimizer's, float32 copies of weights among it.
        activation_bytes: The rest of the peak: saved activations and temporaries, and what the optimizer has for the time of
            a step.
        peak_bytes: Predicted, with everything kept.
        fits: Whether that is within the budget.
        largest_batch: With everything kept; 0 where not even one row fits.
        largest_batch_recomputed: With activation checkpointing of every block.
    """

    mode: str
    weights_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int
    peak_bytes: int
    fits: bool
    largest_batch: int
    largest_batch_recomputed: int


@dataclasses.dataclass(frozen=True)
class ModeComparison:
    """Rows of the modes that the model can be trained in, and for the others why it cannot."""

    budget_bytes: int
    rows: list[ModeRow]
    refused: dict[str, str]


def compare_modes(
    workload: Workload,
    hardware: Hardware,
    modes: Sequence[str] | None = None,
    *,
    settings: str | Mapping[str, Any] | None = None,
    budget_bytes: int | None = None,
    on_mode: Callable[[str], None] = lambda name: None,
) -> ModeComparison:
    """Every one of ``modes`` (default: all there are), with ``settings`` for each but ``none``, which has none.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for an unknown mode and for settings that one has not, and
    :class:`~hf_offload.errors.OffloadPlanError` if the model cannot be counted.
    """
    workloads = [workload.in_mode(mode, None if mode == NONE else settings) for mode in modes or mode_names()]
    budget = int(hardware.memory_bytes.value * BUDGET_SHARE) if budget_bytes is None else budget_bytes
    rows, refused = [], {}
    for one in workloads:
        on_mode(one.memory_mode)
        try:
            footprint = count_workload(one, hardware)
        except OffloadConfigError as error:  # of the model: layers that cannot be quantised, no blocks to take turns
            refused[one.memory_mode] = str(error)
            continue
        rows.append(_row(one, footprint, hardware, budget))
    return ModeComparison(budget, rows, refused)


def _row(workload: Workload, footprint: Footprint, hardware: Hardware, budget: int) -> ModeRow:
    family = Family(workload.batch, workload.sequence, footprint)

    def reach(placement: Placement) -> int:
        def fits(rows: int) -> bool:
            problem = make_problem(family.at(rows, workload.sequence), hardware, budget)
            found = uniform(problem, placement)
            return found is not None and problem.fits(found)

        return largest(fits, workload.batch, _MOST_ROWS)

    problem = make_problem(footprint, hardware, budget)
    kept = uniform(problem, Placement.KEEP)
    if kept is None:
        raise OffloadPlanError(f"{workload.name} has nothing that could be kept: there is no step to count.")
    peak = kept.timeline.peak_bytes
    return ModeRow(
        mode=workload.memory_mode,
        weights_bytes=footprint.base_bytes - footprint.state_bytes - footprint.buffer_bytes,
        gradient_bytes=footprint.gradient_bytes,
        state_bytes=footprint.state_bytes,
        activation_bytes=peak - footprint.base_bytes - footprint.gradient_bytes + footprint.buffer_bytes,
        peak_bytes=peak,
        fits=problem.fits(kept),
        largest_batch=reach(Placement.KEEP),
        # Without backward, nothing is saved and nothing recomputed.
        largest_batch_recomputed=reach(Placement.RECOMPUTE if footprint.saved else Placement.KEEP),
    )
