"""The report page of a plan: ``hf-offload plan MODEL --html FILE``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_offload.plan.plan import Placement
from hf_offload.reports.page import Block, Table, from_rich, write_page
from hf_offload.reports.plan_plots import forecast_chart, step_chart
from hf_offload.settings.sizes import format_bytes, format_seconds

if TYPE_CHECKING:
    import rich.table

    from hf_offload.forecast.forecast import Forecast
    from hf_offload.plan.problem import Problem, Solution

DAY_S = 86_400
"""Seconds of a day."""
_USUAL_ENDURANCE_BYTES = 600 * 10**12
_PLACES = {
    Placement.KEEP: "device",
    Placement.RAM: "RAM",
    Placement.SSD: "drive",
    Placement.RECOMPUTE: "recomputed",
    Placement.RECOMPUTE_RAM: "recomputed, inputs in RAM",
    Placement.RECOMPUTE_SSD: "recomputed, inputs on drive",
    Placement.ELEMENTWISE: "device, less is saved",
    Placement.ELEMENTWISE_RAM: "RAM, less is saved",
    Placement.ELEMENTWISE_SSD: "drive, less is saved",
}


def write_plan_page(path: Path, forecast: "Forecast", tables: "Sequence[str | rich.table.Table]") -> None:
    """Write the page, with the paragraphs and ``tables`` that the command prints."""
    from rich.text import Text

    problem, solution, workload = forecast.problem, forecast.solution, forecast.workload
    opening = [Text.from_markup(one).plain for one in tables if isinstance(one, str)]
    machine, *units, ways, budgets = [from_rich(one) for one in tables if not isinstance(one, str)]
    facts = {"budget": format_bytes(problem.budget_bytes)}
    step: list[Block] = []
    where: list[Block] = []
    drive: list[Block] = []
    if solution is not None:
        timeline = solution.timeline
        facts |= {
            "predicted peak": format_bytes(timeline.peak_bytes),
            "predicted step": format_seconds(timeline.step_s),
            "waiting for it": format_seconds(timeline.stall_s),
            "moved a step": format_bytes(timeline.moved_bytes),
        }
        step, where = [step_chart(problem, solution)], [where_table(problem, solution), *units]
        drive = [drive_table(timeline.tier_bytes.get("ssd", 0), timeline.step_s)]
    sections: dict[str, Sequence[Block]] = {
        "What is planned": [*opening, *([] if forecast.refusal is None else [forecast.refusal])],
        "Memory over time": step,
        "What is where": where,
        "Predicted": [ways],
        "Budget and step time": [budgets, forecast_chart(forecast)],
        "The drive's life": drive,
        "Machine": [f"{forecast.hardware.name}. Figures come from where the last column says.", machine],
    }
    write_page(path, f"Plan: {workload.name}, {workload.shape} on {forecast.hardware.name}", facts, sections)


def where_table(problem: "Problem", solution: "Solution") -> Table:
    """Where weights, gradients, optimizer state and activations are."""
    footprint, here = problem.footprint, _PLACES[Placement.KEEP]
    rows = [
        ("weights and buffers", format_bytes(footprint.base_bytes - footprint.state_bytes), here),
        ("optimizer state", format_bytes(footprint.state_bytes), here),
        ("gradients", format_bytes(footprint.gradient_bytes), here),
    ]
    for placement, place in _PLACES.items():
        units = [unit for unit, one in solution.placements.items() if one is placement and footprint.saved_bytes[unit]]
        if units:
            total = format_bytes(sum(footprint.saved_bytes[unit] for unit in units))
            rows.append((f"activations, {placement.value} ({len(units)} x)", total, place))
    caption = "Of one micro-batch. Activations: what autograd saves for backward in so many units. Device: its memory."
    return Table(("what", "size", "where"), rows, caption, ["where"])


def drive_table(step_bytes: int, step_s: float) -> Table:
    """What a plan writes to drives."""
    day_bytes = step_bytes / step_s * DAY_S
    rows = [
        ("written a micro-batch", format_bytes(step_bytes)),
        ("written a day at this pace", format_bytes(day_bytes)),
        ("time until 600 TB are written", time_until(_USUAL_ENDURANCE_BYTES, day_bytes)),
    ]
    caption = "For training without a pause. Many drives of 1 TB are rated for 600 TB; the data sheet has the figure."
    return Table(("drive", "predicted"), rows, caption)


def time_until(left_bytes: float, day_bytes: float) -> str:
    """Days or years until so many bytes are written."""
    if day_bytes <= 0:
        return "never: nothing is written"
    days = left_bytes / day_bytes
    return f"{days:.3g} days" if days < 730 else f"{days / 365:,.0f} years"
