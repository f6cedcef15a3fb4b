"""``hf-offload plan``: a plan, or a table that compares memory modes."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_offload.cli.console import clear_errors, loading_torch, note, print_table, spinner, write, write_json
from hf_offload.cli.options import Given, Json, OptionGroup, Overrides, fields_of, with_options
from hf_offload.cli.plan_tables import modes_table, plan_tables
from hf_offload.errors import EXIT_REFUSED, OffloadConfigError
from hf_offload.forecast.options import PLANNED, WorkloadOptions
from hf_offload.plan.hardware import describe_hardware
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

MODEL = OptionGroup(WorkloadOptions, fields_of(WorkloadOptions), "Model and batch")
SETTINGS = OptionGroup(OffloadConfig, PLANNED, "Settings of the run")
_HERE = "Machine (default: this one)"
MACHINE = OptionGroup(Machine, fields_of(Machine), _HERE)


@with_options(model=MODEL, settings=SETTINGS, machine=MACHINE)
def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A short name (llama-8b), a recipe, a folder with a config.json, or the name of a model on the hub.",
        ),
    ],
    model: Given,
    settings: Given,
    machine: Given,
    overrides: Overrides = None,
    directory: Annotated[
        list[Path] | None,
        typer.Option("--directory", "-d", metavar="PATH", help="Where files would go here.", rich_help_panel=_HERE),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine again.", rich_help_panel=_HERE)
    ] = False,
    recompute: Annotated[bool, typer.Option(help="Whether blocks may be recomputed in backward.")] = True,
    modes: Annotated[
        bool, typer.Option("--modes", help="Compare memory modes instead: all, or those named by --memory-mode.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the planned step, as PNG.")] = None,
    json: Json = False,
) -> None:
    """Plan a run without its hardware and weights: what stays, moves or is recomputed, and what that costs.

    With --modes, --memory-mode takes several names, with commas between.
    """
    with clear_errors():
        asked: dict[str, Any] = {}
        described: dict[str, Any] = {}
        changed, hardware = {}, []
        names, of_modes = model.get("memory_mode"), model.get("memory_mode_kwargs")
        if modes:
            model = {field: value for field, value in model.items() if "mode" not in field}
        with collect_errors("options") as check:
            with check:
                if modes and plot is not None:
                    raise OffloadConfigError("--plot draws a plan, and --modes makes none: leave one of them out.")
            with check:
                if Path(source).suffix in (".yaml", ".yml") or resolve_shape(source) in recipe_names():
                    read_recipe(resolve_shape(source), overrides or ())
            with check:
                asked = MODEL.read(model)
            with check:
                changed = SETTINGS.read(settings)
            with check:
                described = MACHINE.read(machine)
                hardware = [describe_hardware(**described, needs_times=not modes)] if described else []
            with check:
                if "sharding" in asked and described.get("gpus", 1) == 1:
                    raise OffloadConfigError("--sharding says how several GPUs share a model: add --gpus.")
                if modes and described.get("gpus", 1) > 1:
                    raise OffloadConfigError("--modes compares on one GPU: leave out --gpus.")
            with check:
                if hardware and (directory or measure):
                    raise OffloadConfigError("--directory and --measure are for this machine: leave out --gpu.")
                check_directories([OffloadConfig(directory=directory)] if directory else [])
            with check:
                if plot is not None:
                    check_output_file(plot, "--plot", ".png")
        with loading_torch():
            from transformers.utils import logging as transformers_log

            from hf_offload.forecast.workload_sources import find_workload
            from hf_offload.planning.hardware import measure_hardware
            from hf_offload.reports.plots import require_matplotlib

        if plot is not None:
            require_matplotlib()
        transformers_log.set_verbosity_error()  # its remarks on configurations are not about the plan
        with spinner("Reading the configuration"):
            workload = find_workload(source, overrides or [], settings=changed, **asked)
        if not hardware:
            with spinner("Measuring the machine"):
                found = measure_hardware(directory or [Path.cwd()], fresh=measure)
                named = bool(directory) or found.device == "cpu"  # where there is no other tier
                hardware = [dataclasses.replace(found, drive_is_named=named)]
        if modes:
            _compare_modes(workload, hardware[0], names, of_modes, json)
        else:
            _plan(workload, hardware[0], recompute, plot, json)


def _plan(workload: "Workload", hardware: "Hardware", recompute: bool, plot: Path | None, json: bool) -> None:
    from hf_offload.forecast.forecast import make_forecast
    from hf_offload.reports.plan_plot import plot_plan

    with spinner("Counting a step, then planning"):
        forecast = make_forecast(workload, hardware, budget_bytes=workload.budget_bytes, may_recompute=recompute)
    if plot is not None:
        with spinner(f"Drawing {plot}"):
            plot_plan(forecast, plot)
    if json:
        write_json(forecast.as_dict())
    else:
        for part in plan_tables(forecast):
            if isinstance(part, str):
                write(part, wrap=True)
            else:
                print_table(part)
    if forecast.refusal is not None:
        if not json:
            note(forecast.refusal, "bold red")
        raise typer.Exit(EXIT_REFUSED)


def _compare_modes(
    workload: "Workload", hardware: "Hardware", names: str | None, settings: str | None, json: bool
) -> None:
    from hf_offload.forecast.compare_modes import compare_modes

    with spinner("Counting") as show:
        found = compare_modes(
            workload,
            hardware,
            None if names is None else [name.strip() for name in names.split(",")],
            settings=settings,
            budget_bytes=workload.budget_bytes,
            on_mode=lambda name: show(f"Counting: {name}"),
        )
    if json:
        content = {"model": workload.name, "batch": workload.batch, "sequence": workload.sequence}
        write_json(content | dataclasses.asdict(found))
        return
    print_table(modes_table(workload, hardware, found))
    for mode, reason in found.refused.items():
        note(f"{mode}: {reason}")
