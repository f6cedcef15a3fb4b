"""Pictures as PNG files, by matplotlib."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.training.report import WARMUP_STEPS, TrainingReport

SHOWN_STEPS = 3
# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = {
    "black": "#4c4c4c", "orange": "#e69f00", "sky": "#56b4e9", "green": "#009e73", "blue": "#0072b2", "red": "#d55e00",
    "pink": "#cc79a7", "grey": "#999999",
}  # fmt: skip
# A strategy looks the same in every picture.
_OF_STRATEGIES = {
    "baseline": "black", "recompute": "orange", "save_on_cpu": "grey", "trl": "red", "ours:ssd": "blue",
    "ours:ram": "green", "ours:spill": "sky",
}  # fmt: skip
_LEGEND_COLUMNS = 3


def require_matplotlib() -> None:
    """Raise :class:`OffloadConfigError` now rather than after a long measurement."""
    try:
        import matplotlib  # noqa: F401  only whether it is there
    except ImportError as error:
        raise OffloadConfigError("Plots need matplotlib: pip install 'hf-offload[bench]'.") from error


@contextlib.contextmanager
def figure_at(path: Path, width: float, height: float) -> Iterator[Any]:
    """A figure of so many inches, which is written to ``path`` as a PNG at the end."""
    require_matplotlib()
    # Not pyplot: it keeps figures in process-wide state and picks a backend for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})


def plain(axes: Any, x_label: str, y_label: str) -> None:
    """Axes with a faint grid and no frame, as wide as their data."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.margins(x=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def plot_memory(reports: Mapping[str, TrainingReport], path: Path, rounds: int = 1) -> None:
    """Memory above the baseline over a few steps in the steady state, one line per strategy, as a PNG at ``path``.

    ``reports`` are those of one of ``rounds`` rounds. The lines start together at the beginning of the first step after the
    warm-up; a line ends when its steps are done.
    """
    with figure_at(path, 10, 5) as figure:
        axes = figure.add_subplot()
        steps, top, what, dotted = 0, 1.0, "memory", {"linewidth": 1, "linestyle": (0, (2, 3))}
        for name, report in reports.items():
            memory, colour = report.memory, COLOURS[_OF_STRATEGIES.get(name.partition("@")[0], "pink")]
            if memory is None or not memory["step_end_s"]:
                continue
            times, values, steps, what = _steady_window(memory)
            peak = (memory["peak_bytes"] - memory["baseline_bytes"]) / 1e6
            top = max(top, peak, *values)
            label = f"{name}: {report.median_step_s:.2f} s per step, +{peak:,.0f} MB"
            axes.fill_between(times, values, color=colour, alpha=0.12, linewidth=0)
            axes.plot(times, values, color=colour, linewidth=1.6, label=label)
            axes.axhline(peak, color=colour, **dotted)
        axes.plot([], [], color=COLOURS["grey"], label="peak residency, the MB named here", **dotted)
        axes.axhline(0, color="black", linewidth=1.2, linestyle="--")
        first = next(iter(reports.values()))
        which = f" of one of {rounds} rounds" if rounds > 1 else ""
        axes.set_title(f"{first.recipe}: {what} over {steps} training steps{which}", fontsize=13, loc="left")
        begin = f"seconds from the beginning of step {_first_step(len(first.step_times_s)) + 1}"
        plain(axes, begin, "above weights, gradients and optimizer state (MB)")
        axes.set_ylim(bottom=min(axes.get_ylim()[0], -0.07 * top), top=1.05 * top)
        figure.legend(loc="outside lower left", ncols=_LEGEND_COLUMNS, frameon=False, fontsize=9, columnspacing=1)


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
