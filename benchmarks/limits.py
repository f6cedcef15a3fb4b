"""What fits: the longest sequence or the largest batch of each strategy under a memory limit, found by bisection.

Each probe is a training run of two steps in a process of its own: the first makes the optimizer's state, the second has
to live with it.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from benchmarks.console import show_table
from hf_offload.bench.cell import DONE, OUT_OF_MEMORY, CellSpec, require_memory_limit, run_cell
from hf_offload.bench.results import Case, file_name
from hf_offload.bench.steps import Plan, plan_steps
from hf_offload.bench.strategies import Strategy, parse_strategies
from hf_offload.cli.bench import Batch, DryRun, Length, Shape, Strategies, check_recipe, list_plan
from hf_offload.cli.console import clear_errors, progress_bar, visible_log, write, write_json
from hf_offload.cli.options import Json, Overrides
from hf_offload.errors import EXIT_INTERRUPTED, OffloadConfigError
from hf_offload.reports.formats import json_text, markdown_table, write_texts
from hf_offload.settings.load import choose
from hf_offload.settings.outputs import check_output_folder
from hf_offload.settings.sizes import format_bytes, parse_bytes

VARIED = {"sequence": 128, "batch": 1}
"""What can be varied, and what the answer is a multiple of."""
PRECISION = 8
"""The search ends when what may still be gained is less than this fraction of what fits."""
PROBE_STEPS = 2

LIMIT_COLUMNS = ("strategy", "fits", "fails", "probes", "ended")


def largest_that_fits(fits: Callable[[int], bool], *, start: int, multiple: int, most: int) -> tuple[int, int | None]:
    """The largest multiple of ``multiple`` up to ``most`` found to fit, zero if none does, and the smallest found not to.

    Doubles from ``start`` on until something does not fit, then halves the interval until it is an eighth of what fits,
    or one ``multiple``. ``fits`` is asked once for each value.
    """
    low, high = 0, None
    value = min(max(start // multiple, 1), most // multiple) * multiple
    while value and high is None:
        if fits(value):
            low = value
            value = min(2 * value, most // multiple * multiple)
            if value == low:
                return low, None
        else:
            high = value
    while high is not None and high - low > max(multiple, low // PRECISION):
        middle = (low + high) // 2 // multiple * multiple
        if middle <= low:
            middle = low + multiple
        if fits(middle):
            low = middle
        else:
            high = middle
    return low, high


@dataclasses.dataclass(kw_only=True)
class Limit:
    """What one strategy can train."""

    shape: str
    strategy: str
    vary: str
    memory_limit_bytes: int
    fits: int = 0
    """Zero when nothing that was tried fits."""
    fails: int | None = None
    """The smallest that was tried and ran out of memory; ``None`` when nothing did."""
    probes: int = 0
    error: str | None = None
    """Why the search ended before its end."""
    batch: int | None = None
    sequence: int | None = None
    """The one that is not varied."""
    model: str | None = None
    """``None`` when none was ever built."""
    source: str = ""

    def texts(self) -> list[str]:
        """The row as the texts of :data:`LIMIT_COLUMNS`."""
        ended = self.error or ("the most that was asked for fits" if self.fails is None else "out of memory")
        return [self.strategy, str(self.fits or "-"), str(self.fails or "-"), str(self.probes), ended]


class _Ended(Exception):
    """A probe ended in a way that says nothing about memory."""


def check_limits(vary: str, most: int) -> None:
    """Raise :class:`OffloadConfigError` for a search that makes no sense."""
    choose("vary", vary, VARIED)
    if most < VARIED[vary]:
        raise OffloadConfigError(f"--most {most}: give {VARIED[vary]} or more.")


def find_limits(
    plan: Plan,
    memory_limit_bytes: int,
    vary: str,
    most: int,
    on_probe: Callable[[str], None] = lambda what: None,
    on_limit: Callable[[Limit], None] = lambda limit: None,
) -> tuple[list[Limit], bool]:
    """Search for every strategy of ``plan``, whose batch and sequence are where it begins.

    Returns what was found and whether Ctrl-C ended it. ``on_probe`` is called before each probe.
    """
    limits: list[Limit] = []
    for strategy in plan.strategies:
        try:
            limits.append(_find(plan, memory_limit_bytes, plan.case, strategy, vary, most, on_probe))
        except KeyboardInterrupt:
            return limits, True
        on_limit(limits[-1])
    return limits, False


def _find(
    plan: Plan,
    memory_limit_bytes: int,
    case: Case,
    strategy: Strategy,
    vary: str,
    most: int,
    on_probe: Callable[[str], None],
) -> Limit:
    limit = Limit(
        shape=case.shape,
        strategy=strategy.name,
        vary=vary,
        memory_limit_bytes=memory_limit_bytes,
        batch=None if vary == "batch" else case.batch,
        sequence=None if vary == "sequence" else case.sequence,
        source=strategy.source,
    )

    def fits(value: int) -> bool:
        probed = (
            dataclasses.replace(case, batch=value) if vary == "batch" else dataclasses.replace(case, sequence=value)
        )
        on_probe(f"{probed.label}, {strategy.name}")
        limit.probes += 1
        spec = CellSpec(
            recipe=case.recipe,
            overrides=(*plan.overrides_for(probed), f"training.max_steps={PROBE_STEPS}"),
            strategy=strategy.name,
            base=str(plan.output / "probes" / file_name(f"{probed.file_name}_{strategy.name}")),
            measure=False,
            memory_limit_bytes=memory_limit_bytes,
        )
        result = run_cell(spec, plan.environment)
        limit.model = result.model or limit.model
        if result.outcome not in (DONE, OUT_OF_MEMORY):
            raise _Ended(f"{result.outcome}: {result.error}")
        # What is known already, should a later probe end the search.
        if result.outcome == DONE:
            limit.fits = max(limit.fits, value)
        else:
            limit.fails = value if limit.fails is None else min(limit.fails, value)
        return result.outcome == DONE

    try:
        largest_that_fits(fits, start=getattr(case, vary), multiple=VARIED[vary], most=most)
    except _Ended as error:
        limit.error = str(error)
    return limit


# --------------------------------------------------------------------------------------------------------------- tables


def limits_dict(limits: list[Limit], plan: Plan, interrupted: bool) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "overrides": list(plan.overrides),
        "memory_limit_bytes": limits[0].memory_limit_bytes,
        "probe_steps": PROBE_STEPS,
        "precision": f"1/{PRECISION}, or one multiple of what is varied",
        "interrupted": interrupted,
        "rows": [dataclasses.asdict(limit) for limit in limits],
    }


def limits_title(limits: list[Limit]) -> str:
    """What was searched for, and in what."""
    limit, model = limits[0], next((each.model for each in limits if each.model), None)
    what = "longest sequence" if limit.vary == "sequence" else "largest batch"
    fixed = f"batch {limit.batch}" if limit.vary == "sequence" else f"sequence {limit.sequence}"
    return f"{limit.shape}, {what} in {format_bytes(limit.memory_limit_bytes)}, {fixed}{f': {model}' if model else ''}"


def write_limits(limits: list[Limit], plan: Plan, interrupted: bool) -> list[Path]:
    """Write ``limits.md`` and ``limits.json`` into the plan's output folder; returns their paths."""
    lines = [f"# {limits_title(limits)}", "", markdown_table(LIMIT_COLUMNS, [limit.texts() for limit in limits]), ""]
    if interrupted:
        lines += ["**Interrupted: only the searches that finished are shown.**", ""]
    contents = {
        "limits.md": "\n".join(lines),
        "limits.json": json_text(limits_dict(limits, plan, interrupted)),
    }
    return write_texts(plan.output, contents)


# -------------------------------------------------------------------------------------------------------------- command


def limits(
    shape: Shape,
    overrides: Overrides = None,
    strategies: Strategies = "baseline,recompute,ours:ram",
    vary: Annotated[str, typer.Option(help="What to make larger: sequence or batch.")] = "sequence",
    most: Annotated[int, typer.Option(min=1, help="Where to stop: nothing larger is tried.")] = 131072,
    batch: Batch = None,
    sequence: Length = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(help="How much of the device's memory PyTorch may use, such as 24GiB, as on a smaller GPU."),
    ] = None,
    output_dir: Annotated[
        Path, typer.Option("--output", help="Folder for the tables and every probe's result.")
    ] = Path("runs/limits"),
    json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Find the longest sequence or the largest batch that each way can train in a given device memory (CUDA)."""
    with clear_errors(), visible_log():
        check_recipe(shape, overrides)
        check_output_folder(output_dir, "--output", "limits.md", "limits.json")
        check_limits(vary, most)
        if memory_limit is None:
            raise OffloadConfigError("What fits depends on the card: give --memory-limit, such as 24GiB.")
        limit_bytes = parse_bytes(memory_limit, "--memory-limit")
        plan = plan_steps(
            shape,
            overrides or [],
            parse_strategies(strategies, reference=False),
            batch=batch,
            sequence=sequence,
            output=output_dir,
        )
        if dry_run:
            list_plan(
                plan, f"{len(plan.strategies)} searches, {vary} up to {most}, memory limit {format_bytes(limit_bytes)}"
            )
            return
        require_memory_limit()  # before anything is shown
        with progress_bar(counted=False) as progress:
            task = progress.add_task("starting", total=None)
            found, interrupted = find_limits(
                plan, limit_bytes, vary, most, lambda what: progress.update(task, description=f"probing {escape(what)}")
            )
        if not found:
            raise KeyboardInterrupt
        written = write_limits(found, plan, interrupted)
    if json:
        write_json(limits_dict(found, plan, interrupted))
    else:
        rows = [limit.texts() for limit in found]
        show_table(LIMIT_COLUMNS, rows, left=("strategy", "ended"), title=limits_title(found))
        for path in written:
            write(f"wrote {path}")
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
