"""Pictures of what was measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadError
from hf_offload.training.report import WARMUP_STEPS, TrainingReport

SHOWN_STEPS = 3
# Okabe and Ito's palette: told apart by colour-blind readers too.
_COLOURS = ("#4c4c4c", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#d55e00")


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
    steps = 0
    for (name, report), colour in zip(reports.items(), _COLOURS * len(reports), strict=False):
        memory = report.memory
        if memory is None or not memory["step_end_s"]:
            continue
        times, values, steps = _steady_window(memory)
        peak = (memory["peak_bytes"] - memory["baseline_bytes"]) / 1e6
        step_s = report.median_step_s or 0.0
        label = f"{name}: +{peak:,.0f} MB, {step_s:.2f} s a step"
        axes.fill_between(times, values, color=colour, alpha=0.12, linewidth=0)
        axes.plot(times, values, color=colour, linewidth=1.6, label=label)
        axes.axhline(peak, color=colour, linewidth=0.8, linestyle=(0, (2, 3)))
    axes.axhline(0, color="black", linewidth=1.2, linestyle="--")
    axes.annotate(
        "baseline: weights, gradients and optimizer state",
        xy=(1, 0), xycoords=("axes fraction", "data"), xytext=(-4, -12), textcoords="offset points",
        ha="right", fontsize=8,
    )  # fmt: skip
    first = next(iter(reports.values()))
    device = "process memory" if (first.memory or {}).get("device") == "cpu" else "GPU memory"
    axes.set_title(f"{first.recipe}: {device} over {steps} training steps", fontsize=13, loc="left")
    axes.set_xlabel(f"seconds from the beginning of step {_first_step(len(first.step_times_s)) + 1}")
    axes.set_ylabel("above the baseline (MB)")
    axes.margins(x=0)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.25)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False, title="peak of the whole run (dotted), median time")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _first_step(count: int) -> int:
    return min(WARMUP_STEPS, max(count - 1, 0))


def _steady_window(memory: Mapping[str, Any]) -> tuple[list[float], list[float], int]:
    """Times from the window's start and MB above the baseline, and how many steps the window holds."""
    ends = memory["step_end_s"]
    first = _first_step(len(ends))
    last = min(first + SHOWN_STEPS, len(ends)) - 1
    begin, end = memory["step_start_s"][first], ends[last]
    points = [
        (time - begin, (value - memory["baseline_bytes"]) / 1e6)
        for time, value in zip(memory["timeline_s"], memory["timeline_bytes"], strict=True)
        if begin <= time <= end
    ]
    return [time for time, _ in points], [value for _, value in points], last - first + 1
