"""Results as tables with footnotes, as Markdown and as plots, and the files they are written to."""

from pathlib import Path

from hf_offload.bench.cell import DONE
from hf_offload.bench.results import Case, Results, Row, outcome
from hf_offload.errors import OffloadError
from hf_offload.reports.formats import REFERENCE, csv_text, json_text, markdown_table, write_texts
from hf_offload.settings.sizes import format_bytes
from hf_offload.training.report import WARMUP_STEPS

COLUMNS = ("strategy", "peak", "ratio", "step", "ratio", "spread", "written", "loss", "allocator", "vs baseline")
NARROW = (0, 1, 2, 3, 4, 8, 9)
"""Which of the columns to show where not all of them fit."""
WIDE_CHARACTERS = 125
"""Where they do."""

_FRAGMENTS = (
    "glibc's heap fragments, which hides part of what offloading saves on a CPU. With mimalloc "
    "(pip install 'hf-offload[cpu]') or tcmalloc installed our runs use it, and the others are tried with it."
)
_VARIES = (
    "the baseline itself varies from run to run: some kernels of this device sum in no fixed order, so nothing can be "
    "compared bit by bit. Set training.full_determinism=true to compare."
)


def texts(row: Row) -> list[str]:
    """The row as the texts of :data:`COLUMNS`."""
    if not row.rounds:
        return [row.strategy, *["-"] * (len(COLUMNS) - 2), outcome(row)]
    return [
        row.strategy,
        "-" if row.peak_bytes is None else f"+{row.peak_bytes / 1e6:.0f} MB",
        _ratio(row.peak_ratio),
        "-" if row.step_s is None else f"{row.step_s:.2f} s",
        _ratio(row.step_ratio),
        _spread(row),
        format_bytes(row.written_bytes_per_run) if row.written_bytes_per_run else "-",
        "-" if row.final_loss is None else f"{row.final_loss:.5f}",
        row.allocator or "-",
        identity(row),
    ]


def identity(row: Row) -> str:
    """Whether losses and parameters are the baseline's."""
    if row.losses_identical is None:
        same = "-"
    elif row.differs_by is not None:
        same = row.differs_by
    elif not row.losses_identical:
        same = "losses DIFFER"
    else:
        same = "identical" if row.parameters_identical else "weights DIFFER"
    return same if row.outcome == DONE else f"{same}; one round {outcome(row)}"


def describe(results: Results, case: Case) -> str:
    """The case in one line."""
    model = results.model(case)
    return f"{case.shape}, batch {case.batch} x sequence {case.sequence}{f': {model}' if model else ''}"


def footnotes(results: Results) -> list[str]:
    """What a reader needs to know about the numbers."""
    notes = [f"{case.label}: {_VARIES}" for case in results.cases() if results.baseline_varies(case)]
    notes += results.findings()
    report = next((cell.report for cell in results.cells if cell.report is not None), None)
    if report is None:
        return notes
    measured, machine, versions = report.memory or {}, report.machine, report.versions
    baselines = "; ".join(f"{case.label} {_baseline(results, case)}" for case in results.cases())
    rounds = f" x {results.rounds} rounds, alternating" if results.rounds > 1 else ""
    notes += [
        f"{report.steps} steps{rounds}. Changes: {' '.join(results.overrides) or 'none'}.",
        f"Peak: {measured.get('peak_source')}, above a process that holds weights, gradients and optimizer state "
        f"({baselines}). Setup is not part of it. The allocator keeps some of it at hand; of the peak it counted as in "
        f"use: {_in_use(results)}.",
        f"Step: median time without the first {WARMUP_STEPS} steps. Ratio: to the baseline in the same round. Spread: "
        + ("least to greatest of the rounds' ratios." if results.rounds > 1 else "shortest to longest step.")
        + " Written: to the tier, in one run.",
        "Identical: losses of all steps and all parameters after the last one, compared bit by bit with those of the "
        "baseline's first round.",
        f"Machine: {machine['cores']} cores, {machine['threads']} threads, {machine['device']}; torch "
        f"{versions['torch']}, transformers {versions['transformers']}.",
    ]
    if any(cell.extra and cell.extra.startswith("trial") for cell in results.cells):
        notes.append(
            "Allocator: in the first round, the baseline and others' strategies run with glibc's and those that are "
            "installed; they continue with the fastest. The slower runs are in table.json."
        )
    if results.memory_limit_bytes is not None:
        notes.append(f"PyTorch may take {format_bytes(results.memory_limit_bytes)} of the device's memory.")
    if any("glibc-tuned" in (row.allocator or "") for row in results.rows()):
        notes.append(_FRAGMENTS)
    return notes


def markdown(results: Results) -> str:
    """The tables with their footnotes as a Markdown document."""
    cases = results.cases()
    shapes = ", ".join(dict.fromkeys(case.shape for case in cases))
    lines = [f"# {shapes}: memory and time of a training step", ""]
    for case in cases:
        rows = [texts(row) for row in results.rows(case)]
        lines += [f"{describe(results, case)}.", "", markdown_table(COLUMNS, rows), ""]
    if results.interrupted:
        lines += ["**Interrupted: only the runs that finished are shown.**", ""]
    problems = results.problems()
    if problems:
        lines += ["## Problems", "", *(f"- **{problem}**" for problem in problems), ""]
    lines += [f"- {note}" for note in footnotes(results)]
    lines += ["", "## Strategies", ""]
    lines += [f"- {name}: {source}" for name, source in {row.strategy: row.source for row in results.rows()}.items()]
    return "\n".join([*lines, ""])


def write_results(results: Results, output: Path) -> list[Path]:
    """Write ``table.md``, ``table.json``, ``table.csv`` and the plots into ``output``; returns their paths."""
    if not any(row.rounds for row in results.rows()):
        raise OffloadError(
            "No run finished, so there is nothing to compare."
            + "".join(f"\n  - {problem}" for problem in dict.fromkeys([*results.problems(), *results.findings()]))
        )
    from hf_offload.reports.plots import Point, plot_memory, plot_pareto

    contents = {
        "table.md": markdown(results),
        "table.json": json_text(results.as_dict()),
        "table.csv": csv_text(results.rows()),
    }
    written = write_texts(output, contents)
    cases = results.cases()
    for case in cases:
        ending = f"_{case.file_name}.png" if len(cases) > 1 else ".png"
        rows = results.rows(case)
        first = {row.strategy: next(iter(results.reports(case, row.strategy).values())) for row in rows if row.rounds}
        if first:
            written.append(output / f"memory{ending}")
            plot_memory(first, written[-1], results.rounds)
        points = [Point(row.strategy, row.peak_bytes, row.step_s) for row in rows if row.peak_bytes and row.step_s]
        if points:
            written.append(output / f"pareto{ending}")
            plot_pareto(points, describe(results, case), written[-1])
    return written


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _spread(row: Row) -> str:
    if row.rounds > 1:
        if row.strategy == REFERENCE or row.step_ratio_min is None or row.step_ratio_max is None:
            return "-"
        return f"{row.step_ratio_min:.3f}..{row.step_ratio_max:.3f}"
    if row.step_s_min is None or row.step_s_max is None:
        return "-"
    return f"{row.step_s_min:.2f}..{row.step_s_max:.2f} s"


def _baseline(results: Results, case: Case) -> str:
    memories = [cell.report.memory for cell in results.cells if cell.case == case and cell.report is not None]
    known = next((memory["baseline_bytes"] for memory in memories if memory), None)
    return "unknown" if known is None else f"{known / 1e6:.0f} MB"


def _in_use(results: Results) -> str:
    several = len(results.cases()) > 1
    known = [
        f"{f'{row.shape} {row.batch} x {row.sequence} ' if several else ''}{row.strategy} +{row.in_use_bytes / 1e6:.0f} MB"
        for row in results.rows()
        if row.in_use_bytes is not None
    ]
    return ", ".join(known) or "not known for this allocator"
