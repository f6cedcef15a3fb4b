"""What ``hf-offload bench steps`` and ``limits`` have in common: options, and how results are shown."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hf_offload.cli.console import output
from hf_offload.errors import OffloadConfigError
from hf_offload.settings.environment import ALLOCATORS
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.models import measured_recipe
from hf_offload.settings.recipes import Recipe, read_recipe
from hf_offload.settings.sizes import format_bytes
from hf_offload.training.places import check_directories

if TYPE_CHECKING:
    from hf_offload.bench.steps import Plan

# Written out, since asking for them loads torch and transformers.
STRATEGIES = (
    "baseline, recompute, recompute+offload, save_on_cpu, trl, trl+recompute, ours:ram, ours:ssd, ours:spill, ours:auto, "
    "ours:ssd+tiled, ours:elementwise, ours:ssd+elementwise, ours:sampled, ours:ssd+sampled, ours+recompute"
)
FASTEST = "fastest"
Shapes = Annotated[
    str,
    typer.Argument(
        metavar="MODELS",
        help="Models by their short names (gpt2-small, qwen3-0.6b), recipes (gpt/demo) or recipes' files, separated by "
        "commas.",
    ),
]
Strategies = Annotated[str, typer.Option(help=f"Some of {STRATEGIES}, separated by commas; or all.")]
MemoryLimit = Annotated[
    str | None,
    typer.Option(help="CUDA: how much of the device's memory PyTorch may use, such as 24GiB, as on a smaller GPU."),
]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV and nothing else.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and list what would run, without running it.")
]


def print_written(written: list[Path], json: bool, csv: bool, show: Callable[[], None]) -> None:
    """Print the file that was asked for as it was written; otherwise show the tables and name the files."""
    if json or csv:
        wanted = next(path for path in written if path.suffix == (".json" if json else ".csv"))
        typer.echo(wanted.read_text(encoding="utf-8"), nl=False)
        return
    show()
    for path in written:
        output().print(f"wrote {path}", highlight=False, soft_wrap=True)


def check_recipes(
    shapes: str, overrides: Sequence[str] | None, steps: int | None = None, allocator: str = FASTEST
) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for wrong settings, before torch is imported."""
    changes = [*(overrides or []), *([] if steps is None else [f"training.max_steps={steps}"])]
    with collect_errors("benchmark") as check:
        with check:
            choose("allocator", allocator, (FASTEST, *ALLOCATORS))
        recipes: list[Recipe] = []
        for shape in (part.strip() for part in shapes.split(",")):
            with check:
                recipe, own = measured_recipe(shape)
                recipes.append(read_recipe(recipe, [*own, *changes]))
        with check:
            check_directories(recipe.offload for recipe in recipes)


def bench_table(title: str) -> Table:
    """A table without lines between rows, as wide as it needs to be."""
    return Table(title=escape(title), box=SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left")


def list_plan(plan: "Plan", search: str | None = None) -> None:
    """Print what would run; ``search`` says what is searched for, if something is."""
    lines = [
        f"{case.label}, {strategy.name}, {'/'.join(plan.allocators(strategy))}"
        f"{'' if strategy.is_installed else f' ({strategy.package} is not installed)'}"
        for case in plan.cases
        for strategy in plan.strategies
    ]
    limit = "" if plan.memory_limit_bytes is None else f", memory limit {format_bytes(plan.memory_limit_bytes)}"
    count = (
        f"{plan.cell_count} runs at most, {plan.rounds} rounds"
        if search is None
        else f"{len(lines)} searches, {search}"
    )
    typer.echo("\n".join([*lines, f"{count}{limit}, into {plan.output}"]))


def check_format(json: bool, csv: bool) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` if both are asked for."""
    if json and csv:
        raise OffloadConfigError("--json and --csv each print nothing else: pass one of them.")


def whole_numbers(option: str, text: str | None) -> Sequence[int]:
    """``"4,8"`` as numbers; none for ``None``. Raises :class:`~hf_offload.errors.OffloadConfigError`."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise OffloadConfigError(f"{option} {text!r}: give whole numbers from 1 on, separated by commas, such as 4,8.")
    return [int(part) for part in parts]
