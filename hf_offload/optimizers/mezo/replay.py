"""Rebuilding weights from a log."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.interrupts import signals_deferred
from hf_offload.optimizers.mezo.directions import BACK, MINUS, PLUS, Directions, Shift, checksum
from hf_offload.optimizers.mezo.log import Known, MezoLog
from hf_offload.settings.load import collect_errors


@torch.no_grad()
def replay(
    log: MezoLog,
    weights: Mapping[str, Tensor],
    steps: int | None = None,
    *,
    on_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Make the first ``steps`` of ``log`` (default: all) on ``weights``, which change in place. They are as they were before
    the first one, or when training went on after some of them: these are then not made. No data, no forward.

    Aborted steps count: there may be more of them than updates. ``on_step`` is called with the number of steps made.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for weights that are not those the log knows, and
    :class:`~hf_offload.errors.OffloadError` if they do not become those that it knows later: something else than MeZO has
    changed them meanwhile, or another device or version of PyTorch draws other numbers here.
    """
    setup = log.setup
    count = len(log.rows) if steps is None else steps
    if not 0 <= count <= len(log.rows):
        raise OffloadConfigError(f"steps={count}: the log has {len(log.rows)} steps.")
    _check(log, weights)
    chosen = [weights[name] for name in setup.names]
    begin = _begin(log, chosen, count)
    directions = Directions(chosen)
    for number, row in enumerate(log.rows[begin:count], begin + 1):
        for known in log.known:
            if begin < known.steps == number - 1:
                _compare(known, chosen, log, f"when training went on after step {known.steps}")
        with signals_deferred:
            if setup.restore == "reference":  # which leaves rounding errors behind
                for scale in (PLUS, MINUS, BACK):
                    directions.move(chosen, Shift(row.seed, scale, setup.eps))
            if row.updates:
                directions.update(chosen, row.updates_of(setup.groups))
        on_step(number)
    if count == len(log.rows) and log.final is not None:
        _compare(Known(count, log.final), chosen, log, "after the last step")


def _begin(log: MezoLog, weights: list[Tensor], count: int) -> int:
    """After how many steps training had these weights."""
    sums = tuple(map(checksum, weights))
    times = [known for known in log.known if known.steps <= count]
    found = [known.steps for known in times if known.sums == sums]
    if found or not times:
        return max(found, default=0)
    wrong = _different(times[0].sums, sums, log)
    later = sorted({known.steps for known in times[1:]} - {times[0].steps})
    others = f", nor are all of them what they were after step {', '.join(map(str, later))}" if later else ""
    raise OffloadConfigError(
        f"{wrong} not what they were before the first step{others}: give the weights training began with"
        f"{', or went on with then' if later else ''}."
    )


def _compare(known: Known, weights: list[Tensor], log: MezoLog, when: str) -> None:
    sums = tuple(map(checksum, weights))
    if sums == known.sums:
        return
    former = max((one.steps for one in log.known if one.steps < known.steps), default=0)
    is_last = known.steps == len(log.rows)
    rest = (
        ""
        if is_last
        else f" The steps after it are rebuilt from the weights training went on with after step {known.steps}."
    )
    raise OffloadError(
        f"{_different(known.sums, sums, log)} not what they were {when}. Something other than MeZO has changed them after "
        f"step {former} or later, such as load_best_model_at_end, another checkpoint or a callback; or other numbers are "
        f"drawn here: training was on {log.setup.device!r}, and other devices and versions of PyTorch draw others.{rest}"
    )


def _different(known: tuple[int, ...], sums: tuple[int, ...], log: MezoLog) -> str:
    wrong = [name for name, one, other in zip(log.setup.names, known, sums, strict=True) if one != other]
    return f"{len(wrong)} of {len(sums)} weights, such as {wrong[0]}, are"


def _check(log: MezoLog, weights: Mapping[str, Tensor]) -> None:
    setup = log.setup
    missing = [name for name in setup.names if name not in weights]
    if missing:
        raise OffloadConfigError(
            f"The log has {len(missing)} weights, such as {missing[0]}, which are not among those given: give the model "
            "it is of."
        )
    with collect_errors("weights of the log") as check:
        shapes = {name: (tuple(weights[name].shape), str(weights[name].dtype)) for name in setup.names}
        wrong = [one for one in zip(setup.names, setup.shapes, setup.dtypes, strict=True) if shapes[one[0]] != one[1:]]
        with check:
            if wrong:
                name, shape, dtype = wrong[0]
                others = f", and {len(wrong) - 1} others differ, too" if len(wrong) > 1 else ""
                raise OffloadConfigError(
                    f"{name} is {shapes[name][0]} in {shapes[name][1]}, and in the log {shape} in {dtype}{others}: give the "
                    "weights as they were trained."
                )
        with check:
            elsewhere = [name for name in setup.names if weights[name].device.type != setup.device]
            if elsewhere:
                raise OffloadConfigError(
                    f"{len(elsewhere)} weights, such as {elsewhere[0]}, are on {weights[elsewhere[0]].device}, and were "
                    f"trained on {setup.device!r}, which draws other numbers: move the model there."
                )
