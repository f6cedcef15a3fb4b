"""The placement as a mixed-integer linear program: a simplified step, whose answers the simulation judges."""

import itertools
from collections.abc import Iterator, Sequence

import numpy
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import Choices, Placements, Problem, Solution
from hf_offload.plan.timeline import Windows

_TIME_LIMIT_S = 0.1
_ROUNDS = 3
# Moments at which memory is looked at, and half as many cuts through each direction of a tier.
_POINTS = 24

Row = NDArray[numpy.float64]


def by_program(problem: Problem, choices: Choices, windows: Windows) -> Iterator[Solution]:
    """Solve the program; where the simulation says that its answer breaks the budget, leave more room and solve again."""
    program = _Program(problem, choices, windows)
    slack_bytes = 0
    for _ in range(_ROUNDS):
        placements = program.solve(slack_bytes)
        if placements is None:
            return
        solution = problem.play(placements, windows, "milp")
        yield solution
        excess = solution.timeline.must_fit_bytes - problem.limit_bytes
        if excess <= 0:
            return
        slack_bytes += excess


class _Program:
    """Binary variables: one per unit and place, one per block and way of recomputing it. Two more: stalls each way."""

    def __init__(self, problem: Problem, choices: Choices, windows: Windows):
        self._problem = problem
        self._choices = choices
        self._windows = windows
        footprint = self._footprint = problem.footprint
        columns = choices.moves()
        self._columns = columns
        self._store, self._load = len(columns), len(columns) + 1
        self._elapsed = numpy.array([0.0, *itertools.accumulate(moment.seconds for moment in footprint.moments)])
        self._backward = next((index for index, moment in enumerate(footprint.moments) if moment.backward), 0)
        # What is saved, and what it would take to place it, as columns of numbers.
        index = {column: number for number, column in enumerate(columns)}
        blocks = set(choices.blocks)
        self._nbytes = numpy.array([one.nbytes for one in footprint.saved], dtype=float)
        self._packed, self._gone, self._needed, self._released = (
            numpy.array([getattr(one, name) for one in footprint.saved], dtype=int)
            for name in ("packed", "gone", "needed", "released")
        )
        self._saved_at = {
            placement: numpy.array([index[one.unit, placement] for one in footprint.saved], dtype=int)
            for placement in (Placement.KEEP, *choices.tiers)
        }
        spans = footprint.recomputable
        self._boundary = numpy.array([span.boundary_bytes for span in spans], dtype=float)
        self._begin, self._left = (numpy.array([span.forward[end] for span in spans], dtype=int) for end in (0, 1))
        self._again = numpy.array([span.backward for span in spans], dtype=int)
        self._block_at = {
            placement: numpy.array([index[span.name, placement] for span in spans], dtype=int)
            for placement in choices.recomputes
        }
        number = {span.name: which for which, span in enumerate(spans)}
        inside = [number.get(footprint.units[one.unit] or "", -1) for one in footprint.saved]
        self._inside = numpy.array(inside, dtype=int)
        held = numpy.zeros(len(footprint.moments) + 1)
        alone = self._gone < self._released
        numpy.add.at(held, self._gone[alone], self._nbytes[alone])
        numpy.add.at(held, self._released[alone], -self._nbytes[alone])
        live = numpy.array([moment.live_bytes for moment in footprint.moments], dtype=float)
        self._curve = live + numpy.cumsum(held)[:-1]  # memory at every moment with everything kept
        self._cost = self._costs(index)
        self._rows, self._lower, self._upper = self._choose_one(index, blocks)
        for tier in choices.tiers:
            for row, most in (*self._stalls(tier), self._room(tier)):
                self._rows.append(row)
                self._lower.append(-numpy.inf)
                self._upper.append(most)

    def solve(self, slack_bytes: int) -> Placements | None:
        """The best choice, with ``slack_bytes`` of the budget left; None where there is none."""
        memory = list(self._memory(slack_bytes))
        rows = [*self._rows, *(row for row, _ in memory)]
        lower = [*self._lower, *(-numpy.inf for _ in memory)]
        upper = [*self._upper, *(most for _, most in memory)]
        count = len(self._columns)
        result = milp(
            self._cost,
            constraints=LinearConstraint(csr_array(numpy.array(rows)), lower, upper),
            integrality=numpy.array([1] * count + [0, 0]),
            bounds=Bounds(numpy.zeros(count + 2), numpy.array([1.0] * count + [numpy.inf, numpy.inf])),
            options={"time_limit": _TIME_LIMIT_S, "mip_rel_gap": 1e-3},
        )
        if result.x is None:
            return None
        chosen = [column for column, value in zip(self._columns, result.x, strict=False) if value > 0.5]
        return self._choices.place(dict(sorted(chosen, key=lambda column: column[1].recomputes)))

    def _row(self, *parts: tuple[NDArray[numpy.int_], Row]) -> Row:
        """A row that adds, for each part, weights at columns; columns may come several times."""
        row = numpy.zeros(len(self._columns) + 2)
        for columns, weights in parts:
            numpy.add.at(row, columns, weights)
        return row

    def _costs(self, index: dict[tuple[str, Placement], int]) -> Row:
        cost = numpy.zeros(len(self._columns) + 2)
        cost[self._store] = cost[self._load] = 1.0
        for columns in self._block_at.values():
            cost[columns] = self._elapsed[self._left] - self._elapsed[self._begin]
        for unit in self._choices.parts:
            for tier in self._choices.tiers:
                # Among equals, what moves fewer bytes.
                cost[index[unit, tier]] = 1e-15 * self._footprint.saved_bytes[unit]
        return cost

    def _choose_one(
        self, index: dict[tuple[str, Placement], int], blocks: set[str]
    ) -> tuple[list[Row], list[float], list[float]]:
        """Every unit has one placement, its block's where that is recomputed."""
        rows: list[Row] = []
        totals: list[float] = []
        for unit in self._choices.parts:
            row = self._row()
            for placement in (Placement.KEEP, *self._choices.tiers):
                row[index[unit, placement]] = 1
            block = self._footprint.units[unit]
            if block in blocks:
                for placement in self._choices.recomputes:
                    row[index[block, placement]] = 1
            rows.append(row)
            totals.append(1)
        for block, members in self._choices.members.items():
            if not members and self._choices.recomputes:
                row = self._row()
                for placement in self._choices.recomputes:
                    row[index[block, placement]] = 1
                rows.append(row)
                totals.append(0)
        return rows, list(totals), list(totals)

    def _memory(self, slack_bytes: int) -> Iterator[tuple[Row, float]]:
        """Memory at the moments that matter: where most is alive with everything kept, in every stretch of the step."""
        moments = self._footprint.moments
        for moment in self._points(slack_bytes):
            alive = (self._gone <= moment) & (moment < self._released)
            nbytes = self._nbytes[alive]
            used = alive & (self._needed <= moment)
            parts = [(self._saved_at[Placement.KEEP][alive], nbytes)]
            parts += [(self._saved_at[tier][used], self._nbytes[used]) for tier in self._choices.tiers]
            if self._block_at:
                begun = alive & (self._inside >= 0) & (self._again[self._inside] <= moment)
                parts += [(columns[self._inside[begun]], self._nbytes[begun]) for columns in self._block_at.values()]
                held = (self._left <= moment) & (moment <= self._again)
                parts.append((self._block_at[Placement.RECOMPUTE][held], self._boundary[held]))
            transit = 0
            if self._problem.channels:
                windows = self._windows
                transit = windows.read_ahead_bytes if moments[moment].backward else windows.write_behind_bytes
            rest = self._problem.limit_bytes - self._footprint.base_bytes - moments[moment].live_bytes - slack_bytes
            yield self._row(*parts), rest - min(transit, nbytes.sum() - self._nbytes[used].sum())

    def _points(self, slack_bytes: int) -> Sequence[int]:
        over = numpy.flatnonzero(self._curve + (self._footprint.base_bytes + slack_bytes) > self._problem.limit_bytes)
        # The highest moment of each of at most _POINTS stretches.
        stretches = numpy.array_split(over, min(_POINTS, max(len(over), 1)))
        return [int(stretch[numpy.argmax(self._curve[stretch])]) for stretch in stretches if len(stretch)]

    def _stalls(self, tier: Placement) -> Iterator[tuple[Row, float]]:
        """A channel is a queue: it ends no earlier than the bytes that come after any point allow."""
        channel = self._problem.channels[tier.value]
        end_s = self._elapsed[self._backward]
        alone = self._gone < self._released
        columns = self._saved_at[tier]
        block_columns = self._block_at.get(Placement(f"recompute+{tier.value}"))

        def queue(moved: NDArray[numpy.bool_], again: NDArray[numpy.bool_], bytes_per_s: float, stall: int) -> Row:
            parts = [(columns[moved], self._nbytes[moved] / bytes_per_s)]
            if block_columns is not None:
                parts.append((block_columns[again], self._boundary[again] / bytes_per_s))
            row = self._row(*parts)
            row[stall] = -1
            return row

        behind_s = self._windows.write_behind_bytes / channel.store_bytes_per_s
        for cut in numpy.linspace(0, self._backward, _POINTS // 2, endpoint=False).astype(int):
            moved, again = alone & (self._packed >= cut), self._begin >= cut
            most = end_s - self._elapsed[cut] + behind_s
            yield queue(moved, again, channel.store_bytes_per_s, self._store), most
        last = len(self._footprint.moments)
        for cut in numpy.linspace(self._backward, last, _POINTS // 2 + 1).astype(int)[1:]:
            moved, again = alone & (self._needed < cut), self._again < cut
            yield queue(moved, again, channel.load_bytes_per_s, self._load), self._elapsed[cut] - end_s

    def _room(self, tier: Placement) -> tuple[Row, float]:
        """What a tier holds at once, if nothing has come back before the last has left."""
        parts = [(self._saved_at[tier], self._nbytes)]
        block_columns = self._block_at.get(Placement(f"recompute+{tier.value}"))
        if block_columns is not None:
            parts.append((block_columns, self._boundary))
        return self._row(*parts), self._problem.room_bytes.get(tier.value, 0)
