"""``hf-offload bench sampling``."""

import dataclasses
import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hf_offload.cli.console import clear_errors, output, progress_bar
from hf_offload.settings.outputs import check_output_folder


def sampling(
    shapes: Annotated[
        str, typer.Argument(help="bert-base, t5-base, t5-large, with commas between.")
    ] = "bert-base,t5-base,t5-large",
    gpu: Annotated[str, typer.Option(help="A card, as hf-offload plan has it.")] = "a100-80gb",
    output_dir: Annotated[Path, typer.Option("--output", help="Folder for the tables.")] = Path("runs/sampling"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Count what sampled linear layers and lean activations save on a card, at the shapes of the WTA-CRS paper.

    How accurate is what is trained so: hf-offload bench accuracy. How fast: hf-offload bench steps --strategies
    keep,ours:sampled,ours:lean.
    """
    with clear_errors():
        check_output_folder(output_dir, "--output", "sampling.md", "sampling.json")
        from transformers.utils import logging as transformers_log  # slow from here on: it loads torch

        from hf_offload.bench.formats import json_text, markdown_table, write_texts
        from hf_offload.bench.sampling import COLUMNS, count_sampling, describe, texts
        from hf_offload.plan.hardware import describe_hardware

        transformers_log.set_verbosity_error()
        names = [name.strip() for name in shapes.split(",")]
        hardware = describe_hardware(gpu)
        with progress_bar(counted=False) as progress:
            task = progress.add_task("starting", total=None)
            rows = count_sampling(names, hardware, lambda way: progress.update(task, description=escape(way)))
    found = [dataclasses.asdict(row) for row in rows]
    tables = {name: texts([row for row in rows if row.shape == name]) for name in names}
    lines = [line for name in names for line in (f"## {describe(name)}", "", *markdown_table(COLUMNS, tables[name]))]
    write_texts(output_dir, {"sampling.md": "\n".join(lines), "sampling.json": json_text({"gpu": gpu, "rows": found})})
    if json:
        typer.echo(json_format.dumps(found, indent=2))
        return
    for name in names:
        table = Table(title=escape(describe(name)), box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
        for line in tables[name]:
            table.add_row(*line)
        output().print(table, highlight=False)
    output().print(
        "Counted on tensors without data. eager: attention that saves its matrices, the paper's baseline; elsewhere it is "
        "scaled dot product attention. on SSD: the peak with everything that is saved there.",
        highlight=False,
    )
