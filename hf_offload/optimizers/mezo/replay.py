"""Rebuilding weights from a log."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.interrupts import signals_deferred
from hf_offload.optimizers.mezo.directions import BACK, MINUS, PLUS, Directions, Shift, checksum
from hf_offload.optimizers.mezo.log import MezoLog
from hf_offload.settings.load import collect_errors


@torch.no_grad()
def replay(
    log: MezoLog,
    weights: Mapping[str, Tensor],
    steps: int | None = None,
    *,
    on_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Make the first ``steps`` of ``log`` (default: all) on ``weights``, which are as they were before the first one, and
    change in place. No data, no forward.

    Aborted steps count: there may be more of them than updates. ``on_step`` is called with the number of steps made.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for weights that are not those the log began with, and
    :class:`~hf_offload.errors.OffloadError` if they do not become those that it was saved with, as with another device or
    another version of PyTorch that draws other numbers.
    """
    setup = log.setup
    count = len(log.rows) if steps is None else steps
    if not 0 <= count <= len(log.rows):
        raise OffloadConfigError(f"steps={count}: the log has {len(log.rows)} steps.")
    _check(log, weights)
    chosen = [weights[name] for name in setup.names]
    _compare(
        log.initial, chosen, log, "before the first step", OffloadConfigError, "give the weights training began with"
    )
    directions = Directions(chosen)
    for number, row in enumerate(log.rows[:count], 1):
        with signals_deferred:
            if setup.restore == "reference":  # which leaves rounding errors behind
                for scale in (PLUS, MINUS, BACK):
                    directions.move(chosen, Shift(row.seed, scale, setup.eps))
            if row.updates:
                directions.update(chosen, row.updates_of(setup.groups))
        on_step(number)
    if count == len(log.rows):
        why = f"training was on {setup.device!r}, and other devices and versions of PyTorch draw other numbers"
        _compare(log.final, chosen, log, "after the last step", OffloadError, why)


def _check(log: MezoLog, weights: Mapping[str, Tensor]) -> None:
    setup = log.setup
    with collect_errors("weights of the log") as check:
        for name, shape, dtype in zip(setup.names, setup.shapes, setup.dtypes, strict=True):
            with check:
                found = weights.get(name)
                if found is None:
                    raise OffloadConfigError(
                        f"The log has {name}, which is not among the weights: give the model it is of."
                    )
                if (tuple(found.shape), str(found.dtype)) != (shape, dtype):
                    raise OffloadConfigError(
                        f"{name} is {tuple(found.shape)} in {found.dtype}, and in the log {shape} in {dtype}: give the "
                        "weights as they were trained."
                    )
                if found.device.type != setup.device:
                    raise OffloadConfigError(
                        f"{name} is on {found.device}, and was trained on {setup.device!r}, which draws other numbers: move "
                        "the model there."
                    )


def _compare(
    sums: tuple[int, ...] | None,
    weights: list[Tensor],
    log: MezoLog,
    when: str,
    error: type[OffloadError],
    what_to_do: str,
) -> None:
    if sums is None:
        return
    wrong = [name for name, one, known in zip(log.setup.names, weights, sums, strict=True) if checksum(one) != known]
    if wrong:
        raise error(f"{len(wrong)} weights, such as {wrong[0]}, are not what they were {when}: {what_to_do}.")
