"""What is said of a budget that nothing fits into: the smallest that would do, and what would lower it."""

import collections
import dataclasses
import sys
from collections.abc import Sequence

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.choosing import Choice, choose, least_memory
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.problem import Problem, Solution, smallest_budget
from hf_offload.plan.state_placement import GRADIENTS, IN_MEMORY, STATE, WEIGHTS, Allowed, moved_bytes, tier_bytes
from hf_offload.settings.sizes import format_bytes

_ROUNDS = 4
# What a lower min_bytes would let leave memory is named from this share of the peak on.
_MUCH = 0.1
# How state would leave memory.
_BY_SETTING = "state on a tier (optimizer='ssd' or 'ram', also with several processes), "
_BY_ENGINE = (
    "more GPUs, parts on the host (fsdp_offload_params: true for FSDP2, offload_optimizer_device: cpu for DeepSpeed), "
)


def find_choice(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed, less: int = 0) -> Choice:
    """As :func:`~hf_offload.plan.choosing.choose`, with ``less`` bytes less than the budget.

    Raises :class:`~hf_offload.errors.OffloadPlanError` with the smallest budget that would do, and what would lower it.
    """
    choice = choose(footprint, hardware, budget_bytes - less, allowed)
    if choice is None:
        raise refuse(footprint, hardware, budget_bytes, allowed, less)[1]
    return choice


def refuse(
    footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed, less: int = 0
) -> tuple[Choice, OffloadPlanError]:
    """What needs the least memory, and what is to be said of a budget that it does not fit into, with ``less`` bytes less."""
    least, needed = least_memory(footprint, hardware, budget_bytes, allowed), budget_bytes
    for _ in range(_ROUNDS):  # what is on its way takes a part of the budget, so that more of it needs more
        before, needed = needed, smallest_budget(least.solution.timeline.must_fit_bytes)
        if needed == before:
            break
        least = least_memory(footprint, hardware, needed, allowed)
    timeline = least.solution.timeline
    timeline = dataclasses.replace(
        timeline, peak_bytes=timeline.peak_bytes + less, must_fit_bytes=timeline.must_fit_bytes + less
    )
    problem = dataclasses.replace(least.problem, budget_bytes=budget_bytes)
    solution = dataclasses.replace(least.solution, timeline=timeline)
    found = dataclasses.replace(least, problem=problem, solution=solution)
    now = allowed.now or IN_MEMORY
    on_tier = "" if allowed.state != "none" or now.state is not None else _BY_SETTING
    on_tier = _BY_ENGINE if allowed.is_sharded else on_tier
    limits = _about_room(footprint, hardware, allowed, least, needed)
    may_leave = allowed.weights != "none" or now.weights is not None
    return found, _refusal(problem, solution, limits, on_tier, weights_may_leave=may_leave)


def _refusal(
    problem: Problem, least: Solution, limits: Sequence[str], on_tier: str, weights_may_leave: bool
) -> OffloadPlanError:
    """The error for a budget that ``least``, the solution with the smallest peak, does not fit into. ``limits`` are those of
    tiers that keep it from needing less; ``on_tier`` says how state would leave memory, empty where it may already; the last
    one whether settings let weights leave.
    """
    needed = smallest_budget(least.timeline.must_fit_bytes)
    if needed <= problem.budget_bytes and limits:
        budget = format_bytes(problem.budget_bytes)
        text = (
            f"A memory budget of {budget} would do, but not within the limits of tiers: it takes {'; '.join(limits)}."
        )
        return OffloadPlanError(text, needed)
    return OffloadPlanError(_too_small(problem, least, limits, on_tier, weights_may_leave), needed)


def _about_room(
    footprint: Footprint, hardware: Hardware, allowed: Allowed, least: Choice, budget_bytes: int
) -> list[str]:
    """Limits of tiers with which less memory would do than ``least`` needs, if it keeps to them."""
    keeps_to_them = least.problem.has_room(least.solution) and min(least.problem.room_bytes.values(), default=0) >= 0
    most = smallest_budget(least.solution.timeline.must_fit_bytes) if keeps_to_them else sys.maxsize
    writing = dataclasses.replace(allowed, written_bytes=None)
    room = {tier: dataclasses.replace(figure, value=sys.maxsize) for tier, figure in hardware.room_bytes.items()}
    drive = "" if "ssd" in hardware.room else ", or a directory on a drive"
    advice = []
    roomy = least_memory(footprint, dataclasses.replace(hardware, room_bytes=room), budget_bytes, writing)
    if (needed := smallest_budget(roomy.solution.timeline.must_fit_bytes)) < most:
        lying = collections.Counter(tier_bytes(footprint, roomy.state_placement))
        lying.update(roomy.solution.timeline.tier_bytes)
        advice += [
            f"more room in the {tier} tier, {format_bytes(nbytes)} instead of {format_bytes(hardware.room.get(tier, 0))}"
            f"{drive}, with which {needed >> 20} MiB would do"
            for tier, nbytes in lying.items()
            if nbytes > hardware.room.get(tier, 0)
        ]
    if allowed.written_bytes is None:
        return advice
    free = least_memory(footprint, hardware, budget_bytes, writing)
    written = moved_bytes(free.problem.footprint)[0].get("ssd", 0) + free.solution.timeline.tier_bytes.get("ssd", 0)
    needed = smallest_budget(free.solution.timeline.must_fit_bytes)
    if needed < most and written > allowed.written_bytes:
        advice.append(
            f"max_step_write_bytes of {format_bytes(written)} instead of {format_bytes(allowed.written_bytes)}, with which "
            f"{needed >> 20} MiB would do"
        )
    return advice


def _too_small(problem: Problem, least: Solution, limits: Sequence[str], on_tier: str, weights_may_leave: bool) -> str:
    """Why no plan fits, and what to do: ``limits`` of tiers is a part of it. What settings do already is left out."""
    footprint, timeline = problem.footprint, least.timeline
    where = timeline.peak_unit
    short = smallest_budget(timeline.must_fit_bytes) - problem.budget_bytes
    more = f", {format_bytes(short)} more" if short > 0 else ""  # else a tier is too small
    advice = ["a smaller batch, with more gradient accumulation", "shorter sequences"]
    weights = footprint.base_bytes + footprint.gradient_bytes
    moved = {one.kind for one in footprint.transfers}
    vocabulary = " or a smaller vocabulary" if footprint.head else ""
    at_head = footprint.head and footprint.units.get(where) is None and where != "the optimizer"
    if STATE in moved and WEIGHTS not in moved and not weights_may_leave:
        what = "weights" if GRADIENTS in moved else "weights and gradients"
        advice.insert(
            0,
            f"{what}, which cannot leave memory here, take {format_bytes(weights)} of it: with several processes, a part of "
            "them in each (FSDP2 with its CPUOffloadPolicy, DeepSpeed's ZeRO-3); 16-bit weights, or training adapters only",
        )
    elif footprint.transfers and WEIGHTS not in moved:
        advice.insert(
            0,
            f"weights, and what is on its way to tiers, take {format_bytes(weights)} of it, and weights on a tier would need "
            f"no less: 16-bit weights, or a model with smaller blocks{vocabulary}",
        )
    elif footprint.transfers:
        stays = footprint.gradient_bytes and GRADIENTS not in moved
        what = "one block of weights, all gradients" if stays else "one block of weights"
        advice.insert(
            0,
            f"{what}, and what is on its way to tiers, take {format_bytes(weights)} of it, and all else of the model's state "
            f"has left memory: 16-bit weights, or a model with smaller blocks{vocabulary}",
        )
    elif weights > 0.5 * timeline.peak_bytes:
        advice.insert(
            0,
            f"weights, gradients and optimizer state take {format_bytes(weights)} of it: {on_tier}an optimizer with less "
            "state, 16-bit weights, or training adapters only (LoRA)",
        )
    if 2 * weights <= timeline.peak_bytes and at_head:
        tiled = "" if footprint.head in footprint.tiled else ", or tiled_loss='on'"
        advice.insert(0, f"the peak is in {where}, outside of the blocks: a smaller vocabulary{tiled}")
    advice += _about_small(footprint, timeline.must_fit_bytes, not on_tier)
    if problem.may_recompute:
        advice += _about_blocks(footprint)
    advice += limits
    return (
        f"A memory budget of {format_bytes(problem.budget_bytes)} is too small: the least this run can do with is "
        f"{smallest_budget(timeline.must_fit_bytes) >> 20} MiB{more} (the peak is in {where}). What would lower it: "
        f"{'; '.join(advice)}."
    )


def _about_small(footprint: Footprint, peak_bytes: int, state_may_leave: bool) -> list[str]:
    """What ``min_bytes`` keeps in memory, where that is much of the peak."""
    leaving = footprint.weights.values()
    state = footprint.base_bytes + footprint.gradient_bytes
    state -= sum(one.weight_bytes + one.trained_bytes + one.state_bytes for one in leaving)
    if not state_may_leave or footprint.transfers or state <= _MUCH * peak_bytes:
        state = 0
    saved = footprint.small_bytes
    if not footprint.min_bytes or state + saved <= _MUCH * peak_bytes:
        return []
    parts = [(saved, "saved tensors"), (state, "weights with their gradients and state")]
    kept = " and ".join(f"{format_bytes(nbytes)} of {what}" for nbytes, what in parts if nbytes)
    return [f"a lower min_bytes: {kept} stay in memory, being smaller than {format_bytes(footprint.min_bytes)}"]


def _about_blocks(footprint: Footprint) -> list[str]:
    """What keeps blocks from being recomputed."""
    if not any(footprint.units.values()):
        return [
            "recomputing blocks in backward, which is done for classes that derive from "
            "transformers.modeling_layers.GradientCheckpointingLayer, or are named in recompute_blocks"
        ]
    reasons: dict[str, list[str]] = {}
    for span in footprint.blocks:
        if span.not_twice:
            reasons.setdefault(span.not_twice, []).append(span.name)
    return [
        f"recomputing {names[0]}{f' and {len(names) - 1} other blocks' if len(names) > 1 else ''}, which cannot be done "
        f"because {reason}"
        for reason, names in reasons.items()
    ]
