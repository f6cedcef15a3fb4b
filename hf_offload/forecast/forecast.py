"""Everything ``hf-offload plan`` shows: the plan, what it is compared with, and how far each way goes."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.forecast.options import DDP
from hf_offload.forecast.scaling import Family
from hf_offload.forecast.sharding import as_it_computes, shard, sharding_of
from hf_offload.forecast.workload import Workload, count_choices
from hf_offload.plan.choosing import Choice, can_hold, choose, frontier
from hf_offload.plan.explain import Category, UnitLine, categories_of, unit_lines
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import BUDGET_SHARE, Hardware
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import Problem, Solution, make_problem
from hf_offload.plan.refusal import refuse
from hf_offload.plan.search import Alternative, largest, simple_ways, uniform
from hf_offload.plan.state_placement import Allowed, StatePlacement, snapshot_bytes
from hf_offload.plan.timeline import Timeline
from hf_offload.settings.memory_modes import OF_ADAPTERS
from hf_offload.settings.schema import snapshots_held
from hf_offload.settings.sizes import format_bytes, format_seconds

_MOST_ROWS = 1 << 14
_RATED_BYTES = 600e12
"""What many drives of 1 TB are rated to take in their lifetime."""
_SLOW = 10
_MOST_TOKENS = 1 << 22
_BUDGETS = 8


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train. ``timeline`` is None where nothing fits; ``longest_sequence`` where lengths could not be compared.
    ``over`` says what does not fit, memory or a tier, and by how many bytes.
    """

    name: str
    fits: bool
    timeline: Timeline | None
    largest_batch: int
    longest_sequence: int | None
    over: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A plan for a workload on a machine, and its alternatives. ``refusal`` says why there is none.

    Attributes:
        problem: What is left for activations by what is ``placement``.
        state_placement: Where weights, gradients and optimizer state are.
        counted: The step with all of them in memory, which takes ``step_s`` without any limit.
    """

    workload: Workload
    hardware: Hardware
    problem: Problem
    solution: Solution | None
    refusal: str | None
    lines: list[UnitLine]
    rows: list[Row]
    sequence_limit: int | None
    state_placement: StatePlacement
    counted: Footprint
    step_s: float
    snapshots_bytes: int = 0

    @property
    def categories(self) -> list[Category]:
        """What is where, by category, under the plan."""
        return categories_of(self.counted, self.problem, self.state_placement, self.solution)

    @functools.cached_property
    def frontier(self) -> list[tuple[int, Choice]]:
        """What would be chosen for budgets from the smallest that does to one that everything fits into."""
        allowed = dataclasses.replace(_allowed(self.workload, self.hardware), may_recompute=self.problem.may_recompute)
        return frontier(self.counted, _used_by_a_run(self.workload, self.hardware), allowed, _BUDGETS)

    @property
    def remarks(self) -> list[str]:
        """What a user is to know before such a run: RAM and drive that it needs, and how slow it is."""
        if self.solution is None:
            return []
        found, step_s = [], self.solution.timeline.step_s
        if self.hardware.gpus > 1:
            found.append(
                "All figures are those of one GPU. Such a run is started with hf-offload launch --config_file "
                f"{self.workload.sharding} --num_processes {self.hardware.gpus} train.py."
            )
        if self.problem.footprint.is_reduced:
            found.append("All blocks recompute their elementwise operations in backward.")
        in_ram, on_drive, written = (
            sum(getattr(category, name).get(tier, 0) for category in self.categories)
            for name, tier in (("tiers", "ram"), ("tiers", "ssd"), ("written_bytes", "ssd"))
        )
        if self.snapshots_bytes:
            found.append(
                f"Snapshots take {format_bytes(self.snapshots_bytes)} of RAM: {snapshots_held(self.workload.settings)} of "
                "weights and optimizer state."
            )
        if in_ram or on_drive:
            found.append(
                f"The run needs {format_bytes(in_ram)} of RAM and {format_bytes(on_drive)} of drives for what it moves."
            )
        if written:
            found.append(
                f"A step writes {format_bytes(written)} to drives: one that is rated for 600 TB lasts "
                f"{int(_RATED_BYTES / written):,} steps, {_RATED_BYTES / written * step_s / 86400:.0f} days without a pause."
            )
        if step_s > _SLOW * self.step_s:
            found.append(
                f"A step takes {step_s / self.step_s:.0f} times as long as one without any limit of memory "
                f"({format_seconds(self.step_s)}): a larger micro-batch moves the same weights and state for more tokens."
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        workload = self.workload
        footprint = self.counted
        return {
            "model": workload.name,
            "task": workload.task,
            "parameters": footprint.parameters,
            "batch": workload.batch,
            "sequence": workload.sequence,
            "shape": workload.shape,
            "dtype": str(workload.dtype).removeprefix("torch."),
            "autocast": None if workload.autocast is None else str(workload.autocast).removeprefix("torch."),
            "optimizer": workload.optimizer,
            "sharding": workload.sharding if self.hardware.gpus > 1 else None,
            "memory_mode": workload.memory_mode,
            "memory_mode_kwargs": dict(workload.memory_mode_kwargs),
            "budget_bytes": self.problem.budget_bytes,
            "weights_and_optimizer_bytes": footprint.base_bytes,
            "gradient_bytes": footprint.gradient_bytes,
            "optimizer_state_bytes": footprint.state_bytes,
            "snapshots_bytes": self.snapshots_bytes,
            "saved_bytes": sum(one.nbytes for one in footprint.saved),
            "source": footprint.source,
            "hardware": dataclasses.asdict(self.hardware),
            "units": [dataclasses.asdict(line) for line in self.lines],
            "placements": None if self.solution is None else dict(self.solution.placements),
            "recomputes_elementwise": self.problem.footprint.is_reduced,
            "state_placement": self.state_placement.as_dict(),
            "categories": [dataclasses.asdict(category) for category in self.categories],
            "unlimited_step_s": self.step_s,
            "frontier": [
                {"budget_bytes": budget, "state_placement": one.state_placement.as_dict()}
                | _summary(one.solution.timeline)
                for budget, one in self.frontier
            ],
            "refusal": self.refusal,
            "predicted": [
                {
                    "name": row.name,
                    "fits": row.fits,
                    "over_bytes": dict(row.over),
                    "largest_batch": row.largest_batch,
                    "longest_sequence": row.longest_sequence,
                }
                | _summary(row.timeline)
                for row in self.rows
            ],
        }


def _summary(timeline: Timeline | None) -> dict[str, Any]:
    names = ("peak_bytes", "step_s", "store_stall_s", "load_stall_s", "recompute_s", "moved_bytes", "peak_unit")
    return {name: None if timeline is None else getattr(timeline, name) for name in names}


def make_forecast(
    workload: Workload, hardware: Hardware, *, budget_bytes: int | None = None, may_recompute: bool = True
) -> Forecast:
    """Count, plan, and compare. Raises :class:`~hf_offload.errors.OffloadPlanError` if the model cannot be counted."""
    if budget_bytes is None:
        budget_bytes = int(hardware.memory_bytes.value * BUDGET_SHARE)
    found = _forecast(workload, hardware, budget_bytes, may_recompute)
    if found.refusal is not None and workload.settings.tiled_mlp == "auto":  # as a run does, which tiles them only then
        with contextlib.suppress(OffloadConfigError):  # no module can be tiled
            return _forecast(workload.changed(tiled_mlp="on"), hardware, budget_bytes, may_recompute)
    return found


def _forecast(workload: Workload, hardware: Hardware, budget_bytes: int, may_recompute: bool) -> Forecast:
    limit = workload.longest
    sharding, hardware = sharding_of(workload, hardware), hardware.shared_by(hardware.gpus)

    def on_one(footprint: Footprint) -> Footprint:
        return footprint if sharding is None else shard(footprint, sharding)

    counts = workload if sharding is None else as_it_computes(workload)
    counted = count_choices(counts, hardware)
    here = on_one(counted)
    snapshots = snapshots_held(workload.settings)
    snapshots_bytes = snapshot_bytes(here, StatePlacement(), snapshots, workload.memory_mode in OF_ADAPTERS)
    missing = snapshots_bytes - _ram_bytes(hardware, budget_bytes)
    hardware = hardware.without("ram", snapshots_bytes)
    other = _of_another_length(counts, hardware, limit)
    family = Family(workload.batch, workload.sequence, counted, () if other is None else (other,))

    def problem_for(footprint: Footprint) -> Problem:
        return make_problem(footprint, hardware, budget_bytes, may_recompute=may_recompute)

    in_memory = problem = problem_for(here)
    allowed = dataclasses.replace(_allowed(workload, hardware), may_recompute=may_recompute)
    state_placement, solution, refused = StatePlacement(), None, None
    short_of: Mapping[str, int] = {}
    used = _used_by_a_run(workload, hardware)
    choice = choose(here, used, budget_bytes, allowed)
    if choice is None:
        least, error = refuse(here, used, budget_bytes, allowed)
        state_placement, problem, refused = least.state_placement, least.problem, str(error)
        short_of = least.problem.over(least.solution)
    else:
        state_placement, problem, solution = choice.state_placement, choice.problem, choice.solution
    if missing > 0:
        solution, short_of = None, {"ram": missing}
        refused = (
            f"Snapshots need {format_bytes(snapshots_bytes)} of RAM, {format_bytes(missing)} more than there are. "
            f"Drop snapshot_steps{', or snapshot_dir: then two are held instead of three' if snapshots > 2 else ''}."
        )

    # All ways are asked for the same shapes, up to where each of them ends.
    at = functools.cache(lambda rows, tokens: on_one(family.at(rows, tokens)))

    @functools.cache
    def problem_at(rows: int, tokens: int, is_reduced: bool) -> Problem | None:
        footprint = at(rows, tokens).reduced if is_reduced else at(rows, tokens)
        return None if footprint is None else problem_for(footprint)

    def reach(fits: Callable[[int, int], bool]) -> tuple[int, int | None]:
        rows = largest(lambda rows: fits(rows, workload.sequence), workload.batch, _MOST_ROWS)
        if not family.knows_lengths:
            return rows, None
        tokens = largest(lambda tokens: fits(workload.batch, tokens), 256, limit or _MOST_TOKENS)
        return rows, tokens

    rows = []
    ways = [(in_memory, one) for one in simple_ways(in_memory)]
    if here.reduced is not None:
        reduced = problem_for(here.reduced)
        ways += [(reduced, one) for one in simple_ways(reduced)]
    for way, alternative in [*ways, (problem, Alternative("auto", None, solution, solution is not None))]:
        placement = alternative.placement

        def fits(batch: int, tokens: int, placement: Placement | None = placement, way: Problem = way) -> bool:
            if placement is None:
                return can_hold(at(batch, tokens), used, budget_bytes, allowed)
            problem = problem_at(batch, tokens, way.footprint.is_reduced)
            found = None if problem is None else uniform(problem, placement)
            return problem is not None and found is not None and problem.fits(found)

        timeline = None if alternative.solution is None else alternative.solution.timeline
        if placement is None:
            timeline = None if solution is None else solution.timeline
        over = short_of if placement is None or alternative.solution is None else way.over(alternative.solution)
        rows.append(Row(alternative.name, alternative.fits, timeline, *reach(fits), over))
    return Forecast(
        workload=workload,
        hardware=hardware,
        problem=problem,
        solution=solution,
        refusal=refused,
        lines=[] if solution is None else unit_lines(problem, solution),
        rows=rows,
        sequence_limit=limit,
        state_placement=state_placement,
        counted=here,
        step_s=here.step_s,
        snapshots_bytes=snapshots_bytes,
    )


def _allowed(workload: Workload, hardware: Hardware) -> Allowed:
    """What may leave memory. Where several GPUs reduce gradients, these stay; what is in shards stays with its engine."""
    allowed = workload.allowed
    if hardware.gpus == 1:
        return allowed
    if workload.sharding == DDP:
        return dataclasses.replace(allowed, weights="none", in_backward=False, keeps_gradients=True)
    return dataclasses.replace(allowed, state="none", weights="none", in_backward=False, is_sharded=True)


def _used_by_a_run(workload: Workload, hardware: Hardware) -> Hardware:
    """What ``auto`` uses of a machine: the drive of an accelerator only if it is named."""
    named = hardware.drive_is_named or workload.names_drive or "ssd" in (workload.state_place, workload.weights_place)
    return hardware if named else hardware.without_drive()


def _ram_bytes(hardware: Hardware, budget_bytes: int) -> int:
    """What a run leaves of RAM, or may put there."""
    if hardware.device == "cpu":
        return int(hardware.memory_bytes.value) - budget_bytes
    return hardware.room.get("ram", 0)


def _of_another_length(workload: Workload, hardware: Hardware, limit: int | None) -> tuple[int, Footprint] | None:
    """A second length to compare with: twice the first, or half of it where the model takes no more."""
    if not workload.length_unit:
        return None
    sequence = workload.sequence * 2
    if limit is not None and sequence > limit:
        sequence = workload.sequence // 2
    if sequence == 0:
        return None
    # The same tensors are to be moved at both lengths, so what counts as small grows along.
    small = workload.settings.smallest_bytes(hardware.device == "cpu") * sequence // workload.sequence
    return sequence, count_choices(workload.changed(sequence=sequence, min_bytes=small), hardware)
