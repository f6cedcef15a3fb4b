"""Pictures of plans: step time over the budget, and one step as a timeline."""

from pathlib import Path
from typing import TYPE_CHECKING

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.planner import frontier
from hf_offload.plan.simulate import simulate
from hf_offload.reports.plots import figure_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_offload.forecast.forecast import Forecast
    from hf_offload.forecast.order import Order

_POINTS = 14
_CHANNELS = ("compute", "recompute", "wait", "store", "load")
_ORDER_COLOURS = ("#4c4c4c", "#56b4e9", "#e69f00", "#009e73", "#0072b2")
_COLOURS = {"compute": "#4c4c4c", "recompute": "#e69f00", "wait": "#d55e00", "store": "#56b4e9", "load": "#0072b2"}


def plot_frontier(forecast: "Forecast", path: Path) -> None:
    """The fastest predicted step for every budget, and the ways that place every unit alike, as a PNG at ``path``."""
    found = frontier(forecast.problem, _POINTS)
    with figure_at(path, 9, 5) as figure:
        axes = figure.add_subplot()
        axes.step(
            [budget / 2**30 for budget, _ in found],
            [solution.timeline.step_s for _, solution in found],
            where="post", color="#0072b2", marker="o", markersize=4, linewidth=1.8, label="auto",
        )  # fmt: skip
        slowest = max(solution.timeline.step_s for _, solution in found)
        for row in forecast.rows:
            if row.timeline is None or row.name == "auto":
                continue
            peak, step = row.timeline.peak_bytes / 2**30, row.timeline.step_s
            if step > 2 * slowest:
                continue  # one that waits for minutes would press all others to the ground
            axes.plot(peak, step, color="#d55e00", marker="s", linestyle="none")
            axes.annotate(row.name, (peak, step), xytext=(5, 5), textcoords="offset points", fontsize=8)
        left, right = axes.get_xlim()
        given = forecast.problem.budget_bytes / 2**30
        if given <= right + (right - left):  # further out it would press the curve into a corner
            axes.axvline(given, color="black", linewidth=1, linestyle="--", label="the budget")
        workload = forecast.workload
        axes.set_title(f"{workload.name}, {workload.shape} on {forecast.hardware.name}", loc="left")
        axes.set_xlabel("memory, weights and all (GiB)")
        axes.set_ylabel("predicted step (s)")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        axes.legend(frameon=False)


def plot_timeline(forecast: "Forecast", path: Path) -> None:
    """The planned step: what computes, waits, leaves and comes back, and the memory that takes, as a PNG at ``path``.

    Raises :class:`~hf_offload.errors.OffloadPlanError` if there is no plan.
    """
    if forecast.solution is None:
        raise OffloadPlanError(f"There is no plan to draw: {forecast.refusal}")
    problem, solution = forecast.problem, forecast.solution
    timeline = simulate(problem.footprint, solution.placements, problem.channels, solution.windows, details=True)
    with figure_at(path, 11, 5.5) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        times = [time for time, _ in timeline.memory]
        upper.step(times, [nbytes / 2**30 for _, nbytes in timeline.memory], where="post", color="#4c4c4c", linewidth=1)
        upper.axhline(problem.budget_bytes / 2**30, color="#d55e00", linestyle="--", linewidth=1.2, label="the budget")
        upper.axhline(
            problem.footprint.base_bytes / 2**30,
            color="black",
            linestyle=":",
            linewidth=1,
            label="weights and optimizer",
        )
        upper.set_ylabel("memory (GiB)")
        upper.set_ylim(bottom=0)
        upper.legend(frameon=False, loc="lower right", fontsize=8)
        workload = forecast.workload
        upper.set_title(
            f"{workload.name}, {workload.shape}: one step as planned, "
            f"{timeline.step_s:.3g} s, {timeline.peak_bytes / 2**30:.2f} GiB",
            loc="left",
        )
        for row, channel in enumerate(reversed(_CHANNELS)):
            bars = [(one.begin_s, one.end_s - one.begin_s) for one in timeline.intervals if one.channel == channel]
            lower.broken_barh(bars, (row - 0.4, 0.8), color=_COLOURS[channel])
        lower.set_yticks(range(len(_CHANNELS)), list(reversed(_CHANNELS)))
        lower.set_xlabel("seconds")
        lower.set_xlim(0, timeline.step_s)


def plot_orders(orders: "Sequence[Order]", title: str, path: Path) -> None:
    """Memory over time of every order, and the bounds of the first and the last, as a PNG at ``path``."""
    with figure_at(path, 11, 5.5) as figure:
        axes = figure.add_subplot()
        for order, colour in zip(orders, _ORDER_COLOURS, strict=False):
            times = [time for time, _ in order.timeline.memory]
            memory = [nbytes / 2**30 for _, nbytes in order.timeline.memory]
            label = f"{order.name}: {order.timeline.peak_bytes / 2**30:.2f} GiB"
            axes.step(times, memory, where="post", color=colour, linewidth=1.3, label=label)
        for order, colour in ((orders[0], _ORDER_COLOURS[0]), (orders[-1], _ORDER_COLOURS[len(orders) - 1])):
            bound = order.bound_bytes / 2**30
            axes.axhline(
                bound, color=colour, linestyle=":", linewidth=1.2, label=f"bound of {order.name}: {bound:.2f} GiB"
            )
        axes.set_title(title, loc="left")
        axes.set_xlabel("seconds")
        axes.set_ylabel("memory (GiB)")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8, loc="upper right")
