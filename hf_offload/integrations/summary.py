"""What a run says about offloading: a few figures in the Trainer's log, and one summary at its end for all processes."""

import collections
import logging
import statistics
from collections.abc import Sequence

from hf_offload.engine.stats import OffloadStats, StepStats, added
from hf_offload.planning.shape_plan import Prediction
from hf_offload.session import OffloadSession
from hf_offload.settings.sizes import format_bytes
from hf_offload.state.weights import Weights
from hf_offload.storage.service import GRADIENTS, OPTIMIZER_STATE

_GIB = 2**30
_MOST_LINES = 4


def log_entries(step: StepStats, stats: OffloadStats) -> dict[str, float]:
    """Entries of a step in the Trainer's log; all other counters are in ``stats``.

    ``offload/moved_gib``: activations that were taken out of memory in the step. ``offload/waited_s``: how long the step
    waited for them. ``offload/peak_gib``: the most of them that were in memory at once. ``offload/drive_written_gib``: bytes
    that this process has written to drives since the run began.
    """
    drives = sum(
        counted.written_bytes for tiers in stats.accounts.values() for tier, counted in tiers.items() if tier != "ram"
    )
    return {
        "offload/moved_gib": _four_digits(step.offloaded_bytes / _GIB),
        "offload/waited_s": _four_digits(step.stall_s),
        "offload/peak_gib": _four_digits(step.peak_resident_bytes / _GIB),
        "offload/drive_written_gib": _four_digits(drives / _GIB),
    }


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def show_summary(lines: Sequence[str], logger: logging.Logger) -> None:
    """Log the lines of :func:`summary_lines`, in four lines at most, at a level that is shown."""
    # Scripts that set up no logging show warnings alone.
    level = logging.INFO if logger.isEnabledFor(logging.INFO) else logging.WARNING
    first, rest = lines[: _MOST_LINES - 1], lines[_MOST_LINES - 1 :]
    for line in (*first, " ".join(rest)):
        if line:
            logger.log(level, "%s", line)


def summary_lines(session: OffloadSession, together: bool = True) -> list[str]:
    """Lines to log where ``session.ranks.is_first``. With ``together``, all processes call this, or none."""
    lines = []
    if session.active or session.orphaned or not moves_state(session):
        everyone = session.ranks.gather(session.stats.total) if together else [session.stats.total]
        lines.append(_moved(everyone, max(1, session.stats.ended_steps)))
    if session.residency is not None:
        lines.append(_weights(session.residency, max(1, session.stats.ended_steps)))
    if session.streams_optimizer:
        lines.append(_state(session, together))
    if session.forecast is not None:
        lines.append(_compared(session.forecast, session.most_measured_bytes))
    mine = session.written()
    return lines + _worn(session.ranks.gather(mine) if together else [mine], session.config.drive_endurance_bytes)


def moves_state(session: OffloadSession) -> bool:
    """Whether weights, or the optimizer's state, leave memory."""
    return session.streams_optimizer or session.residency is not None


def has_summary(session: OffloadSession) -> bool:
    """Whether there is anything to say of the run."""
    return session.active or session.orphaned or moves_state(session)


def _weights(residency: Weights, steps: int) -> str:
    """What weights have moved; there is one process."""
    written, read = (format_bytes(moved / steps) for moved in residency.moved_bytes)
    return (
        f"Weights: {format_bytes(residency.parked_bytes)} on {residency.store.tier.name}, at most "
        f"{format_bytes(residency.most_bytes)} of them in memory at once; {read} read and {written} written a step."
    )


def _state(session: OffloadSession, together: bool) -> str:
    """What an optimizer's state and gradients have moved, of all processes."""
    found = []
    for name in (OPTIMIZER_STATE, GRADIENTS):
        for tier, counted in session.stats.accounts.get(name, {}).items():
            mine = (counted.written_bytes, counted.read_bytes)
            everyone = session.ranks.gather(mine) if together else [mine]
            written, read = map(sum, zip(*everyone, strict=True))
            found.append(f"{name}: {format_bytes(written)} written to {tier}, {format_bytes(read)} read")
    line = "; ".join(found)
    return f"{line[:1].upper()}{line[1:]}."


def _worn(everyone: list[dict[str, dict[str, int]]], rated_bytes: int | str | None) -> list[str]:
    """What all processes have written to each drive."""
    lines = []
    for drive in dict.fromkeys(name for one in everyone for name in one):
        accounts: collections.Counter[str] = collections.Counter()
        for one in everyone:
            accounts.update(one.get(drive, {}))
        line = f"Drive {drive}: {format_bytes(accounts.total())} written in this run"
        if len(accounts) > 1:
            line += f" ({', '.join(f'{format_bytes(nbytes)} of {name}' for name, nbytes in sorted(accounts.items()))})"
        if rated_bytes is not None:
            line += (
                f", {accounts.total() / int(rated_bytes):.3%} of the {format_bytes(int(rated_bytes))} it is rated for"
            )
        lines.append(f"{line}.")
    return lines


def card_lines(session: OffloadSession, summary: list[str]) -> list[str]:
    """Lines for the card of the trained model, with the ``summary`` of the run."""
    lines = []
    if session.active:
        lines.append(
            f"Activations were offloaded with hf_offload ({session.plan.reason}), which changes no bit of a gradient."
        )
    if session.streams_optimizer:
        lines.append("The optimizer's state was offloaded with hf_offload, which changes no bit of a weight.")
    if session.residency is not None:
        lines.append("Weights were offloaded with hf_offload, which changes no bit of them.")
    if session.sampled:
        lines.append(f"The weight gradients of {len(session.sampled)} linear layers were estimated from sampled rows.")
    if session.tiled:
        lines.append(f"Computed a few tokens at a time: {', '.join(session.tiled)}.")
    return [*lines, *summary]


def _moved(everyone: list[StepStats], steps: int) -> str:
    total = added(everyone)
    processes = f" by {len(everyone)} processes" if len(everyone) > 1 else ""
    return (
        f"Offloading: {format_bytes(total.offloaded_bytes / steps)} of activations moved a step{processes}, "
        f"{format_bytes(total.written_bytes)} written and {format_bytes(total.read_bytes)} read in all "
        f"({format_bytes(total.write_bytes_per_s)}/s and {format_bytes(total.read_bytes_per_s)}/s), "
        f"at most {format_bytes(total.peak_resident_bytes)} of them in memory at once, "
        f"{max(one.stall_s for one in everyone):.2f} s waited."
    )


def _compared(forecast: Prediction, most: int | None) -> str:
    """Predicted and measured peak and step time of the plan, and the highest peak of the run."""
    peak, steps = forecast.measured_peak_bytes, forecast.measured_step_s
    measured_peak = "was not measured" if peak is None else f"measured {format_bytes(peak)}"
    measured_step = f"measured {statistics.median(steps):.2f} s" if steps else "not measured"
    return (
        f"Plan: peak predicted {format_bytes(forecast.peak_bytes)}, {measured_peak}; "
        f"step predicted {forecast.step_s:.2f} s, {measured_step}."
        f"{'' if most is None else f' Highest measured peak of the run: {format_bytes(most)}.'}"
    )
