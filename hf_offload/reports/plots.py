"""Pictures of what was measured."""

import contextlib
import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.training.report import WARMUP_STEPS, TrainingReport

SHOWN_STEPS = 3
# Okabe and Ito's palette: told apart by colour-blind readers too. A strategy looks the same in every picture.
_COLOURS = {
    "baseline": "#4c4c4c",
    "recompute": "#e69f00",
    "recompute+offload": "#a87400",
    "save_on_cpu": "#999999",
    "trl": "#d55e00",
    "trl+recompute": "#8f3f00",
    "ours:ssd": "#0072b2",
    "ours:ram": "#009e73",
    "ours:spill": "#56b4e9",
    "ours+recompute": "#003f63",
}
_OTHER_COLOUR = "#cc79a7"
_LEGEND_COLUMNS = 3
_TITLE_CHARACTERS = 90
_LABEL_POINTS = 9


def _colour(name: str) -> str:
    return _COLOURS.get(name.partition("@")[0], _OTHER_COLOUR)


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


def plot_memory(reports: Mapping[str, TrainingReport], path: Path, rounds: int = 1) -> None:
    """Memory above the baseline over a few steps in the steady state, one line per strategy, as a PNG at ``path``.

    ``reports`` are those of one of ``rounds`` rounds. The lines start together at the beginning of the first step after the
    warm-up; a line ends when its steps are done.
    """
    with figure_at(path, 10, 5) as figure:
        axes = figure.add_subplot()
        steps, top, what, many = 0, 1.0, "memory", len(reports) > _LEGEND_COLUMNS
        for name, report in reports.items():
            memory, colour = report.memory, _colour(name)
            if memory is None or not memory["step_end_s"]:
                continue
            times, values, steps, what = _steady_window(memory)
            peak = (memory["peak_bytes"] - memory["baseline_bytes"]) / 1e6
            top = max(top, peak, *values)
            axes.fill_between(times, values, color=colour, alpha=0.12, linewidth=0)
            speed, height = f"{name}: {report.median_step_s:.2f} s per step", f"peak residency: +{peak:,.0f} MB"
            # Two lines of the legend for each of many strategies would cover the plot.
            axes.plot(times, values, color=colour, linewidth=1.6, label=f"{speed}, +{peak:,.0f} MB" if many else speed)
            axes.axhline(peak, color=colour, linewidth=1, linestyle=(0, (2, 3)), label=None if many else height)
        if many:
            axes.plot(
                [], [], color="#7f7f7f", linewidth=1, linestyle=(0, (2, 3)), label="peak residency, the MB named here"
            )
        axes.axhline(0, color="black", linewidth=1.2, linestyle="--")
        first = next(iter(reports.values()))
        which = f" of one of {rounds} rounds" if rounds > 1 else ""
        axes.set_title(f"{first.recipe}: {what} over {steps} training steps{which}", fontsize=13, loc="left")
        axes.set_xlabel(f"seconds from the beginning of step {_first_step(len(first.step_times_s)) + 1}")
        axes.set_ylabel("above weights, gradients and optimizer state (MB)")
        axes.margins(x=0)
        lines = -(-(len(reports) + 1) // _LEGEND_COLUMNS) if many else 2
        axes.set_ylim(bottom=min(axes.get_ylim()[0], -0.07 * top), top=(1.15 + 0.1 * lines) * top)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        columns = min(max(len(reports), 1), _LEGEND_COLUMNS)
        axes.legend(loc="upper center", ncols=columns, frameon=False, fontsize=9, columnspacing=1)


@dataclasses.dataclass(frozen=True)
class Point:
    """One strategy in a plot of memory against time."""

    name: str
    peak_bytes: float
    step_s: float


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in memory and time at once, by rising memory."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.step_s)):
        if not front or point.step_s < front[-1].step_s:
            front.append(point)
    return front


def plot_pareto(points: Sequence[Point], title: str, path: Path) -> None:
    """Time of a step against the activation peak, one point per strategy, with the Pareto front, as a PNG at ``path``."""
    with figure_at(path, 8, 5.5) as figure:
        axes = figure.add_subplot()
        front = pareto_front(points)
        widest, longest = max(point.peak_bytes for point in points) / 1e6, max(point.step_s for point in points)
        shortest = min(point.step_s for point in points)
        # Memory begins at zero, so that distances are ratios; time too, unless that would press all points together.
        lowest = 0.0 if shortest < longest / 2 else 0.8 * shortest
        axes.set_xlim(0, 1.22 * widest)
        axes.set_ylim(lowest, longest + 0.15 * (longest - lowest))
        corners = [(front[0].peak_bytes / 1e6, axes.get_ylim()[1]), *((p.peak_bytes / 1e6, p.step_s) for p in front)]
        corners.append((1.22 * widest, front[-1].step_s))
        x, y = zip(*corners, strict=True)
        axes.step(x, y, where="post", color="#7f7f7f", linewidth=1.2, linestyle="--", zorder=1)
        axes.fill_between(x, y, axes.get_ylim()[1], step="post", color="#7f7f7f", alpha=0.07, linewidth=0, zorder=0)
        for point in points:
            best = point in front
            axes.scatter(
                point.peak_bytes / 1e6, point.step_s, s=60, zorder=3, linewidths=1.6,
                color=_colour(point.name) if best else "white", edgecolors=_colour(point.name),
            )  # fmt: skip
        axes.set_title("\n".join(textwrap.wrap(title, _TITLE_CHARACTERS)), fontsize=10, loc="left")
        axes.set_xlabel("activation peak above weights, gradients and optimizer state (MB)")
        axes.set_ylabel(f"median time of a step (s){', axis cut' if lowest else ''}")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.text(
            0.99,
            0.02,
            "filled: no other is better in both",
            transform=axes.transAxes,
            ha="right",
            fontsize=8,
            color="#555555",
        )
        figure.canvas.draw()  # places the axes, which the labels are laid out in
        _label(axes, points)


# Where a label may go, in units of its distance: the corners first, for the front runs straight through its points.
_DIRECTIONS = ((1, 1), (-1, -1), (1, -1), (-1, 1), (1, 0), (-1, 0), (0, 1), (0, -1))
_DISTANCES = (9, 16, 26, 38, 52, 68, 86)


def _label(axes: Any, points: Sequence[Point]) -> None:
    """Write each name where it covers no point and no other name: the nearest free place around its point."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    renderer = axes.figure.canvas.get_renderer()
    pixels = axes.figure.dpi / 72
    spots = {point.name: axes.transData.transform((point.peak_bytes / 1e6, point.step_s)) for point in points}
    taken = [Bbox.from_bounds(x - 5 * pixels, y - 5 * pixels, 10 * pixels, 10 * pixels) for x, y in spots.values()]
    frame = axes.get_window_extent(renderer)
    for point in sorted(points, key=lambda point: -point.step_s):
        x, y = spots[point.name]
        probe = axes.text(0, 0, point.name, fontsize=_LABEL_POINTS)
        width, height = probe.get_window_extent(renderer).size
        probe.remove()
        for distance, right, up in [(distance, *way) for distance in _DISTANCES for way in _DIRECTIONS]:
            left = x + right * distance * pixels - width * (1 - right) / 2
            box = Bbox.from_bounds(left, y + up * distance * pixels - height / 2, width, height)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
        line = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6} if distance > _DISTANCES[0] else None
        axes.annotate(
            point.name, (point.peak_bytes / 1e6, point.step_s), (right * distance, up * distance),
            textcoords="offset points", fontsize=_LABEL_POINTS, color=_colour(point.name), arrowprops=line,
            ha={1: "left", 0: "center", -1: "right"}[right], va="center",
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )  # fmt: skip


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
