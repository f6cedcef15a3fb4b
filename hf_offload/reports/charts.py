"""A chart, described once and drawn twice: as a picture (SVG, PNG) by matplotlib, and interactive by plotly.js.

Of its kind, plotly has the most releases, and takes charts as plain JSON; it adds 4.8 MB to a page. bokeh adds 1.3 MB,
needs tornado, and takes charts as a serialised document of its own. For pages that load nothing from a network, altair needs
a wheel of 33 MB.
"""

import dataclasses
import enum
import importlib.util
import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hf_offload.errors import OffloadConfigError

_MOST_POINTS = 400
# Becomes the colour of the page's text; matplotlib knows no such word.
_INK = "#010203"
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")

T = TypeVar("T")


class Colour(enum.StrEnum):
    """After Okabe and Ito: told apart by colour-blind readers, and visible on white and on black."""

    AMBER = "#e69f00"
    BLUE = "#2a86c8"
    GREEN = "#009e73"
    GREY = "#888888"
    PINK = "#cc79a7"
    PURPLE = "#a64dff"
    RED = "#d55e00"
    SKY = "#56b4e9"


class Kind(enum.Enum):
    """How a series is drawn. Areas are stacked on each other; a step holds its value until the next point."""

    AREA = enum.auto()
    STEPS = enum.auto()
    LINE = enum.auto()
    POINTS = enum.auto()


@dataclasses.dataclass(frozen=True)
class Series:
    """Values ``y`` at the places ``x``, in the units of the axes. All areas of a chart have the same ``x``."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    kind: Kind = Kind.STEPS
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """Labels of axes carry the unit; ``caption`` says in sentences what one sees."""

    title: str
    caption: str
    x_label: str
    y_label: str
    series: Sequence[Series]


def level(name: str, value: float, over: Sequence[float], colour: str = Colour.RED) -> Series:
    """A horizontal dashed line along the axis ``over``."""
    return Series(name, (over[0], over[-1]), (value, value), colour, dashed=True)


def thinned(points: Sequence[T], height: Callable[[T], float]) -> list[T]:
    """At most 400 of ``points``, the highest of each part, so that no peak is lost."""
    many = len(points)
    if many <= _MOST_POINTS:
        return list(points)
    cuts = [many * index // _MOST_POINTS for index in range(_MOST_POINTS + 1)]
    return [max(points[begin:end], key=height) for begin, end in itertools.pairwise(cuts)]


def byte_unit(most_bytes: float) -> tuple[int, str]:
    """What to divide by, and its name, for an axis that goes up to so many bytes."""
    return (2**30, "GiB") if most_bytes >= 2**30 else (2**20, "MiB")


def time_unit(most_s: float) -> tuple[float, str]:
    """The same for seconds."""
    return (1.0, "s") if most_s >= 1 else (1e-3, "ms")


def require_report_libraries() -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` now rather than after a long training."""
    missing = [name for name in ("matplotlib", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise OffloadConfigError(f'A report page needs {" and ".join(missing)}: pip install "hf-offload[report]".')


def draw(chart: Chart, axes: Any) -> None:
    """Draw ``chart`` on matplotlib's ``axes``, without title and legend."""
    areas = [one for one in chart.series if one.kind is Kind.AREA]
    if areas:
        axes.stackplot(
            areas[0].x, *(one.y for one in areas), step="post", colors=[one.colour for one in areas],
            labels=[one.name for one in areas], linewidth=0,
        )  # fmt: skip
    for one in chart.series:
        if one.kind is Kind.AREA:
            continue
        points = one.kind is Kind.POINTS
        axes.plot(
            one.x, one.y, color=one.colour, label=one.name, linewidth=1.5,
            linestyle="none" if points else "--" if one.dashed else "-", marker="s" if points else None,
            drawstyle="steps-post" if one.kind is Kind.STEPS else "default",
        )  # fmt: skip
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.margins(x=0.02 if any(one.kind is Kind.POINTS for one in chart.series) else 0)
    axes.set_ylim(bottom=min(0, *(min(one.y, default=0) for one in chart.series)))
    axes.grid(color=Colour.GREY, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save_png(chart: Chart, title: str, path: Path) -> None:
    """Write ``chart`` to ``path``, with a ``title`` of its own."""
    from hf_offload.reports.plots import figure_at

    with figure_at(path, 10, 5.5) as figure:
        axes = figure.add_subplot()
        draw(chart, axes)
        axes.set_title(title, loc="left")
        figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=9)


def svg(chart: Chart, *, narrow: bool, prefix: str) -> str:
    """``chart`` as an element of a page, in the colour of its text. ``prefix`` makes the ids in it unique."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = dict.fromkeys(_INKED, _INK)
    with rc_context(settings | {"svg.fonttype": "none", "svg.hashsalt": prefix, "font.family": "sans-serif"}):
        figure = Figure(figsize=(3.8, 4.2) if narrow else (10, 4.8), layout="constrained")
        FigureCanvasSVG(figure)
        draw(chart, figure.add_subplot())
        small = (
            {"ncols": 2, "fontsize": 8, "handlelength": 1.2, "columnspacing": 1}
            if narrow
            else {"ncols": 5, "fontsize": 9}
        )
        figure.legend(loc="outside lower left", frameon=False, **small)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True)
    found = text.getvalue()
    found = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", found[found.index("<svg") :], flags=re.DOTALL)
    found = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", found)
    return found.replace(_INK, "currentColor").replace("<svg ", f'<svg class="{"narrow" if narrow else "wide"}" ', 1)


def _short(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def interactive(chart: Chart) -> str:
    """``chart`` as JSON for plotly.js that may stand inside of a script element."""
    traces = []
    for one in chart.series:
        trace: dict[str, Any] = {"x": _short(one.x), "y": _short(one.y), "name": one.name, "hovertemplate": "%{y:.4g}"}
        if one.kind is Kind.POINTS:
            trace |= {"mode": "markers", "marker": {"color": one.colour, "symbol": "square", "size": 9}}
        else:
            shape = "linear" if one.kind is Kind.LINE else "hv"
            line = {"color": one.colour, "dash": "dash" if one.dashed else "solid", "shape": shape, "width": 1.8}
            trace |= {"mode": "lines", "line": line}
        if one.kind is Kind.AREA:
            trace |= {"stackgroup": "areas", "fillcolor": one.colour, "line": {**trace["line"], "width": 0}}
        traces.append(trace)
    axis = {"gridcolor": "rgba(128,128,128,0.25)", "zerolinecolor": "rgba(128,128,128,0.5)", "automargin": True}
    layout = {
        "height": 460,
        "margin": {"l": 56, "r": 12, "t": 12, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "xaxis": {**axis, "title": {"text": chart.x_label, "standoff": 8}},
        "yaxis": {**axis, "title": {"text": chart.y_label, "standoff": 8}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0, "traceorder": "normal"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": Colour.GREY, "activecolor": Colour.BLUE},
        "hovermode": "closest" if any(one.kind is Kind.POINTS for one in chart.series) else "x unified",
        "showlegend": True,
    }
    return json.dumps({"data": traces, "layout": layout}).replace("<", r"\u003c")
