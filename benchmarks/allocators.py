"""Which settings of an allocator suit training with offloading on a CPU: the same cell with each, taking turns."""

import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from hf_offload.allocator import environment_with
from hf_offload.bench.cell import CellSpec, run_cell
from hf_offload.bench.results import file_name
from hf_offload.bench.steps import plan_steps
from hf_offload.bench.strategies import parse_strategies
from hf_offload.cli.bench import Shape
from hf_offload.cli.console import clear_errors, output, progress_bar, visible_log
from hf_offload.cli.options import Overrides
from hf_offload.errors import OffloadError
from hf_offload.reports.formats import json_text, markdown_table, write_texts

CANDIDATES: dict[str, tuple[str, dict[str, str]]] = {
    "glibc": ("glibc", {}),
    "glibc-tuned": ("glibc-tuned", {}),
    "mimalloc": ("mimalloc", {}),
    "freed pages go back at once": ("mimalloc", {"MIMALLOC_PURGE_DELAY": "0"}),
    "freed pages go back after 100 ms": ("mimalloc", {"MIMALLOC_PURGE_DELAY": "100"}),
    "freed pages never go back": ("mimalloc", {"MIMALLOC_PURGE_DELAY": "-1"}),
    "freed pages are reset": ("mimalloc", {"MIMALLOC_PURGE_DECOMMITS": "0"}),
    "arenas are committed eagerly": ("mimalloc", {"MIMALLOC_ARENA_EAGER_COMMIT": "1"}),
    "large pages": ("mimalloc", {"MIMALLOC_ALLOW_LARGE_OS_PAGES": "1"}),
    "no transparent huge pages": ("mimalloc", {"MIMALLOC_ALLOW_THP": "0"}),
}
"""Name -> the allocator, and variables that are set besides. What is not named is mimalloc's default."""
REFERENCE = "glibc-tuned"
COLUMNS = ("allocator", "variables", "peak (MB)", "peak, ratio", "step (s)", "step, ratio")


def allocators(
    shape: Shape = "gpt/demo",
    overrides: Overrides = None,
    strategy: Annotated[str, typer.Option(help="What is measured, such as ours:ssd.")] = "ours:ssd",
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each, in turns.")] = 2,
    output_dir: Annotated[Path, typer.Option("--output", help="Folder for the table and every run's report.")] = Path(
        "runs/bench/allocators"
    ),
) -> None:
    """Compare allocators, and settings of mimalloc: peak residency and step time of the same training run."""
    with clear_errors(), visible_log():
        plan = plan_steps(
            shape, overrides or [], parse_strategies(strategy, reference=False), steps=steps, output=output_dir
        )
        case, (way,) = plan.case, plan.strategies
        peaks: dict[str, list[float]] = {name: [] for name in CANDIDATES}
        times: dict[str, list[float]] = {name: [] for name in CANDIDATES}
        with progress_bar() as progress:
            task = progress.add_task("starting", total=rounds * len(CANDIDATES))
            for number in range(1, rounds + 1):
                for name, (allocator, variables) in CANDIDATES.items():
                    progress.update(task, description=f"running round {number}, {escape(name)}")
                    base = plan.output / "cells" / file_name(f"{number}_{name}")
                    spec = CellSpec(
                        recipe=case.recipe, overrides=plan.overrides_for(case), strategy=way.name, base=str(base)
                    )
                    result = run_cell(spec, environment_with(allocator) | variables)
                    report = result.report
                    if report is None or report.peak_over_baseline_bytes is None or report.median_step_s is None:
                        raise OffloadError(
                            f"{name}: {result.outcome}: {result.error}; its output is in {spec.log_path}."
                        )
                    peaks[name].append(report.peak_over_baseline_bytes / 1e6)
                    times[name].append(report.median_step_s)
                    progress.advance(task)
        results = [
            {
                "name": name,
                "allocator": allocator,
                "variables": variables,
                "peak_mb": peaks[name],
                "step_s": times[name],
                "peak_ratio": _ratio(peaks[name], peaks[REFERENCE]),
                "step_ratio": _ratio(times[name], times[REFERENCE]),
            }
            for name, (allocator, variables) in CANDIDATES.items()
        ]
        about = {"recipe": case.label, "overrides": list(plan.overrides), "strategy": way.name, "rounds": rounds}
        table = markdown_table(COLUMNS, [_texts(name, peaks[name], times[name], peaks, times) for name in CANDIDATES])
        write_texts(
            plan.output, {"table.md": f"{table}\n", "table.json": json_text({**about, "steps": steps, "rows": results})}
        )
    output().print(table, markup=False, highlight=False, soft_wrap=True)


def _texts(
    name: str, peak: list[float], time: list[float], peaks: dict[str, list[float]], times: dict[str, list[float]]
) -> list[str]:
    variables = " ".join(f"`{key}={value}`" for key, value in CANDIDATES[name][1].items())
    return [
        name,
        variables or "-",
        f"{statistics.median(peak):.0f}",
        f"{_ratio(peak, peaks[REFERENCE]):.3f}",
        f"{statistics.median(time):.2f}",
        f"{_ratio(time, times[REFERENCE]):.3f}",
    ]


def _ratio(values: list[float], reference: list[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(value / other for value, other in zip(values, reference, strict=True))
