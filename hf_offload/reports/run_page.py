"""The report page of a training: ``hf-offload train RECIPE --report run.html``, and for Trainers and loops of one's own."""

import logging
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_offload.plan.explain import unit_lines
from hf_offload.plan.planner import frontier, simple_ways
from hf_offload.reports.charts import Chart, Colour, Kind, Series, byte_unit, level, require_report_libraries, thinned
from hf_offload.reports.page import Block, Table, write_page
from hf_offload.reports.plan_page import DAY_S, time_until, where_table
from hf_offload.reports.plan_plots import frontier_chart, step_chart
from hf_offload.session import OffloadSession, attached_session
from hf_offload.settings.sizes import format_bytes, format_seconds

if TYPE_CHECKING:
    from hf_offload.plan.problem import Problem, Solution
    from hf_offload.planning.known import Known
    from hf_offload.training.report import TrainingReport

logger = logging.getLogger(__name__)

_BUDGETS = 14


class ReportCallback(TrainerCallback):
    """Writes a report page when a Trainer's training ends: ``Trainer(..., callbacks=[ReportCallback("run.html")])``.

    It shows what the run's offloading session reports. Without ``path``, it only keeps the ``session``, for
    :func:`write_report`. Raises :class:`~hf_offload.errors.OffloadError` without the libraries of ``hf-offload[report]``.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        require_report_libraries()
        self.path = path
        self.session: OffloadSession | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.session = attached_session(kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.path is None or not state.is_world_process_zero:
            return
        if self.session is None:
            logger.warning("%s is not written: nothing was offloaded in this run.", os.fspath(self.path))
        else:
            write_report(self.path, self.session)


def write_report(
    path: str | os.PathLike[str], session: OffloadSession | None, measured: "TrainingReport | None" = None
) -> None:
    """Write the report page of a run: one HTML file that needs no network and is readable without scripts.

    Args:
        path: The file.
        session: Of the run, attached still or detached; None for a run that offloaded nothing.
        measured: What ``hf-offload train`` measures: losses, step times in seconds, and bytes of memory over time.

    Raises :class:`~hf_offload.errors.OffloadError` without the libraries of ``hf-offload[report]``.
    """
    require_report_libraries()
    known = None if session is None else session.planned
    if known is not None and known.plan is not None:  # the plan was measured, and no other one can be predicted
        known = None
    memory = (
        None if measured is None or measured.memory is None or not measured.memory["timeline_s"] else measured.memory
    )
    over_time: list[Block] = [] if memory is None else [_memory_chart(memory)]
    where: list[Block] = []
    over_budgets: list[Block] = []
    if known is not None:
        problem = known.present_problem
        over_time.insert(0, step_chart(problem, known.solution, _last_micro_batch(memory, known)))
        where = [where_table(problem, known.solution), _units_table(problem, known.solution)]
        ways = [(one.name, one.solution.timeline) for one in simple_ways(known.usual_problem) if one.solution]
        over_budgets = [frontier_chart(frontier(problem, _BUDGETS), problem.budget_bytes, ways)]
    elif session is not None:
        placed = session.plan.placements
        placed = {**placed, "all other units" if placed else "all units": session.plan.default}
        where = [Table(("unit", "placement"), [(name, placement.value) for name, placement in placed.items()])]
    if session is not None:
        where += _tiers(session)
    sections: dict[str, Sequence[Block]] = {
        "Memory over time": over_time,
        "What is where": where,
        "Predicted and measured": _compared(session, measured),
        "Each step": _each_step(session, measured),
        "Budget and step time": over_budgets,
        "The drive's life": [] if session is None else [_drives(session, measured)],
    }
    name = "a run" if measured is None else measured.recipe
    write_page(Path(path), f"Training: {name}", _facts(session, measured), sections)


def _facts(session: OffloadSession | None, measured: "TrainingReport | None") -> dict[str, str]:
    facts = {}
    if measured is not None:
        facts["steps"] = f"{measured.steps}{'' if measured.completed else ', stopped'}"
        if measured.losses:
            facts["loss, first and last"] = f"{measured.losses[0]:.4f}, {measured.losses[-1]:.4f}"
        if measured.median_step_s is not None:
            facts["step, median"] = format_seconds(measured.median_step_s)
        if measured.peak_over_baseline_bytes is not None:
            facts["activation peak"] = format_bytes(measured.peak_over_baseline_bytes)
    if session is not None:
        total = session.stats.total
        facts["activations moved"] = format_bytes(total.offloaded_bytes)
        facts["waited for them"] = format_seconds(total.stall_s)
    return facts


def _above_baseline(memory: Mapping[str, Any]) -> list[tuple[float, int]]:
    """Seconds, and bytes in use or, where the allocator does not count them, of the process."""
    kind = "in_use_bytes" if memory["timeline_in_use_bytes"] else "bytes"
    samples = zip(memory["timeline_s"], memory[f"timeline_{kind}"], strict=True)
    return [(at_s, nbytes - memory[f"baseline_{kind}"]) for at_s, nbytes in samples]


def _memory_chart(memory: Mapping[str, Any]) -> Chart:
    points = thinned(_above_baseline(memory), lambda point: point[1])
    divisor, unit = byte_unit(max(nbytes for _, nbytes in points))
    times, used = [at_s for at_s, _ in points], [nbytes / divisor for _, nbytes in points]
    return Chart(
        "Measured memory of the whole run",
        "Each point is the most since the one before it. Zero is a process that holds weights, gradients and optimizer "
        "state and nothing else; until they exist, the curve is below. What comes before the first step is preparation, such "
        "as measuring the drive.",
        "time since training began (s)",
        f"memory above zero ({unit})",
        [Series("measured", times, used, Colour.BLUE, Kind.LINE)],
    )


def _last_micro_batch(memory: Mapping[str, Any] | None, known: "Known") -> list[tuple[float, int]]:
    """Seconds since the last micro-batch began, and bytes, weights, gradients and optimizer state included."""
    if memory is None or not memory["step_end_s"]:
        return []
    begin_s, end_s = memory["step_start_s"][len(memory["step_end_s"]) - 1], memory["step_end_s"][-1]
    micro_batches = max(1, round((known.prediction.step_s - known.footprint.optimizer_step_s) / known.micro_batch_s))
    begin_s = end_s - (end_s - begin_s) / micro_batches
    fixed = known.footprint.base_bytes + known.footprint.gradient_bytes
    return [(at_s - begin_s, above + fixed) for at_s, above in _above_baseline(memory) if begin_s <= at_s <= end_s]


def _units_table(problem: "Problem", solution: "Solution") -> Table:
    rows = [
        (
            f"{line.name}{f' ({line.count} x)' if line.count > 1 else ''}",
            format_bytes(line.saved_bytes),
            format_seconds(line.forward_s + line.backward_s),
            line.placement.value,
            line.reason,
        )
        for line in unit_lines(problem, solution)
    ]
    columns = ("unit", "saves", "compute", "placement", "reason")
    return Table(columns, rows, "Sizes and times are those of one of the units.", columns[3:])


def _tiers(session: OffloadSession) -> list[Block]:
    """What left the device: activations, and with the setting ``optimizer`` its state and gradients."""
    rows = [
        (
            f"{account} in {tier}",
            *map(format_bytes, (counted.peak_used_bytes, counted.written_bytes, counted.read_bytes)),
        )
        for account, tiers in session.stats.accounts.items()
        for tier, counted in tiers.items()
    ]
    columns, caption = (
        ("away from the device", "at most", "written", "read"),
        "At once, and in the whole run, by this process.",
    )
    return [Table(columns, rows, caption)] if rows else []


def _compared(session: OffloadSession | None, measured: "TrainingReport | None") -> list[Block]:
    prediction = None if session is None else session.forecast
    if prediction is None:
        return ["Nothing was predicted: only the tier auto has a plan that says what it will need."]
    peak, steps = prediction.measured_peak_bytes, prediction.measured_step_s
    rows = [
        _compared_row("peak of all tensors", prediction.peak_bytes, peak, format_bytes),
        _compared_row(
            f"step, median of {len(steps)}",
            prediction.step_s,
            statistics.median(steps) if steps else None,
            format_seconds,
        ),
    ]
    caption = (
        "Under the last plan. The peak, weights and optimizer state included, is that of one step, which was measured."
    )
    return [Table(("what", "predicted", "measured", "ratio"), rows, caption)]


def _compared_row(
    name: str, predicted: float, measured: float | None, shown: Callable[[float], str]
) -> tuple[str, ...]:
    found = ("-", "-") if measured is None else (shown(measured), f"{measured / predicted:.3f}")
    return name, shown(predicted), *found


def _each_step(session: OffloadSession | None, measured: "TrainingReport | None") -> list[Block]:
    """What the engine counted and how long it took, step by step."""
    charts: list[Block] = []
    counted = [] if session is None else list(session.stats.steps)
    times = [] if measured is None else measured.step_times_s
    first = 1 if session is None else session.stats.ended_steps - len(counted) + 1
    if counted:
        divisor, unit = byte_unit(max(one.offloaded_bytes for one in counted))
        series = [
            _by_step("moved", [one.offloaded_bytes / divisor for one in counted], first, Colour.AMBER),
            _by_step("kept", [one.kept_bytes / divisor for one in counted], first, Colour.GREEN),
            _by_step("in memory", [one.peak_resident_bytes / divisor for one in counted], first, Colour.BLUE),
        ]
        caption = (
            "Moved: taken out of memory. Kept: small, or kept by the plan. In memory: the most bytes of those to move that "
            "were there at once, on their way or in use."
        )
        charts.append(Chart("Activations by step", caption, "step", f"activations ({unit})", series))
    series = [_by_step("step", times, 1, Colour.BLUE)] if times else []
    series += [_by_step("waited for bytes", [one.stall_s for one in counted], first, Colour.RED)] if counted else []
    if series and session is not None and session.forecast is not None:
        series.append(level("predicted step", session.forecast.step_s, series[0].x, Colour.GREY))
    if series:
        caption = (
            "A step begins with its first micro-batch and ends after the optimizer's step. The first are slower: kernels "
            "are chosen, memory is mapped, and plans are measured."
        )
        charts.append(Chart("Time by step", caption, "step", "time (s)", series))
    return charts


def _by_step(name: str, values: Sequence[float], first: int, colour: str) -> Series:
    points = thinned(list(enumerate(values, first)), lambda point: point[1])
    points.append((first + len(values), points[-1][1]))  # the last step has a width, too
    return Series(name, [number for number, _ in points], [value for _, value in points], colour)


def _drives(session: OffloadSession, measured: "TrainingReport | None") -> Block:
    rated = session.config.drive_endurance_bytes
    steps = max(1, session.stats.ended_steps if measured is None else measured.steps)
    times = [] if session.forecast is None else session.forecast.measured_step_s
    step_s = statistics.median(times) if times else None if measured is None else measured.median_step_s
    rows = []
    for each in session.written():
        row = [each.drive.name, format_bytes(each.run_bytes), format_bytes(each.run_bytes / steps), "-", "-", "-", "-"]
        if each.total_bytes is not None:
            row[3] = f"{format_bytes(each.total_bytes)} since {each.since}"
        if step_s is not None:
            day_bytes = each.run_bytes / steps / step_s * DAY_S
            row[4] = format_bytes(day_bytes)
        if rated is not None and each.total_bytes is not None:
            row[5] = f"{each.total_bytes / int(rated):.3%} of {format_bytes(int(rated))}"
            if step_s is not None:
                row[6] = time_until(int(rated) - each.total_bytes, day_bytes)
        rows.append(row)
    if not rows:
        return "No drive was written to."
    columns = ("drive", "written", "a step", "by all runs", "a day at this pace", "of its rating", "reached in")
    caption = (
        "Bytes written by offloading. The rating is the setting drive_endurance_bytes; a drive's data sheet has it."
    )
    return Table(columns, rows, caption)
