"""Pictures of what was measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadError
from hf_offload.training.report import WARMUP_STEPS, TrainingReport

SHOWN_STEPS = 3
# Okabe and Ito's palette: told apart by colour-blind readers too. A strategy looks the same in every picture.
_COLOURS = {"keep": "#4c4c4c", "recompute": "#e69f00", "ours:ssd": "#0072b2", "ours:ram": "#009e73"}
_OTHER_COLOUR = "#cc79a7"


def require_matplotlib() -> None:
    """Raise :class:`OffloadError` now rather than after a long measurement."""
    try:
        import matplotlib  # noqa: F401  only whether it is there
    except ImportError as error:
        raise OffloadError("Plots need matplotlib: pip install 'hf-offload[bench]'.") from error


def plot_memory(reports: Mapping[str, TrainingReport], path: Path) -> None:
    """Memory above the baseline over a few steps in the steady state, one line a strategy, as a PNG at ``path``.

    The lines start together at the beginning of the first step after the warm-up; a line ends when its steps are done.
    """
    require_matplotlib()
    # Not pyplot: it keeps figures in process-wide state and picks a backend for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, top, what = 0, 1.0, "memory"
    for name, report in reports.items():
        memory, colour = report.memory, _COLOURS.get(name, _OTHER_COLOUR)
        if memory is None or not memory["step_end_s"]:
            continue
        times, values, steps, what = _steady_window(memory)
        peak = (memory["peak_bytes"] - memory["baseline_bytes"]) / 1e6
        top = max(top, peak, *values)
        axes.fill_between(times, values, color=colour, alpha=0.12, linewidth=0)
        axes.plot(times, values, color=colour, linewidth=1.6, label=f"{name}: {report.median_step_s:.2f} s a step")
        axes.axhline(peak, color=colour, linewidth=1, linestyle=(0, (2, 3)), label=f"peak residency: +{peak:,.0f} MB")
    axes.axhline(0, color="black", linewidth=1.2, linestyle="--")
    axes.annotate(  # below the line, in the room that the margin leaves
        "baseline: weights, gradients and optimizer state",
        xy=(1, 0), xycoords=("axes fraction", "data"), xytext=(-4, -12), textcoords="offset points",
        ha="right", fontsize=8,
    )  # fmt: skip
    first = next(iter(reports.values()))
    axes.set_title(f"{first.recipe}: {what} over {steps} training steps", fontsize=13, loc="left")
    axes.set_xlabel(f"seconds from the beginning of step {_first_step(len(first.step_times_s)) + 1}")
    axes.set_ylabel("above the baseline (MB)")
    axes.margins(x=0)
    axes.set_ylim(bottom=min(axes.get_ylim()[0], -0.07 * top), top=1.35 * top)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", ncols=max(len(reports), 1), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _first_step(count: int) -> int:
    return min(WARMUP_STEPS, max(count - 1, 0))


def _steady_window(memory: Mapping[str, Any]) -> tuple[list[float], list[float], int, str]:
    """Times from the window's start and MB above the baseline, how many steps the window holds, and what is shown."""
    ends = memory["step_end_s"]
    first = _first_step(len(ends))
    last = min(first + SHOWN_STEPS, len(ends)) - 1
    begin, end = memory["step_start_s"][first], ends[last]
    if memory.get("timeline_in_use_bytes"):
        # An allocator that keeps freed memory holds residency at its highest level: a flat line tells nothing.
        values, baseline, what = memory["timeline_in_use_bytes"], memory["baseline_in_use_bytes"], "memory in use"
    else:
        values, baseline, what = memory["timeline_bytes"], memory["baseline_bytes"], "resident memory"
    points = [
        (time - begin, (value - baseline) / 1e6)
        for time, value in zip(memory["timeline_s"], values, strict=True)
        if begin <= time <= end
    ]
    return [time for time, _ in points], [value for _, value in points], last - first + 1, what
