"""The picture of ``hf-offload plan --plot``: the planned step."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.simulate import simulate
from hf_offload.reports.plots import COLOURS, figure_at, plain

if TYPE_CHECKING:
    from hf_offload.forecast.forecast import Forecast
    from hf_offload.plan.footprint import Footprint
    from hf_offload.plan.timeline import MemoryUse, Timeline

_CHANNELS = {"compute": "black", "recompute": "orange", "wait": "red", "store": "sky", "load": "blue"}
_KINDS = {
    "weights": "grey", "optimizer state": "sky", "gradients": "blue", "activations kept": "green",
    "activations moving": "orange", "temporaries": "pink",
}  # fmt: skip
# A line further above the curve would press the curve to the ground.
_SHOWN_ABOVE = 1.6


def plot_plan(forecast: "Forecast", path: Path) -> None:
    """Write the picture to ``path``, as PNG.

    Above, memory over one micro-batch with the optimizer's step, by kind; below, what computes, waits, leaves and comes
    back. Raises :class:`~hf_offload.errors.OffloadPlanError` if there is no plan.
    """
    if forecast.solution is None:
        raise OffloadPlanError(f"There is no plan to draw: {forecast.refusal}")
    problem, solution, workload = forecast.problem, forecast.solution, forecast.workload
    footprint = problem.footprint
    timeline = simulate(footprint, solution.placements, problem.channels, solution.windows, details=True)
    with figure_at(path, 11, 7) as figure:
        memory, channels = figure.subplots(2, 1, height_ratios=(2, 1))
        memory.set_title(
            f"{workload.name}, {workload.shape} on {forecast.hardware.name}: one micro-batch with the optimizer's step, "
            f"{timeline.step_s:.3g} s, peak {timeline.peak_bytes / 2**30:.2f} GiB",
            fontsize=11, loc="left",
        )  # fmt: skip
        _draw_memory(memory, footprint, timeline, problem.budget_bytes)
        _draw_channels(channels, timeline)


def memory_by_kind(footprint: "Footprint", uses: "Sequence[MemoryUse]") -> dict[str, list[int]]:
    """Bytes of each kind at each of the moments: they add up to what is in memory."""
    weights = footprint.base_bytes - footprint.state_bytes
    found: dict[str, list[int]] = {name: [] for name in _KINDS}
    for one in uses:
        known = (weights, footprint.state_bytes, one.gradient_bytes, one.kept_bytes, one.moving_bytes)
        for name, nbytes in zip(_KINDS, (*known, one.total_bytes - sum(known)), strict=True):
            found[name].append(nbytes)
    return found


def _draw_memory(axes: Any, footprint: "Footprint", timeline: "Timeline", budget_bytes: int) -> None:
    last = timeline.memory[-1]._replace(at_s=timeline.step_s)
    uses = [*timeline.memory, last]
    kinds = {name: values for name, values in memory_by_kind(footprint, uses).items() if any(values)}
    axes.stackplot(
        [one.at_s for one in uses], *([nbytes / 2**30 for nbytes in values] for values in kinds.values()), step="post",
        labels=list(kinds), colors=[COLOURS[_KINDS[name]] for name in kinds], linewidth=0,
    )  # fmt: skip
    if budget_bytes <= _SHOWN_ABOVE * timeline.peak_bytes:
        axes.axhline(budget_bytes / 2**30, color=COLOURS["red"], linestyle="--", linewidth=1.5, label="budget")
    plain(axes, "seconds", "memory (GiB)")
    axes.set_xlim(0, timeline.step_s)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)


def _draw_channels(axes: Any, timeline: "Timeline") -> None:
    for row, (channel, colour) in enumerate(_CHANNELS.items()):
        bars = [(one.begin_s, one.end_s - one.begin_s) for one in timeline.intervals if one.channel == channel]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=COLOURS[colour])
    plain(axes, "seconds", "")
    axes.set_yticks(range(len(_CHANNELS)), list(_CHANNELS))
    axes.set_ylim(len(_CHANNELS) - 0.4, -0.6)
    axes.set_xlim(0, timeline.step_s)
