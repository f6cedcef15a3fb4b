"""The picture of memory by kind over one step."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.large.memory import KINDS, Sample
from hf_offload.reports.plots import figure_at

# Okabe and Ito's palette, as in the other pictures.
_COLOURS = ("#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#009e73", "#999999")


def draw_memory(samples: Sequence[Sample], forward_s: float, budget_bytes: int, title: str, path: Path) -> None:
    """Stacked by kind, with the budget as a line and the end of forward as another one."""
    with figure_at(path, 8, 4) as figure:
        axes = figure.add_subplot()
        times = [one["time_s"] for one in samples]
        kinds = [kind for kind in KINDS if any(one[kind] for one in samples)]
        axes.stackplot(
            times,
            [[one[kind] / 1e9 for one in samples] for kind in kinds],
            labels=kinds,
            colors=[_COLOURS[KINDS.index(kind)] for kind in kinds],
            linewidth=0,
        )
        axes.axhline(budget_bytes / 1e9, color="black", linestyle="--", linewidth=1, label="budget")
        axes.axvline(forward_s, color="black", linestyle=":", linewidth=1, label="backward begins")
        axes.set_xlabel("seconds of the step")
        axes.set_ylabel("memory of the process (GB)")
        axes.set_xlim(0, times[-1])
        axes.set_title(title, fontsize=10)
        axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
