"""The results of one model's runs: one row per strategy, with medians and spread, and the problems found.

Times and memory are compared within a round. Whether a strategy computes the same is not assumed: losses of every step
and the final weights are compared bit by bit.
"""

import dataclasses
import re
import statistics
from collections.abc import Sequence
from typing import Any

from hf_offload.bench.cell import CRASHED, DONE, CellResult
from hf_offload.bench.strategies import Strategy
from hf_offload.reports.formats import REFERENCE
from hf_offload.training.report import WARMUP_STEPS, TrainingReport

Reports = dict[int, TrainingReport]


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, as it was asked for, at one batch size and sequence length. ``overrides`` make the recipe one of it."""

    shape: str
    recipe: str
    batch: int
    sequence: int
    overrides: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.shape} {self.batch} x {self.sequence}"

    @property
    def file_name(self) -> str:
        """For files."""
        return file_name(f"{self.shape}_{self.batch}x{self.sequence}")


def file_name(text: str) -> str:
    """``text`` without characters that do not belong in a file's name."""
    return re.sub(r"[^\w.+-]+", "_", text)


@dataclasses.dataclass
class Cell:
    """One run of one strategy, and how it ended. A control tells whether the baseline repeats its bits, and has no row."""

    strategy: Strategy
    round: int
    result: CellResult
    is_control: bool = False

    @property
    def report(self) -> TrainingReport | None:
        """The run's report, if it ran to its end."""
        return self.result.report if self.result.outcome == DONE else None

    @property
    def where(self) -> str:
        """Which run this is, for messages."""
        return f"{self.strategy.name}, round {self.round}{' (control)' if self.is_control else ''}"


@dataclasses.dataclass(kw_only=True)
class Row:
    """One strategy over all its rounds.

    Memory is above the baseline's level before the first step; ``in_use_bytes`` is the allocator's own count. Ratios to the
    baseline are medians of each round's ratio, with the least and the greatest. Losses and parameters are compared with
    those of the baseline's first round: None without a comparison, or where the baseline itself varies.
    """

    shape: str
    batch: int
    sequence: int
    model: str | None = None
    strategy: str
    outcome: str
    error: str | None = None
    rounds: int = 0
    allocator: str | None = None
    peak_bytes: float | None = None
    peak_ratio: float | None = None
    peak_ratio_min: float | None = None
    peak_ratio_max: float | None = None
    in_use_bytes: float | None = None
    step_s: float | None = None
    step_s_min: float | None = None
    step_s_max: float | None = None
    step_ratio: float | None = None
    step_ratio_min: float | None = None
    step_ratio_max: float | None = None
    written_bytes_per_run: float = 0.0
    stall_s_per_run: float = 0.0
    final_loss: float | None = None
    losses_identical: bool | None = None
    parameters_identical: bool | None = None
    differs_by: str | None = None
    source: str = ""

    @property
    def differs(self) -> bool:
        """Whether losses or parameters are not the baseline's, and should be."""
        return self.differs_by is None and False in (self.losses_identical, self.parameters_identical)

    @property
    def ended(self) -> str:
        """How the runs ended, in words."""
        return f"{self.outcome}{f' ({self.error})' if self.error and self.outcome != DONE else ''}"


@dataclasses.dataclass
class Results:
    """All cells that ran, in the order in which they ran."""

    case: Case
    overrides: Sequence[str]
    allocator: str
    rounds: int
    cells: list[Cell] = dataclasses.field(default_factory=list)
    interrupted: bool = False

    def model(self) -> str | None:
        """What the model is; ``None`` when none was ever built."""
        return next((cell.result.model for cell in self.cells if cell.result.model), None)

    def rows(self) -> list[Row]:
        """One row per strategy, in the order given."""
        names = dict.fromkeys(cell.strategy.name for cell in self.cells if not cell.is_control)
        return [self._row(name) for name in names]

    def reports(self, name: str) -> Reports:
        """Reports of a strategy by round."""
        return {cell.round: cell.report for cell in self._cells(name) if cell.report is not None}

    def baseline_varies(self) -> bool:
        """Whether the baseline yields other bits from run to run, as some kernels of accelerators do.

        Then no strategy can be asked to repeat them. On a CPU this is a defect, and one of the problems.
        """
        baseline = (cell.report for cell in self.cells if cell.strategy.name == REFERENCE)
        reports = [report for report in baseline if report is not None]
        on_accelerator = bool(reports) and reports[0].machine["device"] != "cpu"
        return on_accelerator and len({(*report.losses_hex, report.parameters_sha256) for report in reports}) > 1

    def problems(self) -> list[str]:
        """Failures of the measurement: our own runs that crashed, and results that had to be identical and are not."""
        problems = []
        for cell in self.cells:
            if cell.strategy.is_ours and cell.result.outcome == CRASHED:
                problems.append(f"{cell.where}: {cell.result.error}")
            elif cell.strategy.is_ours and not self.baseline_varies():
                problems += self._mismatch(cell)
        return problems

    def findings(self) -> list[str]:
        """Runs of others that failed, which is a result."""
        return [f"{row.strategy}: {row.ended}." for row in self.rows() if row.outcome != DONE]

    def mismatches(self) -> list[str]:
        """Results that had to be identical and are not."""
        return [text for cell in self.cells for text in self._mismatch(cell)]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        report = next((cell.report for cell in self.cells if cell.report is not None), None)
        return {
            "overrides": list(self.overrides),
            "allocator": self.allocator,
            "rounds": self.rounds,
            "warmup_steps": WARMUP_STEPS,
            "interrupted": self.interrupted,
            "rows": [dataclasses.asdict(row) for row in self.rows()],
            "problems": self.problems(),
            "machine": report.machine if report else {},
            "versions": report.versions if report else {},
        }

    def _cells(self, name: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.strategy.name == name and not cell.is_control]

    def _mismatch(self, cell: Cell) -> list[str]:
        """What is wrong with the bits of a cell, if anything."""
        wanted, report = cell.strategy.must_match, cell.report
        first = next(iter(self.reports(wanted).values()), None) if wanted else None
        if first is None or report is None:
            return []
        if report.losses_hex != first.losses_hex:
            return [f"{cell.where}: losses differ from {wanted} {_first_difference(report, first)}."]
        if report.parameters_sha256 != first.parameters_sha256:
            return [f"{cell.where}: losses equal those of {wanted}, final parameters differ."]
        return []

    def _row(self, name: str) -> Row:
        case, cells, reports = self.case, self._cells(name), self.reports(name)
        failed = next((cell.result for cell in cells if cell.result.outcome != DONE), None)
        row = Row(
            shape=case.shape, batch=case.batch, sequence=case.sequence, model=self.model(), strategy=name,
            outcome=failed.outcome if failed else DONE, error=failed.error if failed else None, rounds=len(reports),
            differs_by=cells[0].strategy.differs_by, source=cells[0].strategy.source,
        )  # fmt: skip
        if reports:
            _measure(row, list(reports.values()))
            _compare(row, reports, self.reports(REFERENCE))
            if self.baseline_varies():
                row.losses_identical = row.parameters_identical = None
        return row


def _spread(values: list[float]) -> tuple[float, float, float] | tuple[None, None, None]:
    """Median, least and greatest."""
    return (statistics.median(values), min(values), max(values)) if values else (None, None, None)


def _measure(row: Row, reports: list[TrainingReport]) -> None:
    row.allocator = "/".join(sorted({report.allocator for report in reports}))
    peaks = [peak for report in reports if (peak := report.peak_over_baseline_bytes) is not None]
    in_use = [known for report in reports if (known := report.peak_in_use_over_baseline_bytes) is not None]
    row.peak_bytes, row.in_use_bytes = (statistics.median(known) if known else None for known in (peaks, in_use))
    times = [time for report in reports for time in report.step_times_s[WARMUP_STEPS:]]
    row.step_s, row.step_s_min, row.step_s_max = _spread(times)
    row.final_loss = next((report.losses[-1] for report in reports if report.losses), None)
    counters = [report.offload or {} for report in reports]
    row.written_bytes_per_run = statistics.median(counter.get("written_bytes", 0) for counter in counters)
    row.stall_s_per_run = statistics.median(counter.get("stall_s", 0.0) for counter in counters)


def _compare(row: Row, reports: Reports, reference: Reports) -> None:
    def ratios(what: str) -> list[float]:
        both = [(report, reference[number]) for number, report in reports.items() if number in reference]
        pairs = [(getattr(report, what), getattr(base, what)) for report, base in both]
        return [value / base for value, base in pairs if value is not None and base]

    row.peak_ratio, row.peak_ratio_min, row.peak_ratio_max = _spread(ratios("peak_over_baseline_bytes"))
    row.step_ratio, row.step_ratio_min, row.step_ratio_max = _spread(ratios("median_step_s"))
    first = next(iter(reference.values()), None)
    others = [report for report in reports.values() if report is not first]
    if first is not None and others:
        row.losses_identical = all(report.losses_hex == first.losses_hex for report in others)
        row.parameters_identical = all(report.parameters_sha256 == first.parameters_sha256 for report in others)


def _first_difference(report: TrainingReport, reference: TrainingReport) -> str:
    pairs = zip(report.losses_hex, reference.losses_hex, strict=False)
    for step, (ours, theirs) in enumerate(pairs, start=1):
        if ours != theirs:
            return f"from step {step} on ({float.fromhex(ours)!r} instead of {float.fromhex(theirs)!r})"
    return f"in number ({report.steps} steps instead of {reference.steps})"
