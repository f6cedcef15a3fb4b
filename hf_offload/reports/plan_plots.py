"""Charts of plans: one step as planned, and step time over the budget; and the pictures of ``hf-offload plan``."""

from pathlib import Path
from typing import TYPE_CHECKING

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.simulate import simulate
from hf_offload.reports.charts import Chart, Colour, Kind, Series, byte_unit, draw, level, save_png, thinned, time_unit
from hf_offload.reports.plots import figure_at
from hf_offload.settings.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hf_offload.forecast.forecast import Forecast
    from hf_offload.forecast.order import Order
    from hf_offload.plan.problem import Problem, Solution
    from hf_offload.plan.timeline import MemoryUse, Timeline

_CHANNELS = ("compute", "recompute", "wait", "store", "load")
_ORDER_COLOURS = ("#4c4c4c", Colour.SKY, Colour.AMBER, Colour.GREEN, Colour.BLUE)
_WAY_COLOURS = (Colour.GREY, Colour.GREEN, Colour.RED, Colour.AMBER, Colour.PINK, Colour.SKY)
_COLOURS = {
    "compute": "#4c4c4c",
    "recompute": Colour.AMBER,
    "wait": Colour.RED,
    "store": Colour.SKY,
    "load": Colour.BLUE,
}
# Further above the peak it would press the curves to the ground.
_SHOWN_ABOVE = 1.6
_FEWEST_SAMPLES = 5


def step_chart(problem: "Problem", solution: "Solution", measured: "Sequence[tuple[float, int]]" = ()) -> Chart:
    """Memory over one micro-batch as planned, by kind, and seconds and bytes of a ``measured`` step."""
    footprint = problem.footprint
    timeline = simulate(footprint, solution.placements, problem.channels, solution.windows, details=True)
    divisor, unit = byte_unit(timeline.peak_bytes)
    one_s, seconds = time_unit(timeline.step_s)
    used = thinned(timeline.memory, lambda one: one.total_bytes)
    used.append(used[-1]._replace(at_s=timeline.step_s))
    times = [one.at_s / one_s for one in used]
    weights = footprint.base_bytes - footprint.state_bytes

    def temporaries(one: "MemoryUse") -> int:
        parts = one.gradient_bytes + one.kept_bytes + one.moving_bytes
        return max(0, one.total_bytes - footprint.base_bytes - parts)

    parts = [
        ("weights", Colour.GREY, [weights] * len(used)),
        ("optimizer state", Colour.SKY, [footprint.state_bytes] * len(used)),
        ("gradients", Colour.BLUE, [one.gradient_bytes for one in used]),
        ("activations kept", Colour.GREEN, [one.kept_bytes for one in used]),
        ("activations moving", Colour.AMBER, [one.moving_bytes for one in used]),
        ("temporaries", Colour.PINK, [temporaries(one) for one in used]),
    ]
    series = [
        Series(name, times, [nbytes / divisor for nbytes in values], colour, Kind.AREA)
        for name, colour, values in parts
        if any(values)
    ]
    overlaid = ""
    if len(measured) >= _FEWEST_SAMPLES:
        at, used_then = zip(*((at_s / one_s, nbytes / divisor) for at_s, nbytes in measured), strict=True)
        series.append(Series("measured", at, used_then, Colour.PURPLE, Kind.LINE))
        overlaid = (
            " Measured: the last micro-batch, above the same weights, gradients and optimizer state. On a CPU that is all "
            "the allocator has given out, where budgets count tensors."
        )
    if problem.budget_bytes <= _SHOWN_ABOVE * timeline.peak_bytes:
        series.append(level("budget", problem.budget_bytes / divisor, times))
    return Chart(
        "One micro-batch as planned",
        "Predicted memory by kind: forward, backward and the optimizer's step. The peak is "
        f"{format_bytes(timeline.peak_bytes)} in {timeline.peak_unit}, of a budget of {format_bytes(problem.budget_bytes)}. "
        f"Kept: saved for backward, or recomputed. Moving: on their way out, or read ahead of their use.{overlaid}",
        f"time ({seconds})",
        f"memory ({unit})",
        series,
    )


def frontier_chart(
    found: "Sequence[tuple[int, Solution]]", budget_bytes: int, ways: "Iterable[tuple[str, Timeline | None]]"
) -> Chart:
    """The fastest predicted steps that were ``found`` for budgets, and the ``ways`` that place every unit alike."""
    slowest = max(solution.timeline.step_s for _, solution in found)
    divisor, unit = byte_unit(found[-1][0])
    one_s, seconds = time_unit(slowest)
    budgets, steps = zip(*((budget / divisor, one.timeline.step_s / one_s) for budget, one in found), strict=True)
    series = [Series("fastest plan", budgets, steps, Colour.BLUE)]
    if budget_bytes <= _SHOWN_ABOVE * found[-1][0]:
        given = budget_bytes / divisor
        series.append(Series("the budget", (given, given), (0, slowest / one_s), Colour.GREY, Kind.LINE, dashed=True))
    for (name, timeline), colour in zip(ways, _WAY_COLOURS, strict=False):
        if timeline is not None and timeline.step_s <= 2 * slowest:  # one that waits for minutes hides all others
            point = (timeline.peak_bytes / divisor,), (timeline.step_s / one_s,)
            series.append(Series(name, *point, colour, Kind.POINTS))
    return Chart(
        "Step time over the memory budget",
        "Line: the fastest plan found for each budget. Squares: the same placement for every unit, at its peak. "
        "All of it is predicted, of one micro-batch with the optimizer's step; memory is that of everything on the device.",
        f"memory budget ({unit})",
        f"predicted step ({seconds})",
        series,
    )


def forecast_chart(forecast: "Forecast") -> Chart:
    """:func:`frontier_chart` of a forecast, over all kinds of memory."""
    found = [(budget, one.solution) for budget, one in forecast.frontier]
    ways = [(row.name, row.timeline) for row in forecast.rows if row.name != "auto"]
    return frontier_chart(found, forecast.problem.budget_bytes, ways)


def plot_frontier(forecast: "Forecast", path: Path) -> None:
    """:func:`forecast_chart` as a PNG at ``path``."""
    workload = forecast.workload
    title = f"{workload.name}, {workload.shape} on {forecast.hardware.name}"
    save_png(forecast_chart(forecast), title, path)


def plot_timeline(forecast: "Forecast", path: Path) -> None:
    """The planned step: the memory it takes, and what computes, waits, leaves and comes back, as a PNG at ``path``.

    Raises :class:`~hf_offload.errors.OffloadPlanError` if there is no plan.
    """
    if forecast.solution is None:
        raise OffloadPlanError(f"There is no plan to draw: {forecast.refusal}")
    problem, solution = forecast.problem, forecast.solution
    timeline = simulate(problem.footprint, solution.placements, problem.channels, solution.windows, details=True)
    one_s, _ = time_unit(timeline.step_s)
    with figure_at(path, 11, 6) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        chart = step_chart(problem, solution)
        draw(chart, upper)
        workload = forecast.workload
        upper.set_title(
            f"{workload.name}, {workload.shape}: one step as planned, "
            f"{timeline.step_s:.3g} s, {timeline.peak_bytes / 2**30:.2f} GiB",
            loc="left",
        )
        for row, channel in enumerate(reversed(_CHANNELS)):
            bars = [
                (one.begin_s / one_s, (one.end_s - one.begin_s) / one_s)
                for one in timeline.intervals
                if one.channel == channel
            ]
            lower.broken_barh(bars, (row - 0.4, 0.8), color=_COLOURS[channel])
        lower.set_yticks(range(len(_CHANNELS)), list(reversed(_CHANNELS)))
        lower.set_ylim(-0.6, len(_CHANNELS) - 0.4)
        upper.set_xlabel("")
        lower.set_xlabel(chart.x_label)
        lower.set_xlim(0, timeline.step_s / one_s)
        figure.legend(loc="outside lower left", ncols=7, frameon=False, fontsize=8)


def plot_orders(orders: "Sequence[Order]", title: str, path: Path) -> None:
    """Memory over time of every order, and the bounds of the first and the last, as a PNG at ``path``."""
    divisor, unit = byte_unit(max(order.timeline.peak_bytes for order in orders))
    series = []
    for order, colour in zip(orders, _ORDER_COLOURS, strict=False):
        memory = order.timeline.memory
        times, used = [one.at_s for one in memory], [one.total_bytes / divisor for one in memory]
        series.append(Series(f"{order.name}: {format_bytes(order.timeline.peak_bytes)}", times, used, colour))
    for index in (0, len(orders) - 1):
        bound = orders[index].bound_bytes
        name = f"bound of {orders[index].name}: {format_bytes(bound)}"
        series.append(level(name, bound / divisor, series[index].x, _ORDER_COLOURS[index]))
    save_png(Chart(title, "", "time (s)", f"memory ({unit})", series), title, path)
