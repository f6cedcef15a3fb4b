"""Results as a table with footnotes, as Markdown and as a picture, and the files they are written to."""

from pathlib import Path

from hf_offload.bench.cell import DONE
from hf_offload.bench.results import Results, Row
from hf_offload.errors import OffloadError
from hf_offload.reports.formats import REFERENCE, json_text, markdown_table, write_texts
from hf_offload.settings.sizes import format_bytes
from hf_offload.training.report import WARMUP_STEPS

COLUMNS = ("strategy", "peak", "ratio", "step", "ratio", "spread", "written", "loss", "allocator", "vs baseline")
SHOWN = (0, 1, 2, 3, 4, 8, 9)
"""Which of the columns fit a terminal; ``table.md`` has all."""

_VARIES = (
    "The baseline itself varies from run to run: some kernels of this device sum in no fixed order, so nothing can be "
    "compared bit by bit. Set training.full_determinism=true to compare."
)


def texts(row: Row) -> list[str]:
    """The row as the texts of :data:`COLUMNS`."""
    if not row.rounds:
        return [row.strategy, *["-"] * (len(COLUMNS) - 2), row.ended]
    return [
        row.strategy,
        "-" if row.peak_bytes is None else f"+{row.peak_bytes / 1e6:.0f} MB",
        "-" if row.peak_ratio is None else f"{row.peak_ratio:.3f}",
        "-" if row.step_s is None else f"{row.step_s:.2f} s",
        "-" if row.step_ratio is None else f"{row.step_ratio:.3f}",
        _spread(row),
        format_bytes(row.written_bytes_per_run) if row.written_bytes_per_run else "-",
        "-" if row.final_loss is None else f"{row.final_loss:.5f}",
        row.allocator or "-",
        identity(row),
    ]


def _spread(row: Row) -> str:
    """Of the rounds' ratios to the baseline; of one round, of its steps."""
    if row.rounds == 1:
        return "-" if row.step_s_min is None else f"{row.step_s_min:.2f}..{row.step_s_max:.2f} s"
    if row.strategy == REFERENCE or row.step_ratio_min is None:
        return "-"
    return f"{row.step_ratio_min:.3f}..{row.step_ratio_max:.3f}"


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
    return same if row.outcome == DONE else f"{same}; one round {row.ended}"


def describe(results: Results) -> str:
    """What was trained, in one line."""
    model, case = results.model(), results.case
    return f"{case.shape}, batch {case.batch} x sequence {case.sequence}{f': {model}' if model else ''}"


def footnotes(results: Results) -> list[str]:
    """What a reader needs to know about the numbers."""
    notes = [*([_VARIES] if results.baseline_varies() else []), *results.findings()]
    report = next((cell.report for cell in results.cells if cell.report is not None), None)
    if report is None:
        return notes
    machine, versions, repeated = report.machine, report.versions, results.rounds > 1
    notes += [
        f"{report.steps} steps{f' x {results.rounds} rounds, alternating' if repeated else ''}. Changes: "
        f"{' '.join(results.overrides) or 'none'}.",
        f"Peak: {(report.memory or {}).get('peak_source')}, above a process that holds weights, gradients and optimizer "
        "state. Setup is not part of it. What of it was in use is in table.json.",
        f"Step: median time without the first {WARMUP_STEPS} steps. Ratio: to the baseline in the same round. Spread: "
        f"{'least to greatest of the ratios' if repeated else 'shortest to longest step'}. Written: to the tier, in one run.",
        "Identical: losses of all steps and all parameters after the last one, compared bit by bit with those of the "
        "baseline's first round.",
        f"Machine: {machine['cores']} cores, {machine['threads']} threads, {machine['device']}; torch "
        f"{versions['torch']}, transformers {versions['transformers']}.",
    ]
    return notes


def markdown(results: Results) -> str:
    """The table with its footnotes as a Markdown document."""
    lines = [f"# {results.case.shape}: memory and time of a training step", "", f"{describe(results)}.", ""]
    lines += [markdown_table(COLUMNS, map(texts, results.rows())), ""]
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
    """Write ``table.md``, ``table.json`` and ``memory.png`` into ``output``; returns their paths."""
    first = {row.strategy: next(iter(results.reports(row.strategy).values())) for row in results.rows() if row.rounds}
    if not first:
        raise OffloadError(
            "No run finished, so there is nothing to compare."
            + "".join(f"\n  - {problem}" for problem in dict.fromkeys([*results.problems(), *results.findings()]))
        )
    from hf_offload.reports.plots import plot_memory

    plot_memory(first, output / "memory.png", results.rounds)
    texts_of = {"table.md": markdown(results), "table.json": json_text(results.as_dict())}
    return [*write_texts(output, texts_of), output / "memory.png"]
