"""Choosing where weights, gradients and optimizer state are, and what becomes of activations in the memory that is left.

There are few choices for them: state in memory or on a tier, weights in memory or on a tier with so many bytes of them in
memory. A step in which all activations stay, whether they fit or not, bounds what each choice can reach; in this order, those
that fit are planned until none that is left can be faster.
"""

import collections
import dataclasses
import functools
import heapq
import sys
from collections.abc import Iterator, Sequence

from hf_offload.errors import OffloadPlanError
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.holding import (
    IN_MEMORY,
    Held,
    has_no_backward,
    hold,
    least_weights,
    moved_bytes,
    snapshot_bytes,
    tier_bytes,
)
from hf_offload.plan.plan import Placement
from hf_offload.plan.planner import make_problem, refusal
from hf_offload.plan.problem import Choices, Problem, Solution, smallest_budget
from hf_offload.plan.search import (
    better,
    can_fit,
    find_greedy,
    find_prefixes,
    find_uniform,
    local_search,
    may_gain,
    smallest,
    worth_s,
)
from hf_offload.settings.sizes import format_bytes

_SHARES = 8
"""Weights that stay are tried in so many steps."""
_SOLVED = 4
_SEARCHED = 3
"""Of those, so many are searched in full: where they are about as fast as the fastest of them."""
_LIKELY = 4
"""Ways of moving weights and state that are looked at for the one that needs the least memory."""
_ROUNDS = 4
_SMALL_STATE = 0.25
"""Of the budget: gradients and state that may stay in memory while weights leave it."""
_GAIN = 1.05
"""What is no faster than this is not worth another place of weights and state in a run."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Where weights, gradients and state are, and the plan for the activations with them."""

    held: Held
    problem: Problem
    solution: Solution

    @property
    def step_s(self) -> float:
        """Of the predicted step."""
        return self.solution.timeline.step_s


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What may be where: ``"none"`` is memory, ``"auto"`` wherever it is best.

    Attributes:
        state, weights: Where gradients and state, and weights, may be.
        in_backward, keeps_gradients: As in :class:`Held`.
        may_recompute: Whether blocks may be recomputed in backward.
        now: Where a running training has them, and the footprint is taken so; None before it. What has left memory stays out
            of it, but how many bytes of weights are in memory may change, unless ``weights`` is ``"none"``.
        written_bytes: Most bytes that a step may write to drives; None: no limit.
        snapshots: How many of the run are held at a time.
        snapshots_of_trained: Whether they leave out what is not trained.
        is_measured: Whether a measured step had a part in where they are ``now``: if not, a plan is not bound to it.
    """

    state: str = "auto"
    weights: str = "auto"
    in_backward: bool = False
    keeps_gradients: bool = False
    may_recompute: bool = True
    now: Held | None = None
    written_bytes: int | None = None
    snapshots: int = 0
    snapshots_of_trained: bool = False
    is_measured: bool = True


def problem_of(footprint: Footprint, hardware: Hardware, budget_bytes: int, held: Held, allowed: Allowed) -> Problem:
    """What is left to be placed: activations, in the memory and the room that the rest leaves."""
    on_host = hardware.device == "cpu"
    where = functools.partial(
        _held,
        held=held,
        budget_bytes=budget_bytes,
        on_host=on_host,
        now=allowed.now or IN_MEMORY,
        tiers=frozenset(hardware.store_bytes_per_s),
    )
    found = where(footprint.plain)
    problem = make_problem(found, hardware, budget_bytes, may_recompute=allowed.may_recompute)
    taken = tier_bytes(footprint, held)
    kept = snapshot_bytes(
        footprint.plain, held, allowed.now or IN_MEMORY, allowed.snapshots, allowed.snapshots_of_trained
    )
    # Snapshots that find no room are refused by themselves.
    room = {
        tier: max(0, nbytes - kept.get(tier, 0)) - taken.get(tier, 0) for tier, nbytes in problem.room_bytes.items()
    }
    if allowed.written_bytes is not None and "ssd" in room:
        # What activations take of a drive in a step is written in it.
        room["ssd"] = min(room["ssd"], allowed.written_bytes - moved_bytes(found)[0].get("ssd", 0))
    return dataclasses.replace(problem, room_bytes=room, mixed=footprint.mixed, hold=where)


def _held(
    footprint: Footprint, *, held: Held, budget_bytes: int, on_host: bool, now: Held, tiers: frozenset[str]
) -> Footprint:
    found = hold(footprint, held, budget_bytes, on_host, now)
    if all(one.tier in tiers for one in found.transfers):
        return found  # with what is known of it
    return dataclasses.replace(found, transfers=tuple(one for one in found.transfers if one.tier in tiers))


def choose(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> Choice | None:
    """The fastest step within the budget that is found; None if nothing fits. In a run that fits, everything stays.

    Weights and state of a running training stay where they are unless that is a good deal slower. Elementwise operations are
    recomputed where nothing fits otherwise, or where the step gets faster.
    """
    found: list[_Way] = []
    for held in ways(footprint, hardware, allowed):
        way = _Way(held, problem_of(footprint, hardware, budget_bytes, held, allowed))
        if not _may_fit(way.problem):
            continue
        if not held.moves and way.problem.fits(way.kept):
            return Choice(held, way.problem, way.kept)
        found.append(way)
    usual = _choose([way.plain for way in found], allowed)
    if footprint.elementwise is None or (usual is not None and not may_gain(footprint, usual.solution)):
        return usual
    reduced = _choose(found, allowed, usual)
    if usual is None or reduced is None:
        return reduced or usual
    return reduced if better(usual.solution, reduced.solution) is reduced.solution else usual


def _choose(found: Sequence["_Way"], allowed: Allowed, usual: Choice | None = None) -> Choice | None:
    """The fastest of these; no matter which where none is worth it in place of ``usual``."""
    best, solutions = _fastest(found, usual)
    if best is None:
        return _smallest(found) if usual is None else None
    if allowed.now is not None and allowed.is_measured and best.held != allowed.now:
        present, others = _fastest([way for way in found if way.held == allowed.now], usual)
        if present is not None and present.step_s <= _GAIN * best.step_s:
            best, solutions = present, others
    if not solutions:
        return best
    improved = local_search(best.problem, solutions, find_uniform(best.problem, best.step_s))
    return best if improved is None else dataclasses.replace(best, solution=improved)


def find_choice(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed, less: int = 0) -> Choice:
    """As :func:`choose`, with ``less`` bytes less than the budget.

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
    tried = allowed.state != "none" or now.state is not None
    limits = _about_room(footprint, hardware, allowed, least, needed)
    may_leave = allowed.weights != "none" or now.weights is not None
    return found, refusal(problem, solution, limits, state_may_leave=tried, weights_may_leave=may_leave)


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
        lying = collections.Counter(tier_bytes(footprint, roomy.held))
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


class _Way:
    """Somewhere weights and state may be, and what is left to be placed then."""

    def __init__(self, held: Held, problem: Problem):
        self.held = held
        self.problem = problem

    @functools.cached_property
    def plain(self) -> "_Way":
        """The same, without recompute of elementwise operations."""
        return self if self.problem.mixed is None else _Way(self.held, self.problem.plain)

    @functools.cached_property
    def kept(self) -> Solution:
        """All activations stay, whether they fit or not: no step of this way is faster."""
        return self.problem.play(Choices(self.problem).uniform(Placement.KEEP), self.problem.windows[0], "keep")

    @functools.cached_property
    def written_bytes(self) -> int:
        """To drives: of ways that are as fast, they wear the least."""
        return moved_bytes(self.problem.footprint)[0].get("ssd", 0)

    @functools.cached_property
    def least_s(self) -> float:
        """What that step takes at least, without playing it: all compute, and all loads."""
        footprint, channels = self.problem.footprint, self.problem.channels
        loads = (nbytes / channels[tier].load_bytes_per_s for tier, nbytes in moved_bytes(footprint)[1].items())
        return max([footprint.step_s, *loads])


def _fastest(found: Sequence[_Way], usual: Choice | None = None) -> tuple[Choice | None, Sequence[Solution]]:
    """The fastest, and what the search for it began with: nothing where no search can find a faster one. Only what may be
    worth it in place of ``usual``, if that is given.
    """
    best: Choice | None = None
    below_s = worth_s(None if usual is None else usual.solution)
    tried: list[Choice] = []  # at a first look
    for way in _by_time(found):
        kept_s = way.kept.timeline.step_s
        if kept_s >= _GAIN * below_s or (best is not None and (len(tried) >= _SOLVED or kept_s >= best.step_s)):
            break
        if way.problem.fits(way.kept):
            if best is None or kept_s < best.step_s:
                best = Choice(way.held, way.problem, way.kept)
            continue
        if not any(True for _ in _narrowest(way.problem)):
            continue
        prefixes = find_prefixes(way.problem)
        if prefixes:
            tried.append(Choice(way.held, way.problem, prefixes[0].solution))
            best = tried[-1] if best is None or tried[-1].step_s < best.step_s else best
    if best is not None and all(best is not one for one in tried):
        return _sparing(found, best), ()
    solutions: Sequence[Solution] = ()
    for one in sorted(tried, key=lambda one: one.step_s)[:_SEARCHED]:
        assert best is not None
        if one.step_s > _GAIN * best.step_s:
            break
        some = find_greedy(one.problem, below_s)
        fastest = min(some, key=lambda each: each.objective, default=one.solution)
        if not solutions or fastest.timeline.step_s < best.step_s:
            best, solutions = dataclasses.replace(one, solution=fastest), some
    return best, solutions


def _by_time(found: Sequence[_Way]) -> Iterator[_Way]:
    """From the fastest step in which all activations stay to the slowest; of equals, first what leaves most memory."""
    # Played are those alone whose turn it is.
    coming = [(way.least_s, way.problem.footprint.base_bytes, number, False) for number, way in enumerate(found)]
    heapq.heapify(coming)
    while coming:
        least_s, base_bytes, number, is_played = heapq.heappop(coming)
        way = found[number]
        if is_played:
            yield way
        else:
            kept_s = max(least_s, round(way.kept.timeline.step_s, 4))
            heapq.heappush(coming, (kept_s, base_bytes, number, True))


def _sparing(found: Sequence[_Way], fastest: Choice) -> Choice:
    """Of all ways in which activations stay, and which are as fast, the one that wears the drive the least."""
    written_bytes = moved_bytes(fastest.problem.footprint)[0].get("ssd", 0)
    for way in sorted(found, key=lambda one: one.written_bytes):
        if way.written_bytes >= written_bytes:
            break
        may_be = way.least_s <= fastest.step_s
        if may_be and way.kept.timeline.step_s <= fastest.step_s and way.problem.fits(way.kept):
            return Choice(way.held, way.problem, way.kept)
    return fastest


def least_memory(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> Choice:
    """What needs the least memory, however slow."""
    found = [
        (held, problem_of(footprint, hardware, budget_bytes, held, allowed))
        for held in ways(footprint, hardware, allowed)
    ]
    roomy = [one for one in found if min(one[1].room_bytes.values(), default=0) >= 0] or found
    return min(_smallest_of(roomy), key=lambda one: _size(one.problem, one.solution))


def _smallest_of(found: Sequence[tuple[Held, Problem]]) -> Iterator[Choice]:
    """What needs the least memory in each way that may be the one with the least of all: a few, and the one in which nothing
    leaves memory.
    """
    likely = sorted(found, key=lambda one: _least_bytes(one[1]))
    moving = [one for one in likely if one[0].moves][:_LIKELY]
    best: int | None = None
    for held, problem in [one for one in likely if not one[0].moves or one in moving]:
        if best is None or _least_bytes(problem) < best:
            solution = smallest(problem)
            if problem.has_room(solution):
                best = min(solution.timeline.must_fit_bytes, best or sys.maxsize)
            yield Choice(held, problem, solution)


def _size(problem: Problem, solution: Solution) -> tuple[bool, int]:
    return not problem.has_room(solution), solution.timeline.must_fit_bytes


def can_hold(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> bool:
    """Whether anything fits."""
    problems = (
        problem_of(footprint, hardware, budget_bytes, held, allowed) for held in ways(footprint, hardware, allowed)
    )
    possible = (problem for problem in problems if _may_fit(problem))
    first = next(possible, None)
    if first is None:
        return False
    if any(True for _ in _narrowest(first)):  # mostly so, and no other place has to be looked at
        return True
    return can_fit(min((first, *possible), key=_least_bytes))


def may_hold(footprint: Footprint, hardware: Hardware, budget_bytes: int, allowed: Allowed) -> bool:
    """Whether anything could fit if less were saved."""
    held = ways(footprint, hardware, allowed)
    return any(_may_fit(problem_of(footprint, hardware, budget_bytes, one, allowed)) for one in held)


def _smallest(found: Sequence[_Way]) -> Choice | None:
    if not found:
        return None
    fitting = (
        one for one in _smallest_of([(way.held, way.problem) for way in found]) if one.problem.fits(one.solution)
    )
    return next(fitting, None)


def ways(footprint: Footprint, hardware: Hardware, allowed: Allowed) -> Iterator[Held]:
    """What may be where: as it is, and then the others, everything in memory first if that is allowed."""
    total = sum(one.weight_bytes for one in footprint.weights.values())
    least = min(least_weights(footprint), total)
    trained = sum(one.trained_bytes for one in footprint.weights.values())
    now = allowed.now or IN_MEMORY
    if now.moves:
        yield now
    states = _places(allowed.state, hardware) if trained else [None]
    places = _places(allowed.weights, hardware) if total else [None]
    for state in states if now.state is None else [now.state]:
        for weights in places if now.weights is None else [now.weights]:
            if weights is None:
                found = Held(state, None, 0, allowed.in_backward, allowed.keeps_gradients)
                if not now.moves or found != now:
                    yield found
                continue
            if now.weights is not None and allowed.weights == "none":
                if state != now.state:
                    yield dataclasses.replace(now, state=state)
                continue
            at_once = state is None and not has_no_backward(footprint)
            if at_once and allowed.weights == "auto" and trained > _SMALL_STATE * total:
                continue  # the optimizer's step takes all of them at once
            # Weights that have left may all come back.
            for share in range(_SHARES - (now.weights is None), -1, -1):
                staying = least + (total - least) * share // _SHARES
                found = Held(state, weights, staying, allowed.in_backward, allowed.keeps_gradients)
                if found != now:
                    yield found


def _places(allowed: str, hardware: Hardware) -> Sequence[str | None]:
    tiers = [tier for tier in ("ram", "ssd") if tier in hardware.store_bytes_per_s]
    if hardware.device == "cpu":
        tiers = [tier for tier in tiers if tier != "ram"]
    if allowed == "auto":
        return [None, *tiers]
    return [None if allowed == "none" else allowed]


def _may_fit(problem: Problem) -> bool:
    if any(nbytes < 0 for nbytes in problem.room_bytes.values()):
        return False
    return _least_bytes(problem) <= problem.limit_bytes


def _least_bytes(problem: Problem) -> int:
    """What a step needs wherever its activations are."""
    footprint = problem.footprint
    alive = int(footprint.least_live_bytes.max())
    return footprint.base_bytes + max(alive, footprint.gradient_bytes + footprint.optimizer_step_bytes)


def _narrowest(problem: Problem) -> Iterator[Solution]:
    """All units placed alike, with the narrowest windows, where that fits."""
    choices = Choices(problem)
    for placement in sorted(choices.options, key=lambda one: not one.recomputes):  # what moves little is played soonest
        solution = problem.play(choices.uniform(placement), problem.windows[-1], placement.value)
        if problem.fits(solution):
            yield solution


def frontier(footprint: Footprint, hardware: Hardware, allowed: Allowed, points: int) -> list[tuple[int, Choice]]:
    """Budgets from the smallest that does to the one that keeps everything in memory, and what is chosen for each."""
    kept = make_problem(footprint, hardware, sys.maxsize)
    everything = kept.play(Choices(kept).uniform(Placement.KEEP), kept.windows[0], "keep").timeline.must_fit_bytes
    most = least = smallest_budget(everything)
    for _ in range(2):  # what is on its way takes a part of the budget
        least = smallest_budget(least_memory(footprint, hardware, least, allowed).solution.timeline.must_fit_bytes)
    least = min(least, most)
    found: list[tuple[int, Choice]] = []
    for index in range(points):
        budget = round(least * (most / least) ** (index / (points - 1)))
        choice = choose(footprint, hardware, budget, allowed)
        if found and (choice is None or found[-1][1].step_s < choice.step_s):
            choice = found[-1][1]  # what does with less does with more
        if choice is not None:
            found.append((budget, choice))
    return found
