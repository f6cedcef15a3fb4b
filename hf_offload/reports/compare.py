"""Run one recipe in several ways, each in a process of its own, and say what differs.

The ways alternate (A B C A B C), so that a machine that slows down slows all of them; times are compared within a
round. Whether a way computes the same is not assumed: losses of every step and the final weights are compared bit by
bit.
"""

import dataclasses
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_offload.allocator import environment_with
from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.settings.load import collect_errors, nearest
from hf_offload.settings.recipes import load_recipe
from hf_offload.settings.schema import TIER_ALIASES, TIERS
from hf_offload.settings.sizes import format_bytes
from hf_offload.training.report import WARMUP_STEPS, TrainingReport, median_after_warmup

REFERENCE = "keep"
_NO_OFFLOAD = "offload={tier: none}"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to spend memory, as changes to a recipe."""

    name: str
    overrides: tuple[str, ...]
    must_match: bool
    """Whether its losses and weights have to equal those of ``keep`` bit by bit."""


def parse_strategies(names: str) -> list[Strategy]:
    """``"keep,recompute,ours:ssd"`` to strategies; ``keep`` has to be among them, as what others are compared with."""
    tiers = [tier for tier in TIERS if tier != "none"]
    known = [REFERENCE, "recompute", *(f"ours:{tier}" for tier in tiers)]
    strategies: list[Strategy] = []
    with collect_errors("strategies") as check:
        for name in (part.strip() for part in names.split(",")):
            with check:
                kind, colon, tier = name.partition(":")
                name = f"ours:{TIER_ALIASES.get(tier, tier)}" if kind == "ours" and colon else name
                if name not in known:
                    raise OffloadConfigError(
                        f"strategy {name!r} is unknown: choose from {', '.join(known)}.{nearest(name, known)}"
                    )
                if name in [strategy.name for strategy in strategies]:
                    raise OffloadConfigError(f"strategy {name!r} is given twice: use --rounds to repeat.")
                strategies.append(_strategy(name))
        with check:
            if REFERENCE not in [part.strip() for part in names.split(",")]:
                raise OffloadConfigError(
                    f"strategies={names!r} leaves out {REFERENCE!r}, which the others are compared with."
                )
    return strategies


def _strategy(name: str) -> Strategy:
    from transformers import TrainingArguments

    # transformers 5.23 renamed the argument, and warns about the old name.
    renamed = hasattr(TrainingArguments, "activation_checkpointing")
    recompute = "training.activation_checkpointing" if renamed else "training.gradient_checkpointing"
    if name == REFERENCE:
        return Strategy(name, (_NO_OFFLOAD, f"{recompute}=false"), must_match=True)
    if name == "recompute":
        # It runs the same kernels twice, usually with the same bits, but that is its own affair.
        return Strategy(name, (_NO_OFFLOAD, f"{recompute}=true"), must_match=False)
    tier = name.partition(":")[2]
    # A recipe's directory is for its files, which the RAM tier has none of.
    files = ("directory", "disk_budget", "max_disk_write_bytes")
    drop = tuple(f"offload.{name}=null" for name in files) if tier == "ram" else ()
    return Strategy(name, (*drop, f"offload.tier={tier}", f"{recompute}=false"), must_match=True)


@dataclasses.dataclass
class Cell:
    """One run of one strategy: its report, or why there is none."""

    strategy: Strategy
    round: int
    report: TrainingReport | None = None
    failure: str | None = None


@dataclasses.dataclass
class Comparison:
    """All cells that ran, in the order in which they ran."""

    recipe: str
    overrides: Sequence[str]
    allocator: str
    cells: list[Cell]
    interrupted: bool = False

    def rows(self) -> list["Row"]:
        """One row a strategy, in the order given, ``keep`` being what ratios and identity refer to."""
        reference = self.reports(REFERENCE)
        names = list(dict.fromkeys(cell.strategy.name for cell in self.cells))
        return [_row(name, [cell for cell in self.cells if cell.strategy.name == name], reference) for name in names]

    def reports(self, name: str) -> dict[int, TrainingReport]:
        """Reports of a strategy by round."""
        return {
            cell.round: cell.report for cell in self.cells if cell.strategy.name == name and cell.report is not None
        }

    def problems(self) -> list[str]:
        """What must not be overlooked: cells that failed, and results that had to be identical and are not."""
        problems = [f"{cell.strategy.name}, round {cell.round}: {cell.failure}" for cell in self.cells if cell.failure]
        reference = next(iter(self.reports(REFERENCE).values()), None)
        for cell in self.cells:
            if reference is None or cell.report is None or not cell.strategy.must_match:
                continue
            where = f"{cell.strategy.name}, round {cell.round}"
            if cell.report.losses_hex != reference.losses_hex:
                problems.append(f"{where}: losses differ from {REFERENCE} {_first_difference(cell.report, reference)}.")
            elif cell.report.parameters_sha256 != reference.parameters_sha256:
                problems.append(f"{where}: losses equal those of {REFERENCE}, final parameters differ.")
        return problems

    def as_dict(self) -> dict[str, Any]:
        """Everything in the table, for JSON."""
        return {
            "recipe": self.recipe,
            "overrides": list(self.overrides),
            "allocator": self.allocator,
            "interrupted": self.interrupted,
            "warmup_steps": WARMUP_STEPS,
            "rows": [dataclasses.asdict(row) for row in self.rows()],
            "problems": self.problems(),
            "machine": next((cell.report.machine for cell in self.cells if cell.report), {}),
            "versions": next((cell.report.versions for cell in self.cells if cell.report), {}),
        }


@dataclasses.dataclass
class Row:
    """One strategy over all its rounds: medians, and ratios to ``keep`` that are medians of each round's ratio."""

    strategy: str
    rounds: int
    peak_bytes: float | None = None
    """Above the baseline."""
    peak_ratio: float | None = None
    in_use_bytes: float | None = None
    """The allocator's own count of bytes in use at its highest sample, above the baseline."""
    step_s: float | None = None
    step_ratio: float | None = None
    written_bytes_per_run: float = 0.0
    stall_s_per_run: float = 0.0
    final_loss: float | None = None
    losses_identical: bool | None = None
    """To those of keep's first round, in every round; ``None`` when there was nothing to compare."""
    parameters_identical: bool | None = None

    def cells(self) -> list[str]:
        """The row as the texts of :data:`COLUMNS`."""
        return [
            self.strategy,
            "failed" if self.peak_bytes is None else f"+{self.peak_bytes / 1e6:.0f} MB",
            _ratio(self.peak_ratio),
            "-" if self.step_s is None else f"{self.step_s:.2f} s",
            _ratio(self.step_ratio),
            format_bytes(self.written_bytes_per_run) if self.written_bytes_per_run else "-",
            "-" if self.final_loss is None else f"{self.final_loss:.5f}",
            self.identity(),
        ]

    def identity(self) -> str:
        """Whether losses and parameters are those of keep."""
        if self.losses_identical is None:
            return "-"
        if not self.losses_identical:
            return "losses DIFFER"
        return "identical" if self.parameters_identical else "weights DIFFER"


COLUMNS = (
    "strategy",
    "peak",
    "of keep",
    "step",
    "of keep",
    "written",
    "loss",
    "vs keep",
)


def run_comparison(
    recipe: str,
    overrides: Sequence[str],
    strategies: Sequence[Strategy],
    *,
    rounds: int,
    output: Path,
    allocator: str,
    on_cell: Callable[[Cell], None] = lambda cell: None,
) -> Comparison:
    """Run every strategy ``rounds`` times and compare. ``on_cell`` hears of each cell when it is done.

    Ctrl-C ends the running cell and keeps those that finished. Mistakes in the recipe, the overrides and the allocator
    raise :class:`OffloadConfigError` before anything runs.
    """
    environment = environment_with(allocator)
    output = output.resolve()
    own = (f"training.output_dir={output / 'work'}", f"data.cache_dir={output / 'data'}")
    with collect_errors("comparison") as check:
        if rounds < 1:
            with check:
                raise OffloadConfigError(f"rounds={rounds}: give one or more.")
        for strategy in strategies:
            with check:
                load_recipe(recipe, (*overrides, *own, *strategy.overrides))
    output.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(recipe, overrides, allocator, [])
    for number in range(1, rounds + 1):
        for strategy in strategies:
            cell = Cell(strategy, number)
            base = output / "cells" / f"{number}_{strategy.name.replace(':', '_')}"
            try:
                _run_cell(cell, recipe, (*overrides, *own, *strategy.overrides), base, environment)
            except KeyboardInterrupt:
                comparison.interrupted = True
                return comparison
            comparison.cells.append(cell)
            on_cell(cell)
    return comparison


def _run_cell(cell: Cell, recipe: str, overrides: Sequence[str], base: Path, environment: dict[str, str]) -> None:
    base.parent.mkdir(parents=True, exist_ok=True)
    report, log = base.with_name(f"{base.name}.json"), base.with_name(f"{base.name}.log")
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "hf_offload", "train", recipe, *overrides, "--report", str(report)]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        finally:
            _end(process)
    if code == 0:
        cell.report = TrainingReport.read(report)
    elif code == 130:
        # A terminal sends Ctrl-C to the child as well, and the child may be faster.
        raise KeyboardInterrupt
    else:
        tail = " | ".join(log.read_text(encoding="utf-8", errors="replace").split("\n")[-12:]).strip(" |")
        cell.failure = f"ended with code {code}; all of its output is in {log}. The end of it: {tail}"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _row(name: str, cells: list[Cell], reference: dict[int, TrainingReport]) -> Row:
    reports = {cell.round: cell.report for cell in cells if cell.report is not None}
    row = Row(name, rounds=len(reports))
    if not reports:
        return row
    peaks = {number: report.peak_over_baseline_bytes for number, report in reports.items()}
    row.peak_bytes = statistics.median(peak for peak in peaks.values() if peak is not None)
    in_use = [report.peak_in_use_over_baseline_bytes for report in reports.values()]
    row.in_use_bytes = statistics.median(known) if (known := [value for value in in_use if value is not None]) else None
    row.step_s = median_after_warmup([s for report in reports.values() for s in report.step_times_s[WARMUP_STEPS:]], 0)
    row.final_loss = next((report.losses[-1] for report in reports.values() if report.losses), None)
    counters = [report.offload or {} for report in reports.values()]
    row.written_bytes_per_run = statistics.median(counter.get("written_bytes", 0) for counter in counters)
    row.stall_s_per_run = statistics.median(counter.get("stall_s", 0.0) for counter in counters)
    row.peak_ratio = _median_ratio(peaks, {n: report.peak_over_baseline_bytes for n, report in reference.items()})
    row.step_ratio = _median_ratio(
        {number: report.median_step_s for number, report in reports.items()},
        {number: report.median_step_s for number, report in reference.items()},
    )
    first = next(iter(reference.values()), None)
    others = [report for report in reports.values() if report is not first]
    if first is not None and others:
        row.losses_identical = all(report.losses_hex == first.losses_hex for report in others)
        row.parameters_identical = all(report.parameters_sha256 == first.parameters_sha256 for report in others)
    return row


def _median_ratio(values: dict[int, Any], reference: dict[int, Any]) -> float | None:
    pairs = [(value, reference.get(number)) for number, value in values.items()]
    ratios = [value / base for value, base in pairs if value is not None and base]
    return statistics.median(ratios) if ratios else None


def _first_difference(report: TrainingReport, reference: TrainingReport) -> str:
    pairs = zip(report.losses_hex, reference.losses_hex, strict=False)
    for step, (ours, theirs) in enumerate(pairs, start=1):
        if ours != theirs:
            return f"from step {step} on ({float.fromhex(ours)!r} instead of {float.fromhex(theirs)!r})"
    return f"in number ({report.steps} steps instead of {reference.steps})"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _in_use(comparison: Comparison) -> str:
    known = [(row.strategy, row.in_use_bytes) for row in comparison.rows() if row.in_use_bytes is not None]
    return ", ".join(f"{name} +{in_use / 1e6:.0f} MB" for name, in_use in known) or "not known for this allocator"


_FRAGMENTS = (
    "glibc's heap fragments, which hides part of what offloading saves on a CPU. With tcmalloc installed (Debian and "
    "Ubuntu: libtcmalloc-minimal4, Fedora: gperftools-libs) all runs use it.",
)


def footnotes(comparison: Comparison) -> list[str]:
    """What a reader has to know about the numbers."""
    report = next((cell.report for cell in comparison.cells if cell.report is not None), None)
    if report is None:
        return []
    measured = report.memory or {}
    used = sorted({cell.report.allocator for cell in comparison.cells if cell.report is not None})
    rounds = max(cell.round for cell in comparison.cells)
    baseline = measured.get("baseline_bytes", 0) / 1e6
    steps = f"{report.steps} steps" + (f" x {rounds} rounds, alternating" if rounds > 1 else "")
    machine, versions = report.machine, report.versions
    return [
        f"{' '.join([comparison.recipe, *comparison.overrides])}: {report.parameter_count / 1e6:.1f} M parameters, "
        f"{steps}.",
        f"Peak: {measured.get('peak_source')}, above a process that holds weights, gradients and optimizer "
        f"state ({baseline:.0f} MB). Setup is not part of it. The allocator keeps some of it at hand; of the peak it "
        f"counted as in use: {_in_use(comparison)}.",
        f"Step: median time without the first {WARMUP_STEPS} steps. Of keep: ratio to keep in the same round. "
        "Written: to the tier, in one run.",
        "Identical: losses of all steps and all parameters after the last one, compared bit by bit with those of the "
        "first round's keep.",
        f"Allocator of all runs: {', '.join(used)}. Machine: {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['device']}; torch {versions['torch']}, transformers {versions['transformers']}.",
        *(_FRAGMENTS if "glibc-tuned" in used else ()),
    ]


def markdown(comparison: Comparison) -> str:
    """The table with its footnotes as a Markdown document."""
    lines = [f"# {comparison.recipe}: memory and time of a training step", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in comparison.rows()]
    problems = comparison.problems()
    if comparison.interrupted:
        lines += ["", "**Interrupted: only the runs that finished are shown.**"]
    if problems:
        lines += ["", "## Problems", "", *(f"- **{problem}**" for problem in problems)]
    return "\n".join([*lines, "", *(f"- {note}" for note in footnotes(comparison)), ""])


def write_results(comparison: Comparison, output: Path) -> list[Path]:
    """Write ``table.md``, ``table.json`` and ``memory.png`` into ``output``; returns their paths."""
    if not any(cell.report for cell in comparison.cells):
        raise OffloadError(
            "No run finished, so there is nothing to compare."
            + "".join(f"\n  - {problem}" for problem in comparison.problems())
        )
    from hf_offload.reports.plots import plot_memory

    table, data, picture = output / "table.md", output / "table.json", output / "memory.png"
    table.write_text(markdown(comparison), encoding="utf-8")
    data.write_text(json.dumps(comparison.as_dict(), indent=1) + "\n", encoding="utf-8")
    reports = {row.strategy: comparison.reports(row.strategy) for row in comparison.rows()}
    plot_memory({name: next(iter(by_round.values())) for name, by_round in reports.items() if by_round}, picture)
    return [table, data, picture]
