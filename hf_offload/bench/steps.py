"""One model in several ways, each a training run of its own.

The strategies take turns (A B C A B C), so that a machine that slows down slows all of them.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hf_offload.allocator import environment_with
from hf_offload.bench.cell import CRASHED, NOT_INSTALLED, OUT_OF_MEMORY, CellSpec, run_cell
from hf_offload.bench.results import Case, Cell, Results, file_name
from hf_offload.bench.strategies import Strategy
from hf_offload.errors import OffloadConfigError
from hf_offload.reports.formats import REFERENCE
from hf_offload.settings.environment import ALLOCATORS
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.models import measured_recipe
from hf_offload.settings.recipe_files import is_recipe_file
from hf_offload.settings.recipes import load_recipe, text_override
from hf_offload.training.report import TRAINER_BATCH

logger = logging.getLogger(__name__)

OnStart = Callable[[str, int, int], None]
OnDone = Callable[[Cell], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is going to run; checked, nothing has run yet."""

    case: Case
    strategies: tuple[Strategy, ...]
    overrides: tuple[str, ...]
    rounds: int
    output: Path
    allocator: str

    def overrides_for(self, case: Case) -> tuple[str, ...]:
        """Changes to the recipe that all strategies share, at the batch size and sequence length of ``case``."""
        return (
            *case.overrides,
            *self.overrides,
            f"training.per_device_train_batch_size={case.batch}",
            f"data.sequence_length={case.sequence}",
            text_override("training.output_dir", str(self.output / "work")),
            text_override("data.cache_dir", str(self.output / "data")),
        )

    @property
    def environment(self) -> dict[str, str]:
        """That of each run: the same allocator for all. With an accelerator, activations are not on the CPU."""
        if self.allocator == "auto" and torch.accelerator.is_available():
            return dict(os.environ)
        return environment_with(self.allocator)

    @property
    def cell_count(self) -> int:
        """Most runs there can be; a strategy that fails is not tried again."""
        return self.rounds * len(self.strategies)


def plan_steps(
    shape: str,
    overrides: Sequence[str],
    strategies: Sequence[Strategy],
    *,
    batch: int | None = None,
    sequence: int | None = None,
    steps: int | None = None,
    rounds: int = 1,
    output: Path = Path("runs/bench"),
    allocator: str = "auto",
) -> Plan:
    """Check everything that can be checked without running; raises :class:`OffloadConfigError` with all errors."""
    overrides = (*overrides, *([f"training.max_steps={steps}"] if steps is not None else []))
    with collect_errors("benchmark") as check:
        with check:
            choose("allocator", allocator, ALLOCATORS)
            environment_with(allocator)
        with check:
            if rounds < 1:
                raise OffloadConfigError(f"rounds={rounds}: give one or more.")
        plan = Plan(
            case=_case(shape, overrides, batch, sequence),
            strategies=tuple(strategies),
            overrides=overrides,
            rounds=rounds,
            output=output.resolve(),
            allocator=allocator,
        )
        for strategy in plan.strategies:
            with check:
                strategy.load(plan.case.recipe, plan.overrides_for(plan.case))
    return plan


def _case(shape: str, overrides: Sequence[str], batch: int | None, sequence: int | None) -> Case:
    recipe, own = measured_recipe(shape)
    loaded = load_recipe(recipe, (*own, *overrides))
    if loaded.model.dtype != "float32" and not torch.accelerator.is_available():
        logger.warning(
            f"{shape} computes in {loaded.model.dtype}, which is meant for accelerators: a CPU is slow in it."
        )
    name = Path(shape).stem if is_recipe_file(shape) else shape
    own_batch = int(loaded.training.get("per_device_train_batch_size") or TRAINER_BATCH)
    return Case(name, recipe, batch or own_batch, sequence or loaded.data.sequence_length, own)


def run_steps(
    plan: Plan,
    on_start: OnStart = lambda name, done, total: None,
    on_done: OnDone = lambda cell: None,
) -> Results:
    """Run the plan. ``on_start`` is called before each cell with its name, how many are done and how many there are.

    Ctrl-C ends the running cell and keeps those that finished.
    """
    results = Results(plan.case, plan.overrides, plan.allocator, plan.rounds)
    try:
        _Run(plan, results, on_start, on_done).run()
    except KeyboardInterrupt:
        results.interrupted = True
    return results


class _Run:
    def __init__(self, plan: Plan, results: Results, on_start: OnStart, on_done: OnDone):
        self._plan, self._results, self._on_start, self._on_done = plan, results, on_start, on_done
        self._total = plan.cell_count

    def run(self) -> None:
        latest: dict[str, Cell] = {}
        for number in range(1, self._plan.rounds + 1):
            for strategy in self._plan.strategies:
                if strategy.name in latest and self._hopeless(latest[strategy.name]):
                    self._total -= 1
                else:
                    latest[strategy.name] = self._cell(strategy, number)
        self._control(latest[REFERENCE].strategy)

    def _control(self, strategy: Strategy) -> None:
        """Run the baseline once more where bits differ on an accelerator: it may not be deterministic either."""
        baseline = list(self._results.reports(REFERENCE).values())
        if len(baseline) == 1 and baseline[0].machine["device"] != "cpu" and self._results.mismatches():
            self._total += 1
            self._cell(strategy, self._plan.rounds, is_control=True)

    def _cell(self, strategy: Strategy, number: int, is_control: bool = False) -> Cell:
        case = self._plan.case
        name = file_name(f"{number}_{strategy.name}_{'control' if is_control else self._plan.allocator}")
        spec = CellSpec(
            recipe=case.recipe,
            overrides=self._plan.overrides_for(case),
            strategy=strategy.name,
            base=str(self._plan.output / "cells" / case.file_name / name),
        )
        what = f"{case.label}, {strategy.name}{' again' if is_control else ''}, round {number}"
        self._on_start(what, len(self._results.cells), self._total)
        cell = Cell(strategy, number, run_cell(spec, self._plan.environment), is_control)
        self._results.cells.append(cell)
        self._on_done(cell)
        return cell

    @staticmethod
    def _hopeless(cell: Cell) -> bool:
        """Whether running it again would only fail again; of our own crashes, every one is of interest."""
        outcome = cell.result.outcome
        return outcome in (NOT_INSTALLED, OUT_OF_MEMORY) or (outcome == CRASHED and not cell.strategy.is_ours)
