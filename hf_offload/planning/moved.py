"""Steps that are measured: all that can be moved is moved, within the budget if that is possible."""

import dataclasses

from hf_offload.plan.plan import Plan
from hf_offload.plan.problem import Problem
from hf_offload.plan.timeline import Windows
from hf_offload.planning.known import Known


def windows_to_measure(known: Known, safest: Plan) -> Windows | None:
    """Those to measure a step with that has a plan. It breaks no budget: None where nothing keeps it from that."""
    # A plan that was measured as it is has no others.
    return None if known.plan is not None else windows_to_move_all(known.problem, safest)


def windows_to_move_all(
    problem: Problem, safest: Plan, more_bytes: int = 0, *, within_room: bool = True
) -> Windows | None:
    """The widest with which everything can be moved, ``more_bytes`` of the budget stay free, and, ``within_room``, no tier is
    filled; None if there are none. Where those let any number of bytes wait to be written, no more may wait than in a first
    step: how fast a drive is at the moment is not known.
    """
    moved = dict.fromkeys(problem.footprint.units, safest.default)
    for windows in problem.windows:
        solution = problem.play(moved, windows)
        fits = solution.timeline.must_fit_bytes + more_bytes <= problem.limit_bytes
        if fits and (not within_room or problem.has_room(solution)):
            return windows if windows.write_behind_bytes < problem.limit_bytes else not_behind(windows, safest)
    return None


def not_behind(windows: Windows, safest: Plan) -> Windows:
    """``windows`` in which no more waits to be written than ``safest`` lets wait."""
    behind = min(windows.write_behind_bytes, safest.write_behind_bytes)
    return dataclasses.replace(windows, write_behind_bytes=behind)


def moving_all(safest: Plan, windows: Windows) -> Plan:
    """``safest`` with other windows."""
    return dataclasses.replace(
        safest, read_ahead_bytes=windows.read_ahead_bytes, write_behind_bytes=windows.write_behind_bytes
    )
