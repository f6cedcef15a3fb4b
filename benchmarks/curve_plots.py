"""Pictures of how a loss falls."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hf_offload.reports.plots import figure_at

# Okabe and Ito's palette, told apart by colour-blind readers too. Every other line is dashed: where one
# lies on a whole one, both are seen.
COLOURS = ("#000000", "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#999999")
_STYLES = (("-", "--"), (":", "-."))

Curve = Sequence[Sequence[float]]


def line_look(number: int) -> tuple[str, str]:
    """Colour and style of a line; those of the first 16 differ from each other."""
    styles = _STYLES[number // len(COLOURS) % len(_STYLES)]
    return COLOURS[number % len(COLOURS)], styles[number % len(styles)]


def plot_curves(curves: Mapping[str, Sequence[Curve]], title: str, what: str, path: Path) -> None:
    """The mean of each name's curves, and the range of them as a band, as a PNG at ``path``.

    A curve is pairs of step and value; those of one name have the same steps. ``what`` is written at the values' axis.
    """
    with figure_at(path, 9, 5) as figure:
        axes = figure.add_subplot()
        for number, (name, several) in enumerate(curves.items()):
            colour, style = line_look(number)
            steps = [step for step, _ in several[0]]
            values = np.array([[value for _, value in curve] for curve in several])
            label = f"{name}: {values[:, -1].mean():.3f}"
            axes.plot(
                steps, values.mean(0), linewidth=1.6, color=colour, linestyle=style, zorder=2 + number % 2, label=label
            )
            axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
        axes.set_title(title, fontsize=12, loc="left")
        axes.set_xlabel("step")
        axes.set_ylabel(what)
        axes.margins(x=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        # Outside: the curves come close to each other everywhere, and a legend among them would hide some.
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
