"""``hf-offload plan``."""

import dataclasses
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hf_offload.cli.console import clear_errors, messages, output
from hf_offload.cli.exit_codes import EXIT_REFUSED
from hf_offload.cli.plan_checks import described_machines, refuse_silent_options
from hf_offload.cli.plan_modes import show_modes
from hf_offload.forecast.options import check_options
from hf_offload.settings.elementwise import recompute_elementwise as parse_recompute_elementwise
from hf_offload.settings.load import collect_errors
from hf_offload.settings.outputs import check_output_file
from hf_offload.settings.recipe_files import recipe_names, resolve_shape
from hf_offload.settings.recipes import read_recipe
from hf_offload.settings.sampling import sampled_linear as parse_sampled_linear
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.sizes import format_bytes, format_seconds, parse_bytes
from hf_offload.training.places import check_directories

if TYPE_CHECKING:
    from hf_offload.forecast.forecast import Forecast
    from hf_offload.forecast.workload import Workload
    from hf_offload.plan.hardware import Hardware


def plan(
    source: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A recipe, a folder with a config.json, or a model's name on the hub."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes of a recipe.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Rows of a micro-batch.")] = None,
    sequence: Annotated[
        int | None, typer.Option(help="Tokens of a row, or samples of its audio. Default: 2048 tokens, 10 seconds.")
    ] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels of a side. Default: the configuration's.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights: float32, bfloat16 or float16.")] = None,
    autocast: Annotated[
        str | None, typer.Option(help="Mixed precision: bf16, fp16 or no, as the Trainer's bf16 and fp16.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="As in the Trainer's optim, such as adamw_torch.")] = None,
    memory_mode: Annotated[
        str | None,
        typer.Option(help="As in the training arguments, such as lora or galore. Default: none, all weights."),
    ] = None,
    memory_mode_kwargs: Annotated[
        str | None, typer.Option(help="""Settings of the memory mode in JSON, such as '{"rank": 128}'.""")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="causal-lm, masked-lm, seq2seq-lm, sequence-classification, or a class such as ViTForImageClassification."
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Most memory, weights and all, such as 20GiB. Default: 90 % of the device's.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="A card such as rtx4090, or its memory, such as 24GB. Default: this machine.")
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="What the card reaches in 16-bit matrix multiplication.")] = None,
    memory_bandwidth: Annotated[str | None, typer.Option(help="Of the card, such as 900GB/s.")] = None,
    pcie: Annotated[str | None, typer.Option(help="Link of the card, such as 25GB/s.")] = None,
    ssd: Annotated[str | None, typer.Option(help="The drive, such as 5GB/s or 4GB/s,6GB/s (writing, reading).")] = None,
    ram: Annotated[str | None, typer.Option(help="RAM that activations may take, such as 64GB.")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk space that activations may take, such as 500GB.")] = None,
    directory: Annotated[
        list[Path] | None, typer.Option("--directory", "-d", help="Where activations would go on this machine.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    tiled_loss: Annotated[
        bool, typer.Option("--tiled-loss", help="Output head and loss a few tokens at a time.")
    ] = False,
    tiled_mlp: Annotated[bool, typer.Option("--tiled-mlp", help="MLPs a few tokens at a time.")] = False,
    sampled_linear: Annotated[
        str | None, typer.Option(help="Weight gradients from a part of the inputs: 0.3, or settings in JSON.")
    ] = None,
    lean: Annotated[
        str | None,
        typer.Option(help="What is made again instead of saved: activations, norms, dropout, exact, derivative-8bit."),
    ] = None,
    recompute: Annotated[bool, typer.Option(help="Whether blocks may be computed again in backward.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Picture of step time over budget.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Picture of the planned step, or with --order of all orders.")
    ] = None,
    levers: Annotated[
        bool,
        typer.Option("--levers", help="Instead: the longest row that fits each of --cards, one lever after the other."),
    ] = False,
    cards: Annotated[str, typer.Option(help="For --levers, with commas between.")] = "rtx4090,l40s,h100-80gb,h200",
    modes: Annotated[
        bool,
        typer.Option(
            "--modes",
            help="Instead: what each memory mode needs, or each that --memory-mode names, with commas between.",
        ),
    ] = False,
    order: Annotated[
        bool, typer.Option("--order", help="Instead: the peak of the step's order, and what no order can beat.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say what would be kept, moved or computed again, and what that costs, without the hardware and without weights."""
    with clear_errors():
        described = {"tflops": tflops, "memory_bandwidth": memory_bandwidth, "pcie": pcie, "ssd": ssd}
        described |= {"ram": ram, "disk": disk}
        pictures = {"--plot": plot, "--timeline": timeline}
        tables = {"--levers": levers, "--modes": modes, "--order": order}
        table = next((name for name, asked in tables.items() if asked), None)
        budget_bytes, sampled, lean_config, machines = None, None, None, []
        with collect_errors("options") as check:
            with check:
                if Path(source).suffix in (".yaml", ".yml") or resolve_shape(source) in recipe_names():
                    read_recipe(resolve_shape(source), overrides or ())
            with check:
                check_options(
                    batch=batch, sequence=sequence, image_size=image_size, dtype=dtype, autocast=autocast, task=task
                )
            with check:
                budget_bytes = None if budget is None else parse_bytes(budget, "budget")
            with check:
                sampled = parse_sampled_linear(sampled_linear)
            with check:
                lean_config = parse_recompute_elementwise(lean)
            with check:
                others = {"--budget": budget, "--gpu": gpu, "--directory": directory}
                refuse_silent_options(table, {**pictures, **others, **tables})
            with check:
                machines = described_machines(table, gpu, cards, described, directory, measure)
            with check:
                check_directories([OffloadConfig(directory=directory)] if directory else [])
            for option, path in pictures.items():
                with check:
                    if path is not None:
                        check_output_file(path, option)
        from transformers.utils import logging as transformers_log  # slow from here on: it loads torch

        from hf_offload.forecast.forecast import make_forecast
        from hf_offload.forecast.workload_sources import find_workload
        from hf_offload.planning.hardware import measure_hardware
        from hf_offload.reports.plots import require_matplotlib

        if plot or timeline:
            require_matplotlib()
        transformers_log.set_verbosity_error()  # what it says about configurations is not about the plan
        with messages().status("Reading the configuration"):
            workload = find_workload(
                source,
                overrides or [],
                batch=batch,
                sequence=sequence,
                dtype=dtype,
                autocast=autocast,
                image_size=image_size,
                task=task,
                optimizer=optimizer,
                memory_mode=None if modes else memory_mode,
                memory_mode_kwargs=None if modes else memory_mode_kwargs,
            )
        workload = dataclasses.replace(
            workload,
            tiled_loss="on" if tiled_loss else workload.tiled_loss,
            tiled_mlp="on" if tiled_mlp else workload.tiled_mlp,
            sampled=sampled or workload.sampled,
            lean=lean_config or workload.lean,
        )
        if levers:
            _show_levers(workload, machines, json)
            return
        with messages().status("Looking at the machine"):
            hardware = machines[0] if machines else measure_hardware(directory or [Path.cwd()], fresh=measure)
        budget_bytes = workload.budget_bytes if budget is None else budget_bytes
        if modes:
            names = None if memory_mode is None else [name.strip() for name in memory_mode.split(",")]
            show_modes(workload, hardware, names, memory_mode_kwargs, budget_bytes, json)
            return
        if order:
            _show_orders(workload, hardware, timeline, json)
            return
        with messages().status("Counting a step, then planning"):
            forecast = make_forecast(workload, hardware, budget_bytes=budget_bytes, may_recompute=recompute)
        for picture, path in (("frontier", plot), ("timeline", timeline)):
            if path is not None:
                with messages().status(f"Drawing {path}"):
                    _draw(picture, path, forecast)
    if json:
        typer.echo(json_format.dumps(forecast.as_dict(), indent=2))
    else:
        _show(forecast)
    if forecast.refusal is not None:
        if not json:
            messages().print(f"[bold red]{escape(forecast.refusal)}[/]", highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_REFUSED)


def _show_levers(workload: "Workload", machines: "list[Hardware]", json: bool) -> None:
    from hf_offload.forecast.levers import PIECES, pull_levers

    with messages().status("Counting") as status:
        found = pull_levers(workload, machines, lambda name: status.update(f"Counting: {name}"))
    if json:
        rows = [
            {"lever": one.lever, "tokens": dict(zip((m.name for m in machines), one.tokens, strict=True))}
            for one in found
        ]
        typer.echo(json_format.dumps({"model": workload.name, "batch": workload.batch, "levers": rows}, indent=2))
        return
    table = Table(
        title=escape(f"{workload.name}: tokens of the longest row that fits, batch {workload.batch}"), box=SIMPLE_HEAD
    )
    table.add_column("and on top")
    for machine in machines:
        table.add_column(escape(machine.name), justify="right", overflow="fold")
    for one in found:
        table.add_row(escape(one.lever), *(f"{tokens:,}" if tokens else "-" for tokens in one.tokens))
    table.caption = (
        f"Predicted; 90 % of a card's memory. Loss in {PIECES[0]} pieces, MLPs in {PIECES[1]}. -: not even its weights, "
        "gradients and optimizer state fit. What the blocks' inputs need beside the card: --ram and --disk."
    )
    table.caption_justify = "left"
    output().print(table)


def _show_orders(workload: "Workload", hardware: "Hardware", picture: Path | None, json: bool) -> None:
    from hf_offload.forecast.order import compare_orders
    from hf_offload.reports.plan_plots import plot_orders

    with messages().status("Counting") as status:
        orders = compare_orders(workload, hardware, lambda name: status.update(f"Counting: {name}"))
    title = f"{workload.name}, {workload.shape}, everything kept"
    if picture is not None:
        plot_orders(orders, title, picture)
    if json:
        rows = [
            {"order": one.name, "bound_bytes": one.bound_bytes, "peak_bytes": one.timeline.peak_bytes,
             "peak_unit": one.timeline.peak_unit, "step_s": one.timeline.step_s}
            for one in orders
        ]  # fmt: skip
        typer.echo(json_format.dumps({"model": workload.name, "orders": rows}, indent=2))
        return
    table = Table(title=escape(title), box=SIMPLE_HEAD)
    table.add_column("")
    for name in ("no order beats", "peak", "of the first", "peak in"):
        table.add_column(name, justify="left" if name == "peak in" else "right", overflow="fold")
    first = orders[0].timeline.peak_bytes
    for one in orders:
        peak = one.timeline.peak_bytes
        table.add_row(
            one.name, _gib(one.bound_bytes), _gib(peak), f"{peak / first:.3f}", escape(one.timeline.peak_unit)
        )
    table.caption = (
        "GiB, predicted. No order beats: weights, optimizer state, and the largest operation's operands and results, or the "
        "gradients that wait for the optimizer."
    )
    table.caption_justify = "left"
    output().print(table)


def _draw(picture: str, path: Path, forecast: "Forecast") -> None:
    from hf_offload.reports.plan_plots import plot_frontier, plot_timeline

    (plot_frontier if picture == "frontier" else plot_timeline)(forecast, path)


def _show(forecast: "Forecast") -> None:
    console = output()
    workload, footprint = forecast.workload, forecast.problem.footprint
    console.print(
        escape(
            f"{workload.name}: {footprint.parameters / 1e9:.3g} B parameters in "
            f"{str(workload.dtype).removeprefix('torch.')}{_autocast(workload)}, batch {workload.shape}, "
            f"{_mode(workload)}. Weights, gradients and optimizer state: "
            f"{format_bytes(footprint.base_bytes + footprint.gradient_bytes)}. "
            f"Budget: {format_bytes(forecast.problem.budget_bytes)}."
        ),
        highlight=False,
    )
    console.print(_machine_table(forecast.hardware))
    if forecast.lines:
        console.print(_unit_table(forecast))
    console.print(_alternative_table(forecast))


def _autocast(workload: "Workload") -> str:
    return "" if workload.autocast is None else f" (autocast {str(workload.autocast).removeprefix('torch.')})"


def _mode(workload: "Workload") -> str:
    if workload.mode is None:
        return f"{workload.optimizer}, all weights trained"
    settings = json_format.dumps(dict(workload.memory_mode_kwargs)) if workload.memory_mode_kwargs else ""
    return f"memory mode {workload.memory_mode} {settings}".strip()


def _machine_table(hardware: "Hardware") -> Table:
    table = Table(title=escape(hardware.name), box=SIMPLE_HEAD)
    for name in ("what", "value", "from"):
        table.add_column(name, justify="right" if name == "value" else "left")
    table.add_row("memory", format_bytes(hardware.memory_bytes.value), hardware.memory_bytes.source)
    for dtype, figure in hardware.flops_per_s.items():
        table.add_row(f"matrix multiplication, {dtype}", f"{figure.value / 1e12:.3g} TFLOP/s", figure.source)
    table.add_row("memory bandwidth", _rate(hardware.memory_bytes_per_s.value), hardware.memory_bytes_per_s.source)
    for tier in hardware.store_bytes_per_s:
        store, load, room = (
            getattr(hardware, name)[tier] for name in ("store_bytes_per_s", "load_bytes_per_s", "room_bytes")
        )
        table.add_row(f"{tier}: store, load", f"{_rate(store.value)}, {_rate(load.value)}", store.source)
        both = hardware.both_bytes_per_s.get(tier)
        if both is not None:
            table.add_row(f"{tier}: both at once", _rate(both.value), both.source)
        table.add_row(f"{tier}: room", format_bytes(room.value), room.source)
    return table


def _unit_table(forecast: "Forecast") -> Table:
    table = Table(title="Placement", box=SIMPLE_HEAD)
    table.add_column("unit", overflow="fold")
    table.add_column("saves", justify="right", no_wrap=True)
    table.add_column("compute", justify="right", no_wrap=True)
    table.add_column("placement", no_wrap=True)
    table.add_column("reason")
    footprint = forecast.problem.footprint
    tiled = set(footprint.tiled)
    # A layer belongs to the innermost unit round it.
    sampled = {
        max((unit for unit in footprint.units if name.startswith(f"{unit}.")), key=len) for name in footprint.sampled
    }
    for line in forecast.lines:
        many = f" ({line.count} x)" if line.count > 1 else ""
        many += ", tiled" if tiled & set(line.units) else ""
        many += ", sampled" if sampled & set(line.units) else ""
        table.add_row(
            escape(line.name + many),
            format_bytes(line.saved_bytes),
            format_seconds(line.forward_s + line.backward_s),
            line.placement.value,
            escape(line.reason),
        )
    return table


def _alternative_table(forecast: "Forecast") -> Table:
    table = Table(title="Predicted, if every unit were placed alike, and for the plan (auto)", box=SIMPLE_HEAD)
    table.add_column("", overflow="fold")
    for name in ("peak", "fits", "step", "waiting", "moved", "batch", "tokens"):
        table.add_column(name, justify="right", no_wrap=True, overflow="fold")
    for row in forecast.rows:
        timeline = row.timeline
        cells = ["-", "no", "-", "-", "-"]
        if timeline is not None:
            cells = [
                _gib(timeline.peak_bytes),
                "yes" if row.fits else "no",
                format_seconds(timeline.step_s),
                format_seconds(timeline.stall_s),
                _gib(timeline.moved_bytes),
            ]
        length = "?" if row.longest_sequence is None else str(row.longest_sequence)
        if row.longest_sequence is not None and row.longest_sequence == forecast.sequence_limit:
            length += "*"
        table.add_row(row.name, *cells, str(row.largest_batch), length)
    table.caption = (
        "peak, moved: GiB. ram, ssd: everything that is saved goes there. recompute: activation checkpointing of every "
        "block; +ram, +ssd: the blocks' inputs go there. batch, tokens: the largest batch and the longest rows that fit (*: "
        "the model takes no longer ones)."
    )
    table.caption_justify = "left"
    return table


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
