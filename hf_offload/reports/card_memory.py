"""The section of a model card on memory and time: the run, its plan, and other ways to train the same."""

import dataclasses
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.reports.formats import REFERENCE, markdown_table
from hf_offload.settings.shown import cropped
from hf_offload.settings.text_files import parse_json, read_text
from hf_offload.training.report import TRAINER_BATCH, TrainingReport

MEMORY_PLOT = "memory.png"
_WAYS = {
    "baseline": "no offloading (baseline)",
    "recompute": "activation checkpointing",
    "ours:ssd": "offload to SSD",
    "ours:ram": "offload to RAM",
    "ours:auto": "within the budget (`tier: auto`)",
    "ours:elementwise": "recompute of elementwise operations (`recompute_elementwise`)",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same recipe, trained in several ways: ``table.json`` of ``hf-offload bench steps``, read."""

    rows: Sequence[Mapping[str, Any]]
    machine: Mapping[str, Any]
    rounds: int
    overrides: Sequence[str]

    @classmethod
    def read(cls, path: Path) -> "Comparison":
        """Raises :class:`~hf_offload.errors.OffloadConfigError` if ``path`` is something else."""
        try:
            values = parse_json(read_text(path, "The comparison"), str(path))
            rows = [row for row in values["rows"] if row["rounds"]]
            return cls(rows=rows, machine=values["machine"], rounds=values["rounds"], overrides=values["overrides"])
        except OffloadConfigError as error:
            raise OffloadConfigError(f"{path} is not a comparison: {error}") from error
        except (KeyError, TypeError) as error:
            raise OffloadConfigError(
                f"{path} is not a comparison: {cropped(str(error))}. Give the table.json that `hf-offload bench steps "
                "RECIPE` wrote."
            ) from error

    def table(self) -> str:
        """One row per way, as Markdown."""
        counted = _counts_in_use(self.machine["device"]) and all(row["in_use_bytes"] is not None for row in self.rows)
        repeated = self.rounds > 1
        names = ["way", *(["in use"] if counted else []), "peak", "ratio to baseline", "step", "ratio to baseline"]
        rows = [
            (
                _WAYS.get(row["strategy"], row["strategy"]),
                *([_above(row["in_use_bytes"])] if counted else []),
                _above(row["peak_bytes"]),
                f"{row['peak_ratio']:.3f}",
                f"{row['step_s']:.2f} s",
                f"{row['step_ratio']:.3f}",
                *([_spread(row)] if repeated else []),
                _identity(row),
            )
            for row in self.rows
        ]
        return markdown_table([*names, *(["spread"] if repeated else []), "losses and weights"], rows)

    @property
    def steps(self) -> str | None:
        """Of each run, where it was said how many."""
        name = "training.max_steps="
        return next((text.removeprefix(name) for text in reversed(self.overrides) if text.startswith(name)), None)

    def command(self, recipe: str, settings: Mapping[str, Any]) -> str:
        """What makes the same comparison of ``recipe``, whose ``settings`` are those of its training."""
        row = self.rows[0]
        own = {
            "batch": settings["training"].get("per_device_train_batch_size") or TRAINER_BATCH,
            "sequence": settings["data"]["sequence_length"],
        }
        other = [text for name, value in own.items() if row[name] != value for text in (f"--{name}", str(row[name]))]
        strategies = ",".join(row["strategy"] for row in self.rows)
        return shlex.join(
            [
                "hf-offload", "bench", "steps", recipe, *self.overrides, *other, "--strategies", strategies,
                "--rounds", str(self.rounds), "--output", "comparison",
            ]
        )  # fmt: skip


def memory_section(report: TrainingReport, comparison: Comparison | None, plots: Sequence[str]) -> Iterator[str]:
    """The section's paragraphs. ``report`` has been measured; ``plots`` are the names of pictures in the card's folder."""
    yield "## Memory and time"
    yield _how_it_is_counted(report)
    nbytes = report.settings["offload"].get("memory_budget")
    if report.forecast is not None and nbytes is not None:
        peak = report.forecast["measured_peak_bytes"]
        kept = "" if peak is None else f", {'kept' if peak <= nbytes else 'exceeded'} in the step that was measured"
        yield f"The budget was {_mb(nbytes)} ({nbytes / 2**20:.6g} MiB) of live tensors{kept}."
    yield markdown_table(("this run", *(["planned"] if report.forecast else []), "measured"), _rows_of_the_run(report))
    if comparison is None:
        return
    repeated = comparison.rounds > 1
    spread = "; ratios to the baseline are taken within a round, and the spread is the least and the greatest"
    yield (
        f"The same recipe in several ways, on {describe_machine(comparison.machine)}, at another time than the run above: "
        f"compare step times within the table only. Medians of {f'{comparison.rounds} rounds' if repeated else 'one round'}"
        f"{f' of {comparison.steps} steps' if comparison.steps else ''}{spread if repeated else ''}."
    )
    yield comparison.table()
    if MEMORY_PLOT in plots:
        yield f"![Memory over time]({MEMORY_PLOT})"
        which = "one of the rounds, where the table has medians of all" if repeated else "that round"
        dotted = "; dotted lines: the peak" if _counts_in_use(comparison.machine["device"]) else ""
        yield f"The picture shows a few steps of {which}. Lines: what is in use{dotted}."


def describe_machine(machine: Mapping[str, Any]) -> str:
    """Device and cores."""
    cores = f"{machine['cores']} CPU cores"
    return cores if machine["device"] == "cpu" else f"{machine['device']}, {cores}"


def _how_it_is_counted(report: TrainingReport) -> str:
    assert report.memory is not None
    above, which = "above weights, gradients and optimizer state", "it"
    counts = f"*Peak* is the most that was allocated, {above}."
    if _counts_in_use(report.memory["device"]):
        which = "both"
        counts = (
            f"*In use* and *peak* are {above}: the most that the allocator had given out, and the most that the process "
            "took, which holds what its allocator keeps at hand, too."
        )
    live = "*Live tensors* are all there are at once, weights, gradients and optimizer state included: what a budget is for."
    evaluates = str(report.settings["training"].get("eval_strategy") or "no") != "no"
    whole = f" Evaluations on the way are part of {which} in this run; the comparison has none." if evaluates else ""
    return f"{f'{live} ' if report.forecast else ''}{counts}{whole} MB and GB are powers of ten."


def _rows_of_the_run(report: TrainingReport) -> Iterator[tuple[str, ...]]:
    in_use, peak_above = report.peak_in_use_over_baseline_bytes, report.peak_over_baseline_bytes
    assert report.memory is not None
    assert peak_above is not None
    forecast, planned = report.forecast, ["-"] if report.forecast else []
    if forecast is not None:
        peak, steps = forecast["measured_peak_bytes"], forecast["measured_step_s"]
        measured = "-" if peak is None else _mb(peak)
        yield "live tensors, of one step under the last plan", _mb(forecast["peak_bytes"]), measured
        measured = f"{statistics.median(steps):.2f} s" if steps else "-"
        yield f"step, median of {len(steps)} under the last plan", f"{forecast['step_s']:.2f} s", measured
    if report.median_step_s is not None:
        yield f"step, median of all {report.steps}", *planned, f"{report.median_step_s:.2f} s"
    if _counts_in_use(report.memory["device"]) and in_use is not None:
        yield f"in use, most of all {report.steps} steps", *planned, _above(in_use)
    yield f"peak, most of all {report.steps} steps", *planned, _above(peak_above)
    if report.offload is not None:
        yield "written to disk, in all", *planned, f"{report.offload['written_bytes'] / 1e9:.1f} GB"
        yield "waited for it, in all", *planned, f"{report.offload['stall_s']:.1f} s"


def _counts_in_use(device: str) -> bool:
    """Whether the peak is the process's, which says less than what its allocator counts; an accelerator's is the latter."""
    return device == "cpu"


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f} MB"


def _above(nbytes: float) -> str:
    return f"+{_mb(nbytes)}"


def _spread(row: Mapping[str, Any]) -> str:
    return "-" if row["strategy"] == REFERENCE else f"{row['step_ratio_min']:.3f}..{row['step_ratio_max']:.3f}"


def _identity(row: Mapping[str, Any]) -> str:
    if row["strategy"] == REFERENCE:
        return "-"
    return "the baseline's, bit by bit" if row["losses_identical"] and row["parameters_identical"] else "others"
