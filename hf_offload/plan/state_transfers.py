"""What a state placement makes of a step: the memory that it leaves, and the transfers on links that activations use, too.

A footprint is one of a run that keeps everything in memory.
"""

import dataclasses
import itertools
from collections.abc import Mapping

from hf_offload.plan.footprint import Footprint, Segment, Transfer
from hf_offload.plan.rules import part_bytes, spare_bytes, state_window, update_bytes, weights_window
from hf_offload.plan.state_placement import (
    GRADIENTS,
    IN_MEMORY,
    STATE,
    WEIGHTS,
    StatePlacement,
    has_no_backward,
    left_units,
    once,
    staying_weights,
    weights_in_memory,
    weights_leave,
)
from hf_offload.plan.weight_transfers import both_ways, in_turns, weight_transfers


def place_state(
    footprint: Footprint, placement: StatePlacement, budget_bytes: int, on_host: bool, now: StatePlacement = IN_MEMORY
) -> Footprint:
    """``footprint``, taken with weights, gradients and state as in ``now``, with them where ``placement`` says. What has left
    memory in ``now`` stays out of it. On an accelerator, buffers are in RAM.
    """
    if not placement.moves:
        return footprint
    if (
        placement.weights is not None
        and has_no_backward(footprint)
        and footprint.is_one_stack
        and weights_leave(footprint, placement)
    ):
        footprint = in_turns(footprint)
    windows = _windows(footprint, placement, budget_bytes)
    buffers = sum(windows[kind] for kind in (STATE, GRADIENTS) if kind in windows) if on_host else 0
    weights = _weights_bytes(footprint, placement, on_host) - _weights_bytes(footprint, now, on_host)
    in_flight = buffers + (windows[WEIGHTS] if on_host and weights_leave(footprint, placement) else 0)
    found = dataclasses.replace(
        footprint,
        base_bytes=footprint.base_bytes + buffers + weights,
        transfers=tuple(sorted(_transfers(footprint, placement), key=lambda one: one.at)),
        transfer_windows=windows,
        transfer_spares=_spares(footprint, windows, budget_bytes),
        in_flight_bytes=in_flight,
    )
    if buffers:
        found = dataclasses.replace(found, idle=_idle(found))
    if left_units(footprint, placement) != left_units(footprint, now):
        found = _with_state(found, placement, now, footprint, budget_bytes)
    found.saves_like(footprint)
    return found


def _windows(footprint: Footprint, placement: StatePlacement, budget_bytes: int) -> dict[str, int]:
    """Of each kind that moves."""
    found = {}
    if left_units(footprint, placement):
        found[STATE] = state_window(budget_bytes, placement.width)
        if not placement.keeps_gradients:
            found[GRADIENTS] = found[STATE]
    if placement.weights is not None:
        largest = max((nbytes for one in footprint.weights.values() for nbytes in one.each), default=0)
        found[WEIGHTS] = weights_window(staying_weights(footprint, placement), largest)
    return found


def _spares(footprint: Footprint, windows: Mapping[str, int], budget_bytes: int) -> dict[str, int]:
    """Of each window, what may be spare buffers: weights come whole, gradients and state in parts."""
    part = part_bytes(budget_bytes)
    smallest: dict[str, list[int]] = {WEIGHTS: [], GRADIENTS: [], STATE: []}
    for one in footprint.weights.values():
        parts = [nbytes % part or part for nbytes in one.each] if one.trained_bytes else []
        smallest[WEIGHTS] += one.each
        smallest[GRADIENTS] += parts
        smallest[STATE] += [nbytes * one.state_bytes // one.trained_bytes for nbytes in parts]
    return {kind: spare_bytes(window, min(smallest[kind], default=0)) for kind, window in windows.items()}


def _idle(footprint: Footprint) -> tuple[tuple[int, int, int], ...]:
    """What of the windows of gradients and state cannot be used, and when: nothing is read that forward has read already, and
    nothing of it waits to be written until it is written again.
    """
    end, found = len(footprint.segments), []
    for kind in {STATE, GRADIENTS} & footprint.loads.keys():
        window, used = footprint.transfer_windows[kind], footprint.transfer_spares[kind]
        reads = max(one.at for one in footprint.loads[kind]) + 1
        writes = max(reads, min(one.at for one in footprint.transfers if one.kind == kind and not one.loads))
        found.append((reads, writes, window - used))
        found.append((writes, end, window - used - window // 2))
    return tuple(one for one in sorted(found) if one[0] < one[1])


def _weights_bytes(footprint: Footprint, placement: StatePlacement, on_host: bool) -> int:
    """Memory of weights, and on a host of those on their way."""
    window = _windows(footprint, placement, 0)[WEIGHTS] if on_host and weights_leave(footprint, placement) else 0
    return weights_in_memory(footprint, placement) + window


def _transfers(footprint: Footprint, placement: StatePlacement) -> list[Transfer]:
    found: list[Transfer] = []
    if placement.state is not None:
        found += once(footprint, _state, dataclasses.replace(placement, weights=None, weights_bytes=0, width=1))
    if placement.weights is not None:
        found += once(
            footprint, weight_transfers, dataclasses.replace(placement, state=None, staying=frozenset(), width=1)
        )
    return found


def _state(footprint: Footprint, placement: StatePlacement) -> list[Transfer]:
    assert placement.state is not None
    found = []
    left = left_units(footprint, placement)
    for unit, one in footprint.weights.items():
        use = footprint.uses[unit]
        if unit in left:
            at = use.last if placement.in_backward else use.forward
            at = len(footprint.segments) - 1 if placement.keeps_gradients else at
            found += both_ways(STATE, unit, placement.state, one.state_bytes, at)
            if placement.moves_gradients:
                found.append(Transfer(GRADIENTS, unit, placement.state, one.trained_bytes, use.last, loads=False))
                found.append(Transfer(GRADIENTS, unit, placement.state, one.trained_bytes, use.forward, loads=True))
    return found


def _with_state(
    found: Footprint, placement: StatePlacement, now: StatePlacement, footprint: Footprint, budget_bytes: int
) -> Footprint:
    """``found``, with gradients and state where they are in ``placement``, not in ``now``. Gradients that leave are there
    while their unit computes, and updates are a part of backward or of forward then. ``footprint`` has the same segments,
    and is asked for them again.
    """
    weights, had_left, left = footprint.weights, left_units(footprint, now), left_units(footprint, placement)
    state, trained = (
        sum(getattr(weights[unit], name) for unit in left) - sum(getattr(weights[unit], name) for unit in had_left)
        for name in ("state_bytes", "trained_bytes")
    )
    found = dataclasses.replace(
        found,
        base_bytes=found.base_bytes - state,
        state_bytes=found.state_bytes - state,
        optimizer_step_bytes=_bytes_of_updates(footprint, left, now, budget_bytes),
    )
    if placement.keeps_gradients:
        return found
    changed = once(footprint, _with_gradients, (placement.in_backward, had_left, left))
    found = dataclasses.replace(
        found,
        segments=changed.segments,
        gradient_bytes=max(0, found.gradient_bytes - (0 if found.looks_at_gradients else trained)),
        optimizer_step_s=changed.optimizer_step_s,
    )
    found.computes_like(changed)
    return found


def _bytes_of_updates(footprint: Footprint, left: frozenset[str], now: StatePlacement, budget_bytes: int) -> int:
    """What updates need: of parts of what has left memory, and at once of what stays."""
    stays = [one for unit, one in footprint.weights.items() if one.trained_bytes and unit not in left]
    needed = footprint.optimizer_step_bytes
    if now.state is None:
        all_trained = sum(one.trained_bytes for one in footprint.weights.values())
        share = needed / max(1, all_trained)
        needed = update_bytes(needed, budget_bytes)
    else:
        share = footprint.step_share
    if not share or not stays:
        return needed
    at_once = round(share * sum(one.trained_bytes for one in stays))
    return max(needed, at_once, 2 * max((nbytes for one in stays for nbytes in one.each), default=0))


def _with_gradients(footprint: Footprint, key: tuple[bool, frozenset[str], frozenset[str]]) -> Footprint:
    """A step in which the units ``left`` have no gradients but while they compute, as the units ``had_left`` in the one that
    was measured, as far as its segments go. Where these are none, it has updated no weights either when their unit was used.
    """
    in_backward, had_left, left = key
    uses = footprint.uses
    trained = {unit: one.trained_bytes for unit, one in footprint.weights.items() if one.trained_bytes}
    all_trained = sum(trained.values())
    small = max(0, footprint.gradient_bytes - sum(nbytes for unit, nbytes in trained.items() if unit not in had_left))
    segments = list(footprint.segments)
    more = [0] * (len(segments) + 1)  # of gradients that stay, from this segment on
    for unit, nbytes in trained.items():
        stayed, stays = bool(had_left) and unit not in had_left, unit not in left
        more[0 if footprint.accumulates else uses[unit].last + 1] += (stays - stayed) * nbytes
    for index, (one, there) in enumerate(zip(footprint.segments, itertools.accumulate(more), strict=False)):
        if had_left:
            gradients = min(one.gradient_bytes + there, small + all_trained)
        else:
            gradients = min(one.gradient_bytes, small + trained.get(one.unit, 0) + there)
        if gradients != one.gradient_bytes:
            segments[index] = _changed(one, one.live_bytes - one.gradient_bytes + gradients, gradients, one.seconds)
    step_s = footprint.optimizer_step_s
    if left and not had_left:
        for unit in left:
            at = uses[unit].last if in_backward else uses[unit].forward
            one, share = segments[at], trained[unit] / all_trained
            seconds = one.seconds + footprint.optimizer_step_s * share
            segments[at] = _changed(one, one.live_bytes, one.gradient_bytes, seconds)
        step_s *= sum(nbytes for unit, nbytes in trained.items() if unit not in left) / all_trained
    return dataclasses.replace(footprint, segments=tuple(segments), optimizer_step_s=step_s)


def _changed(one: Segment, live_bytes: int, gradient_bytes: int, seconds: float) -> Segment:
    # It takes a fifth of the time of a changed copy.
    return Segment(one.unit, one.backward, live_bytes, gradient_bytes, seconds, one.measured_bytes)
