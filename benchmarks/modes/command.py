"""``python -m benchmarks modes``."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from benchmarks.console import names_of, numbers_of, show_table
from benchmarks.curve_plots import plot_curves
from benchmarks.modes.search import MODES, Findings, Setup, bench_modes
from benchmarks.modes.table import COLUMNS, NOTES, SETTINGS_COLUMNS, mode_rows, settings_texts, texts
from hf_offload.cli.console import clear_errors, messages, output, progress_bar
from hf_offload.cli.options import Json
from hf_offload.errors import EXIT_INTERRUPTED
from hf_offload.reports.formats import json_text, markdown_table, write_texts
from hf_offload.reports.plots import require_matplotlib
from hf_offload.settings.outputs import check_output_folder


def modes(
    data_dir: Annotated[Path, typer.Option(help="Folder with tinyshakespeare/input.txt.")],
    chosen: Annotated[
        str,
        typer.Option(
            "--modes",
            help=f"{', '.join(MODES)} (none: AdamW of all weights); or all.",
        ),
    ] = "all",
    seeds: Annotated[str, typer.Option(help="One run each, of the order of the data and of draws.")] = "0,1",
    steps: Annotated[int, typer.Option(min=1, help="Of each run.")] = 1000,
    warm_start_steps: Annotated[int, typer.Option(min=1, help="With AdamW, once, before all runs.")] = 500,
    search_steps: Annotated[int, typer.Option(min=1, help="Of each run that tries a rate.")] = 200,
    rates: Annotated[str, typer.Option(help="Learning rates that each mode chooses from.")] = "0.0003,0.001,0.003,0.01",
    layers: Annotated[int, typer.Option(min=1, help="Fewer, for a look.")] = 8,
    hidden: Annotated[int, typer.Option(min=32, help="A multiple of 64, or 32. Smaller, for a look.")] = 320,
    times: Annotated[
        bool, typer.Option("--times", help="Measure step times, too, all modes in turns (some 20 minutes).")
    ] = False,
    output_dir: Annotated[
        Path, typer.Option("--output", help="Folder for the runs; those in it are not repeated.")
    ] = Path("runs/modes"),
    json: Json = False,
) -> None:
    """Train a LLaMA of 10M parameters on Shakespeare's bytes with each memory mode; compare losses, memory and time.

    Some three hours on two cores. It can be stopped and started again: finished runs are kept.
    """
    with clear_errors():
        check_output_folder(output_dir, "--output", "modes.md", "modes.json", "modes.png")
        require_matplotlib()
        setup = Setup(
            layers, hidden, warm_start_steps, search_steps, steps, numbers_of("--rates", rates, float, "0.001,0.01")
        )
        names = list(MODES) if chosen == "all" else names_of(chosen)
        with progress_bar() as progress:
            task = progress.add_task("starting", total=None)
            found = bench_modes(
                data_dir,
                names,
                numbers_of("--seeds", seeds, int, "0,1,2"),
                output_dir,
                setup,
                times,
                lambda name, done, total: progress.update(task, completed=done, total=total, description=escape(name)),
            )
            if not found.interrupted:
                progress.update(task, completed=progress.tasks[0].total or 0)
    rows = mode_rows(found, setup.rates)
    lines = list(texts(rows))
    values = {
        "setup": dataclasses.asdict(setup),
        "warm_start": found.warm_start and dataclasses.asdict(found.warm_start),
        "rows": [dataclasses.asdict(row) | {"mean": row.mean} for row in rows],
        "searches": [dataclasses.asdict(run) for run in found.searches],
        "runs": [dataclasses.asdict(run) for run in found.runs],
    }
    chosen_settings = markdown_table(SETTINGS_COLUMNS, settings_texts(names, hidden))
    text = "\n".join([markdown_table(COLUMNS, lines), "", *NOTES, "", chosen_settings, ""])
    write_texts(output_dir, {"modes.md": text, "modes.json": json_text(values)})
    _plot(found, output_dir / "modes.png")
    if json:
        typer.echo(json_text(values))
    else:
        show_table(COLUMNS, lines, left=("mode",))
        output().print("\n".join(NOTES), highlight=False)
        messages().print(f"Files: {escape(str(output_dir))}", highlight=False)
    if found.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _plot(found: Findings, path: Path) -> None:
    curves: dict[str, list[Sequence[Sequence[float]]]] = {}
    for run in found.runs:
        curves.setdefault(run.mode, []).append(run.curve)
    if curves:
        plot_curves(curves, "Validation loss after a shared warm start", "nats a byte", path)
