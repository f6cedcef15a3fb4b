"""What the benchmark of memory modes found, as a table."""

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.modes.runs import Run
from benchmarks.modes.search import MODES, PERIOD, Findings
from hf_offload.settings.memory_modes import NONE


@dataclasses.dataclass(frozen=True)
class ModeRow:
    """One mode. ``against_percent`` is its mean loss against AdamW's over the seeds that both have; ``time_ratio`` likewise.

    ``at_edge``: the rate is the lowest or the highest of the grid, so better ones may lie beyond it.
    """

    mode: str
    rate: float
    at_edge: bool
    losses: Mapping[int, float]
    against_percent: float | None
    state_bytes: int
    gradient_bytes: int
    peak_bytes: int | None
    time_ratio: float | None

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.mean(self.losses.values())


def mode_rows(found: Findings, rates: Sequence[float]) -> list[ModeRow]:
    """One row for each mode that has a run, in the order of the runs."""
    by_mode: dict[str, list[Run]] = {}
    for run in found.runs:
        by_mode.setdefault(run.mode, []).append(run)
    usual = {run.seed: run.final for run in by_mode.get(NONE, [])}
    rows = []
    for mode, runs in by_mode.items():
        losses = {run.seed: run.final for run in runs}
        both = losses.keys() & usual.keys()
        against = None
        if mode != NONE and both:
            against = 100 * (sum(losses[seed] for seed in both) / sum(usual[seed] for seed in both) - 1)
        rows.append(
            ModeRow(
                mode=mode,
                rate=runs[0].rate,
                at_edge=len(rates) > 1 and runs[0].rate in (min(rates), max(rates)),
                losses=losses,
                against_percent=against,
                state_bytes=max(run.state_bytes for run in runs),
                gradient_bytes=max(run.gradient_bytes for run in runs),
                peak_bytes=found.peaks.get(mode),
                time_ratio=None if found.times is None or mode == NONE else found.times.ratio(mode, NONE),
            )
        )
    return rows


COLUMNS = ("mode", "rate", "loss", "by seed", "to AdamW", "state MB", "grads MB", "peak MB", "time ratio")
NOTES = (
    "none: AdamW of all weights. loss: nats a byte of validation text, after the last step.",
    "rate: the best of the grid in the search; with *: its lowest or highest, so better ones may lie beyond it.",
    "state, grads: most after any step; peak: most bytes alive in a step, weights included (block-wise: first turn).",
    f"time ratio: modes take turns; means over {PERIOD} steps, refreshes included, over AdamW's; median of the periods.",
)


def texts(rows: Sequence[ModeRow]) -> Iterator[list[str]]:
    """The rows as the texts of :data:`COLUMNS`."""
    for row in rows:
        yield [
            row.mode,
            f"{row.rate:g}{'*' if row.at_edge else ''}",
            f"{row.mean:.4f}",
            " ".join(f"{loss:.4f}" for loss in row.losses.values()),
            "-" if row.against_percent is None else f"{row.against_percent:+.2f} %",
            f"{row.state_bytes / 1e6:.2f}",
            f"{row.gradient_bytes / 1e6:.2f}",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}",
            "-" if row.time_ratio is None else f"{row.time_ratio:.3f}",
        ]


SETTINGS_COLUMNS = ("mode", "settings", "why")


def settings_texts(modes: Iterable[str], hidden: int) -> Iterator[list[str]]:
    """Of :data:`SETTINGS_COLUMNS`."""
    for mode in modes:
        settings = {name: value for name, value in MODES[mode].settings_for(hidden, 0).items() if name != "seed"}
        yield [mode, ", ".join(f"{name}={value}" for name, value in settings.items()) or "-", MODES[mode].why]
