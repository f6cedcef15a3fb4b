"""From the runs of a family to a line for each budget."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.budgets.runs import AUTO, IN_MEMORY, SIMPLE, STATE, TURNS

Run = Mapping[str, Any]
PAIRED = 2
"""Simple ways that take turns with a budget: steps minutes apart tell more of the machine than of themselves."""


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
        best: The fastest simple way whose peaks are within the budget, of those that took turns: there, too.
        step_ratio: A step to that way's in the same turn; the median of a round's turns, and of the rounds.
        rounds: How often the budget was run.
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
    rounds: int = 0


def peak_of(runs: Sequence[Run]) -> int:
    """Of a family's run in memory, after its first step, which has no state yet."""
    return max(_plain(runs)["peaks"][1:])


def quick_s(run: Run) -> float:
    """The lower quartile of its last steps: other work on a machine only adds time."""
    return statistics.quantiles(run["seconds"][_FIRST:][-TURNS:], n=4)[0]


def _ratio(ours: Run, other: Run) -> float:
    """Of steps, in the turns that both took."""
    turns = zip(ours["seconds"][-TURNS:], other["seconds"][-TURNS:], strict=True)
    return statistics.median(mine / theirs for mine, theirs in turns)


def fastest(runs: Sequence[Run], budget_bytes: int) -> list[str]:
    """The :data:`PAIRED` fastest simple ways of a family that fit, of the runs of all of them."""
    fitting = [one for one in runs if one["budget_bytes"] is None and max(one["peaks"]) <= budget_bytes]
    return [one["way"] for one in sorted(fitting, key=quick_s)[:PAIRED]]


def row_of(family: str, share: float, budget_bytes: int, runs: Sequence[Run]) -> BudgetRow:
    """From all runs of a family: those under the budget, and those of simple ways that took turns with them."""
    row = BudgetRow(family, share, budget_bytes)
    within = [one for one in runs if one["budget_bytes"] == budget_bytes]
    ours = {one["round"]: one for one in within if one["way"] == AUTO}
    refused = [one for one in ours.values() if one["refused"]]
    if refused:
        return dataclasses.replace(row, least_bytes=max(one["least_bytes"] or 0 for one in refused))
    peaks = {number: max(one["peaks"][-_LAST:]) for number, one in ours.items()}
    errors = [one["predicted_peak_bytes"] / peaks[number] - 1 for number, one in ours.items()]
    simple = {way: [one for one in within if one["way"] == way] for way in SIMPLE}
    ratios = {
        way: statistics.median(_ratio(ours[one["round"]], one) for one in found)
        for way, found in simple.items()
        if found and all(max(one["peaks"]) <= budget_bytes for one in found)
    }
    best = max(ratios, key=ratios.__getitem__, default=None)
    return dataclasses.replace(
        row,
        rounds=len(ours),
        peak_bytes=max(max(one["peaks"]) for one in ours.values()),
        settled_peak_bytes=max(peaks.values()),
        predicted_peak_bytes=max(one["predicted_peak_bytes"] for one in ours.values()),
        peak_error=max(errors, key=abs),
        step_s=statistics.median(one["step_s"] for one in ours.values()),
        predicted_step_s=statistics.median(one["predicted_step_s"] for one in ours.values()),
        step_error=statistics.median(one["predicted_step_s"] / one["step_s"] - 1 for one in ours.values()),
        best=best,
        step_ratio=None if best is None else ratios[best],
        same_bits=all(_same(one, _plain(runs)) for one in ours.values()),
        placed=max(ours.items())[1]["placed"],
    )


_LAST, _FIRST = 4, 3
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


def _plain(runs: Sequence[Run]) -> Run:
    return next(one for one in runs if one["way"] == IN_MEMORY)


def _same(one: Run, plain: Run) -> bool:
    """Runs differ in their number of steps: losses as far as both go; weights where both end."""
    count = min(len(one["losses"]), len(plain["losses"]))
    whole = len(one["losses"]) == len(plain["losses"])
    same: bool = one["losses"][:count] == plain["losses"][:count]
    return same and (not whole or one["weights_sha256"] == plain["weights_sha256"])
