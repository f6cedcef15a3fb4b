"""``hf-offload plan``: a plan, and the tables that compare what else could be done."""

import dataclasses
import json as json_format
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from hf_offload.cli.console import clear_errors, loading_torch, messages, output, print_table, spinner
from hf_offload.cli.options import Given, Json, OptionGroup, Overrides, fields_of, with_options
from hf_offload.cli.plan_tables import levers_table, modes_table, orders_table, plan_tables
from hf_offload.errors import EXIT_REFUSED, OffloadConfigError
from hf_offload.forecast.options import PLANNED, WorkloadOptions
from hf_offload.plan.hardware import describe_hardware
from hf_offload.reports.charts import require_report_libraries
from hf_offload.settings.load import collect_errors
from hf_offload.settings.outputs import check_output_file
from hf_offload.settings.recipe_files import recipe_names, resolve_shape
from hf_offload.settings.recipe_meta import Machine
from hf_offload.settings.recipes import read_recipe
from hf_offload.settings.schema import OffloadConfig
from hf_offload.training.places import check_directories

if TYPE_CHECKING:
    from hf_offload.forecast.workload import Workload
    from hf_offload.plan.hardware import Hardware

DEFAULT = "run"

MODEL = OptionGroup(WorkloadOptions, fields_of(WorkloadOptions), "Model and batch")
SETTINGS = OptionGroup(OffloadConfig, PLANNED, "Settings of the run")
MACHINE = OptionGroup(Machine, fields_of(Machine), "Machine (default: this one)")

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model by its short name (llama-8b, qwen3-8b, mistral-7b, phi-4, ...), a recipe, a folder with a "
        "config.json, or the name of a model on the hub.",
    ),
]
Directories = Annotated[
    list[Path] | None,
    typer.Option(
        "--directory", "-d", metavar="PATH", help="Where files would go on this machine.",
        rich_help_panel="Machine (default: this one)",
    ),
]  # fmt: skip
Measure = Annotated[
    bool,
    typer.Option("--measure", help="Measure this machine again.", rich_help_panel="Machine (default: this one)"),
]


class PlanGroup(TyperGroup):
    """``plan MODEL`` is short for ``plan run MODEL``."""

    def complete(self, words: list[str]) -> list[str]:
        """``words`` with the name of a command in front."""
        if not words or words[0] in (*self.commands, "--help"):
            return words
        return [DEFAULT, *words]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As every group does, once :meth:`complete` has looked at them."""
        return super().parse_args(ctx, self.complete(args))


plan = typer.Typer(
    cls=PlanGroup,
    help="Plan a run without its hardware and weights: what stays in memory, what is moved or recomputed, and what that "
    "costs. `hf-offload plan MODEL` is short for `hf-offload plan run MODEL`.",
    no_args_is_help=True,
    subcommand_metavar="MODEL ... | COMMAND ...",
)


@plan.command(DEFAULT)
@with_options(model=MODEL, settings=SETTINGS, machine=MACHINE)
def run(
    source: Source,
    model: Given,
    settings: Given,
    machine: Given,
    overrides: Overrides = None,
    directory: Directories = None,
    measure: Measure = False,
    recompute: Annotated[bool, typer.Option(help="Whether blocks may be recomputed in backward.")] = True,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the step time over the budget, as PNG.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the memory of the planned step, as PNG.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all of it as one page for a browser, with both plots.")
    ] = None,
    json: Json = False,
) -> None:
    """Plan where each part of the model keeps its activations, and show what that costs."""
    with clear_errors():
        if html is not None:
            require_report_libraries()
        files = {"--plot": plot, "--timeline": timeline, "--html": html}
        workload, (hardware,) = _read(source, overrides, model, settings, machine, directory, measure, files)
        from hf_offload.forecast.forecast import make_forecast
        from hf_offload.reports.plan_page import write_plan_page
        from hf_offload.reports.plan_plots import plot_frontier, plot_timeline

        with spinner("Counting a step, then planning"):
            forecast = make_forecast(workload, hardware, budget_bytes=workload.budget_bytes, may_recompute=recompute)
        for draw, path in ((plot_frontier, plot), (plot_timeline, timeline)):
            if path is not None:
                with spinner(f"Drawing {path}"):
                    draw(forecast, path)
        if html is not None:
            with spinner(f"Writing {html}"):
                write_plan_page(html, forecast, list(plan_tables(forecast)))
    if json:
        typer.echo(json_format.dumps(forecast.as_dict(), indent=2))
    else:
        for part in plan_tables(forecast):
            if isinstance(part, str):
                output().print(part, highlight=False)
            else:
                print_table(part)
    if forecast.refusal is not None:
        if not json:
            messages().print(f"[bold red]{escape(forecast.refusal)}[/]", highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_REFUSED)


@plan.command()
@with_options(model=MODEL.without("memory_mode"), settings=SETTINGS, machine=MACHINE)
def modes(
    source: Source,
    model: Given,
    settings: Given,
    machine: Given,
    overrides: Overrides = None,
    memory_mode: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only these, separated by commas, such as none,lora.",
                     rich_help_panel="Model and batch"),
    ] = None,
    directory: Directories = None,
    measure: Measure = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Compare memory modes: what each needs, and the largest batch that fits."""
    with clear_errors():
        of_modes = model.get("memory_mode_kwargs")
        model = {field: value for field, value in model.items() if field != "memory_mode_kwargs"}
        workload, (hardware,) = _read(source, overrides, model, settings, machine, directory, measure)
        from hf_offload.forecast.compare_modes import compare_modes

        names = None if memory_mode is None else [name.strip() for name in memory_mode.split(",")]
        with spinner("Counting") as show:
            modes = compare_modes(
                workload,
                hardware,
                names,
                settings=of_modes,
                budget_bytes=workload.budget_bytes,
                on_mode=lambda name: show(f"Counting: {name}"),
            )
    if json:
        content = {"model": workload.name, "batch": workload.batch, "sequence": workload.sequence}
        typer.echo(json_format.dumps(content | dataclasses.asdict(modes), indent=2))
        return
    print_table(modes_table(workload, hardware, modes))
    for mode, reason in modes.refused.items():
        messages().print(escape(f"{mode}: {reason}"), highlight=False, soft_wrap=True)


@plan.command()
@with_options(
    model=MODEL.without("sequence"),
    settings=SETTINGS.without("memory_budget", "min_bytes", "tile_bytes"),
    machine=MACHINE.without("gpu", "memory_bandwidth"),
)
def levers(
    source: Source,
    model: Given,
    settings: Given,
    machine: Given,
    overrides: Overrides = None,
    gpus: Annotated[
        str,
        typer.Option(metavar="NAMES", help="GPUs, separated by commas.", rich_help_panel="Machine (default: this one)"),
    ] = "rtx4090,l40s,h100-80gb,h200",
    json: Json = False,
) -> None:
    """Show the longest row that fits each of several GPUs, with one measure on top of the other."""
    with clear_errors():
        names = [name.strip() for name in gpus.split(",")]
        workload, hardware = _read(source, overrides, model, settings, machine, gpus=names)
        from hf_offload.forecast.levers import pull_levers

        with spinner("Counting") as show:
            found = pull_levers(workload, hardware, lambda name: show(f"Counting: {name}"))
    if json:
        rows = [
            {"lever": one.lever, "tokens": dict(zip((m.name for m in hardware), one.tokens, strict=True))}
            for one in found
        ]
        typer.echo(json_format.dumps({"model": workload.name, "batch": workload.batch, "levers": rows}, indent=2))
    else:
        print_table(levers_table(workload, hardware, found))


@plan.command()
@with_options(model=MODEL, settings=SETTINGS.without("memory_budget", "min_bytes"), machine=MACHINE)
def order(
    source: Source,
    model: Given,
    settings: Given,
    machine: Given,
    overrides: Overrides = None,
    directory: Directories = None,
    measure: Measure = False,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the memory of all orders, as PNG.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare orders of a step's operations without offloading: the peak of each, and what no order can beat."""
    with clear_errors():
        pictures = {"--timeline": timeline}
        workload, (hardware,) = _read(source, overrides, model, settings, machine, directory, measure, pictures)
        from hf_offload.forecast.order import compare_orders
        from hf_offload.reports.plan_plots import plot_orders

        with spinner("Counting") as show:
            orders = compare_orders(workload, hardware, lambda name: show(f"Counting: {name}"))
        title = f"{workload.name}, {workload.shape}, no offloading"
        if timeline is not None:
            plot_orders(orders, title, timeline)
    if json:
        rows = [
            {"order": one.name, "bound_bytes": one.bound_bytes, "peak_bytes": one.timeline.peak_bytes,
             "peak_unit": one.timeline.peak_unit, "step_s": one.timeline.step_s}
            for one in orders
        ]  # fmt: skip
        typer.echo(json_format.dumps({"model": workload.name, "orders": rows}, indent=2))
    else:
        print_table(orders_table(title, orders))


def _read(
    source: str,
    overrides: list[str] | None,
    model: Given,
    settings: Given,
    machine: Given,
    directory: list[Path] | None = None,
    measure: bool = False,
    pictures: Mapping[str, Path | None] | None = None,
    gpus: Sequence[str] = (),
) -> "tuple[Workload, list[Hardware]]":
    """Check all options before anything slow is imported; then read the model's configuration and, unless a machine is
    described, measure this one.

    Raises :class:`~hf_offload.errors.OffloadConfigError` with all errors.
    """
    asked, changed, hardware = {}, {}, []
    with collect_errors("options") as check:
        with check:
            if Path(source).suffix in (".yaml", ".yml") or resolve_shape(source) in recipe_names():
                read_recipe(resolve_shape(source), overrides or ())
        with check:
            asked = MODEL.read(model)
        with check:
            changed = SETTINGS.read(settings)
        for each in [{**machine, "gpu": gpu} for gpu in gpus] or [dict(machine)]:
            with check:
                described = MACHINE.read(each)
                hardware += [describe_hardware(**described)] if described else []
        with check:
            if hardware and (directory or measure):
                raise OffloadConfigError("--directory and --measure are for this machine: leave out --gpu.")
            check_directories([OffloadConfig(directory=directory)] if directory else [])
        for option, path in (pictures or {}).items():
            with check:
                if path is not None:
                    check_output_file(path, option, ".html" if option == "--html" else ".png")
    with loading_torch():
        from transformers.utils import logging as transformers_log

        from hf_offload.forecast.workload_sources import find_workload
        from hf_offload.planning.hardware import measure_hardware
        from hf_offload.reports.plots import require_matplotlib

    if any((pictures or {}).values()):
        require_matplotlib()
    transformers_log.set_verbosity_error()  # its remarks on configurations are not about the plan
    with spinner("Reading the configuration"):
        workload = find_workload(source, overrides or [], settings=changed, **asked)
    if not hardware:
        with spinner("Measuring the machine"):
            found = measure_hardware(directory or [Path.cwd()], fresh=measure)
            named = bool(directory) or found.device == "cpu"  # where there is no other tier
            hardware = [dataclasses.replace(found, drive_is_named=named)]
    return workload, hardware
