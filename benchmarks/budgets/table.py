"""From the runs of a family to a line for each budget."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.budgets.runs import IN_MEMORY, SIMPLE, STATE

Run = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class BudgetRow:
    """One budget of one family. Bytes are live ones as the meter counts them; medians are over the rounds.

    Attributes:
        family: The family.
        share: The budget as a share of the peak in memory.
        budget_bytes: The budget.
        peak_bytes: Most bytes in any step of any round.
        settled_peak_bytes, predicted_peak_bytes: Of the last steps, and of the last plan.
        peak_error: Predicted by measured, less one: the largest of the rounds.
        step_s, predicted_step_s, step_error: The same of time; the median of the rounds.
        best: The fastest simple way whose peak is within the budget.
        step_ratio: Step time to that way's in the same round; the median.
        same_bits: Whether losses and weights are those of the run in memory.
        placed: What is where, of the last round.
        least_bytes: The smallest budget that would do, where this one was refused.
    """

    family: str
    share: float
    budget_bytes: int
    peak_bytes: int | None = None
    settled_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    peak_error: float | None = None
    step_s: float | None = None
    predicted_step_s: float | None = None
    step_error: float | None = None
    best: str | None = None
    step_ratio: float | None = None
    same_bits: bool | None = None
    placed: str | None = None
    least_bytes: int | None = None


def row_of(
    family: str, share: float, budget_bytes: int, ours: Sequence[Run], simple: Sequence[Sequence[Run]]
) -> BudgetRow:
    """``ours`` are the runs under the budget, one a round, and ``simple`` those of the simple ways in the same rounds."""
    row = BudgetRow(family, share, budget_bytes)
    refused = [one for one in ours if one["refused"]]
    if refused:
        return dataclasses.replace(row, least_bytes=max(one["least_bytes"] or 0 for one in refused))
    peaks = [max(one["peaks"][-_LAST:]) for one in ours]
    errors = [one["predicted_peak_bytes"] / peak - 1 for one, peak in zip(ours, peaks, strict=True)]
    within = [way for way in SIMPLE if all(max(_named(one, way)["peaks"]) <= budget_bytes for one in simple if one)]
    times = {way: statistics.median(_named(one, way)["step_s"] for one in simple) for way in within}
    best = min(times, key=times.__getitem__) if times else None
    memory = [_named(one, IN_MEMORY) for one in simple]
    return dataclasses.replace(
        row,
        peak_bytes=max(max(one["peaks"]) for one in ours),
        settled_peak_bytes=max(peaks),
        predicted_peak_bytes=max(one["predicted_peak_bytes"] for one in ours),
        peak_error=max(errors, key=abs),
        step_s=statistics.median(one["step_s"] for one in ours),
        predicted_step_s=statistics.median(one["predicted_step_s"] for one in ours),
        step_error=statistics.median(one["predicted_step_s"] / one["step_s"] - 1 for one in ours),
        best=best,
        step_ratio=None
        if best is None
        else statistics.median(
            one["step_s"] / _named(others, best)["step_s"] for one, others in zip(ours, simple, strict=True)
        ),
        same_bits=all(_same(one, plain) for one, plain in zip(ours, memory, strict=True)),
        placed=ours[-1]["placed"],
    )


_LAST = 4
COLUMNS = (
    "model", "of the peak", "budget (MB)", "most, of budget", "peak off (%)", "step (s)", "step off (%)",
    "best simple way", "to it", "same bits",
)  # fmt: skip
CAPTION = (
    "Best simple way: the fastest that fits, as activations/state/weights, each in memory (m), on the drive (s) or "
    "recomputed (r). Off: predicted to measured."
)
_LETTERS = {"none": "m", "ssd": "s"}


def letters(way: str) -> str:
    """Where a simple way has activations, state and weights, as in :data:`CAPTION`."""
    activations, others = SIMPLE[way]
    places = STATE[others]
    return "/".join((activations[:1] or "m", _LETTERS[places["optimizer"]], _LETTERS[places["params"]]))


def texts(row: BudgetRow) -> list[str]:
    """The cells of a line, as in :data:`COLUMNS`."""
    head = [row.family, f"{row.share:.0%}", f"{row.budget_bytes / 1e6:.0f}"]
    if row.least_bytes is not None:
        return [*head, f"refused: {row.least_bytes / 1e6:.0f} MB would do", *["-"] * 6]
    assert row.peak_bytes is not None
    assert row.peak_error is not None
    assert row.step_error is not None
    return [
        *head,
        f"{row.peak_bytes / row.budget_bytes:.3f}",
        f"{100 * row.peak_error:+.1f}",
        f"{row.step_s:.3f}",
        f"{100 * row.step_error:+.1f}",
        "-" if row.best is None else letters(row.best),
        "-" if row.step_ratio is None else f"{row.step_ratio:.3f}",
        "yes" if row.same_bits else "NO",
    ]


def _named(runs: Sequence[Run], way: str) -> Run:
    return next(one for one in runs if one["way"] == way)


def _same(one: Run, plain: Run) -> bool:
    """Runs differ in their number of steps: losses as far as both go; weights where both end."""
    count = min(len(one["losses"]), len(plain["losses"]))
    whole = len(one["losses"]) == len(plain["losses"])
    same: bool = one["losses"][:count] == plain["losses"][:count]
    return same and (not whole or one["weights_sha256"] == plain["weights_sha256"])
