"""``offload="auto"`` under several budgets: is each kept, were the predictions right, and would one simple way be faster?"""

import dataclasses
import json as json_format
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from benchmarks.console import Json, show_table
from hf_offload.allocator import environment_with
from hf_offload.bench.cell import DONE, CellSpec, run_cell
from hf_offload.bench.results import Case, Cell, Results
from hf_offload.bench.steps import Plan, plan_steps, run_steps
from hf_offload.bench.strategies import find_strategy, parse_strategies
from hf_offload.cli.bench_options import check_recipes
from hf_offload.cli.console import clear_errors, messages, output, progress_bar, visible_log
from hf_offload.cli.exit_codes import EXIT_INTERRUPTED, EXIT_PROBLEM
from hf_offload.errors import OffloadConfigError, OffloadError, OffloadPlanError
from hf_offload.settings.outputs import check_output_folder
from hf_offload.training.report import TrainingReport

SIMPLE = ("baseline", "recompute", "ours:ssd")
_UNLIMITED = "1024GiB"
_FIRST_STEPS = 4
_TOO_SMALL = OffloadPlanError.__name__


def is_refusal(problem: str) -> bool:
    """Whether a budget was too small, which is a result and no failure."""
    return _TOO_SMALL in problem


@dataclasses.dataclass(frozen=True)
class BudgetRow:
    """One budget. Bytes are those of live tensors, weights and optimizer state included; seconds are of a whole step.

    Attributes:
        label: The case.
        share: The budget as a share of the baseline's activation peak.
        budget_bytes: The budget.
        predicted_peak_bytes, measured_peak_bytes: Of the plan after the feedback step.
        predicted_step_s, measured_step_s: The same, medians over the steps under the plan and then over the rounds.
        peak_error, step_error: Predicted by measured, less one; medians over the rounds.
        best: The fastest simple way whose live peak is within the budget.
        step_ratio: Step time, of the steps after the last change of the plan, to that way's; median over the rounds.
        residency_bytes: Most resident memory above that before the first step, largest of the rounds.
        problem: What went wrong, if something did.
    """

    label: str
    share: float
    budget_bytes: int
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    peak_error: float | None = None
    step_error: float | None = None
    best: str | None = None
    step_ratio: float | None = None
    residency_bytes: int | None = None
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class LivePeaks:
    """Live bytes of a case: what is there all the time, and the peak with everything kept."""

    fixed_bytes: int
    baseline_bytes: int

    def budget(self, share: float) -> int:
        """The total budget that leaves ``share`` of the baseline's activation peak."""
        return self.fixed_bytes + round(share * (self.baseline_bytes - self.fixed_bytes))


def run_budgets(
    plan: Plan,
    shares: Sequence[float],
    on_start: Callable[[str, int, int], None] = lambda name, done, total: None,
    on_done: Callable[[Cell], None] = lambda cell: None,
) -> tuple[list[BudgetRow], list[Results]]:
    """For every case of ``plan``: learn the live peak, then run the simple ways and every budget in turns.

    Raises :class:`~hf_offload.errors.OffloadError` if a case does not run at all.
    """
    rows, all_results = [], []
    for case in plan.cases:
        on_start(f"{case.label}: what is alive with everything kept", 0, 1)
        peaks = live_peaks(plan, case)
        budgets = {share: peaks.budget(share) for share in shares}
        strategies = [find_strategy(name) for name in SIMPLE]
        strategies += [find_strategy(f"ours:auto@{budget}") for budget in budgets.values()]
        one = dataclasses.replace(plan, cases=(case,), strategies=tuple(strategies))
        results = run_steps(one, on_start, on_done)
        all_results.append(results)
        rows += [_row(results, case, peaks, share, budget) for share, budget in budgets.items()]
        if results.interrupted:
            break
    return rows, all_results


def live_peaks(plan: Plan, case: Case) -> LivePeaks:
    """Measure a case under a budget that everything fits into."""
    spec = CellSpec(
        recipe=case.recipe,
        overrides=(*plan.case_overrides(case), f"training.max_steps={_FIRST_STEPS}"),
        strategy=f"ours:auto@{_UNLIMITED}",
        base=str(plan.output / "cells" / case.file_name / "live"),
    )
    result = run_cell(spec, environment_with("auto"))
    forecast = None if result.report is None else result.report.forecast
    if result.outcome != DONE or forecast is None or forecast["measured_peak_bytes"] is None:
        raise OffloadError(
            f"{case.label} did not run to its end ({result.outcome}: {result.error}); see {spec.log_path}."
        )
    return LivePeaks(forecast["fixed_bytes"], forecast["measured_peak_bytes"])


def _row(results: Results, case: Case, peaks: LivePeaks, share: float, budget: int) -> BudgetRow:
    name = f"ours:auto@{budget}"
    row = BudgetRow(case.label, share, budget)
    failed = [cell for cell in results.cells if cell.strategy.name == name and cell.report is None]
    if failed:
        return dataclasses.replace(row, problem=failed[0].result.error or failed[0].result.outcome)
    reports = results.reports(case, name)
    forecasts: list[Mapping[str, Any]] = [report.forecast for report in reports.values() if report.forecast]
    if not forecasts:
        return dataclasses.replace(row, problem="no plan was made")
    peaks_seen = [(one["peak_bytes"], one["measured_peak_bytes"]) for one in forecasts if one["measured_peak_bytes"]]
    times = [(one["step_s"], statistics.median(one["measured_step_s"])) for one in forecasts if one["measured_step_s"]]
    best, ratio = _against_the_best(results, case, name, budget, peaks)
    return dataclasses.replace(
        row,
        predicted_peak_bytes=round(statistics.median(one["peak_bytes"] for one in forecasts)),
        measured_peak_bytes=max((measured for _, measured in peaks_seen), default=None),
        predicted_step_s=statistics.median(one["step_s"] for one in forecasts),
        measured_step_s=statistics.median(measured for _, measured in times) if times else None,
        peak_error=_error(peaks_seen),
        step_error=_error(times),
        best=best,
        step_ratio=ratio,
        residency_bytes=max((report.peak_over_baseline_bytes or 0 for report in reports.values()), default=None),
    )


def _error(pairs: Sequence[tuple[float, float]]) -> float | None:
    return statistics.median(predicted / measured - 1 for predicted, measured in pairs) if pairs else None


def _against_the_best(
    results: Results, case: Case, name: str, budget: int, peaks: LivePeaks
) -> tuple[str | None, float | None]:
    """The fastest simple way that fits, and the median over the rounds of the ratio to it."""
    ours = {number: _settled_step_s(report) for number, report in results.reports(case, name).items()}
    baseline_in_use = _in_use(results, case, SIMPLE[0])
    found = []
    for simple in SIMPLE:
        in_use = _in_use(results, case, simple)
        if in_use is None or baseline_in_use is None:
            continue
        ratios = []
        for number, report in results.reports(case, simple).items():
            seconds, theirs = ours.get(number), report.median_step_s
            if seconds and theirs:
                ratios.append(seconds / theirs)
        # As much below the baseline's peak of live tensors as its bytes in use are below the baseline's.
        if ratios and peaks.baseline_bytes - (baseline_in_use - in_use) <= budget:
            found.append((statistics.median(ratios), simple))
    if not found:
        return None, None
    ratio, simple = max(found)  # the way that we are slowest against is the fastest
    return simple, ratio


def _settled_step_s(report: TrainingReport) -> float | None:
    """Median of the steps under the plan that was in force at the end."""
    under_it = len((report.forecast or {}).get("measured_step_s", ()))
    return statistics.median(report.step_times_s[-under_it:]) if under_it else None


def _in_use(results: Results, case: Case, strategy: str) -> int | None:
    """Most bytes that the allocator had handed out, above the baseline; None where it does not tell."""
    known = [report.peak_in_use_over_baseline_bytes for report in results.reports(case, strategy).values()]
    return max((nbytes for nbytes in known if nbytes is not None), default=None)


COLUMNS = (
    "case",
    "of baseline",
    "budget",
    "peak: predicted",
    "measured",
    "of budget",
    "resident",
    "step: predicted",
    "measured",
    "off by",
    "fastest simple way that fits",
    "ours / it",
)


def texts(row: BudgetRow) -> list[str]:
    """The cells of a table's row, as in :data:`COLUMNS`."""
    budget = f"{row.budget_bytes / 1e6:,.0f} MB"
    if row.problem is not None:
        return [
            row.label,
            f"{row.share:.0%}",
            budget,
            "-",
            "refused" if is_refusal(row.problem) else "failed",
            *["-"] * 6,
        ]
    predicted, measured = row.predicted_peak_bytes, row.measured_peak_bytes
    return [
        row.label,
        f"{row.share:.0%}",
        budget,
        "-" if predicted is None else f"{predicted / 1e6:,.0f} MB",
        "-" if measured is None else f"{measured / 1e6:,.0f} MB",
        "-" if measured is None else f"{measured / row.budget_bytes:.3f}",
        "-" if row.residency_bytes is None else f"+{row.residency_bytes / 1e6:,.0f} MB",
        "-" if row.predicted_step_s is None else f"{row.predicted_step_s:.2f} s",
        "-" if row.measured_step_s is None else f"{row.measured_step_s:.2f} s",
        "-" if row.step_error is None else f"{row.step_error:+.0%}",
        row.best or "-",
        "-" if row.step_ratio is None else f"{row.step_ratio:.3f}",
    ]


def budgets(
    shapes: Annotated[str, typer.Argument(help="Presets, recipes or recipes' files, with commas between.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes.")] = None,
    shares: Annotated[
        str, typer.Option(help="Budgets, in per cent of the activation peak with everything kept.")
    ] = "80,50,30",
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size. Default: the recipe's.")] = None,
    sequence: Annotated[int | None, typer.Option(min=2, help="Sequence length. Default: the recipe's.")] = None,
    steps: Annotated[int, typer.Option(min=6, help="Steps of each run.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="How often to run each; they take turns.")] = 1,
    allocator: Annotated[str, typer.Option(help="CPU memory allocator of all runs.")] = "auto",
    output_dir: Annotated[Path, typer.Option("--output", help="Folder for every run's report.")] = Path("runs/budgets"),
    json: Json = False,
) -> None:
    """Train under memory budgets: are they kept, were the predictions right, would a simple way be faster?"""
    with clear_errors(), visible_log():
        check_recipes(shapes, overrides, steps, allocator)
        check_output_folder(output_dir, "--output", "budgets.json")
        plan = plan_steps(
            shapes,
            overrides or [],
            parse_strategies(SIMPLE[0]),
            batches=[] if batch is None else [batch],
            sequences=[] if sequence is None else [sequence],
            steps=steps,
            rounds=rounds,
            output=output_dir,
            allocator=allocator,
        )
        with progress_bar() as progress:
            task = progress.add_task("starting", total=None)

            def on_start(name: str, done: int, total: int) -> None:
                progress.update(task, completed=done, total=total, description=f"running {escape(name)}")

            rows, results = run_budgets(plan, _shares(shares), on_start)
    text = json_format.dumps([dataclasses.asdict(row) for row in rows], indent=2)
    plan.output.mkdir(parents=True, exist_ok=True)
    (plan.output / "budgets.json").write_text(text + "\n", encoding="utf-8")
    if json:
        typer.echo(text)
    else:
        show_table(COLUMNS, map(texts, rows), left=("case",))
        output().print(f"wrote {plan.output / 'budgets.json'}", highlight=False, soft_wrap=True)
    problems = [problem for one in results for problem in one.problems()]
    for problem in problems:
        style = "yellow" if is_refusal(problem) else "bold red"
        messages().print(f"[{style}]{escape(problem)}[/]", highlight=False)
    if not all(map(is_refusal, problems)):
        raise typer.Exit(EXIT_PROBLEM)
    if any(one.interrupted for one in results):
        raise typer.Exit(EXIT_INTERRUPTED)


def _shares(text: str) -> list[float]:
    parts = [part.strip().removesuffix("%") for part in text.split(",")]
    try:
        shares = [float(part) / 100 for part in parts]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 2 for share in shares):
        raise OffloadConfigError(f"--shares {text!r}: give per cent with commas between, such as 80,50,30.")
    return shares
