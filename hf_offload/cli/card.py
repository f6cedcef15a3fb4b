"""``hf-offload card``."""

from pathlib import Path
from typing import Annotated

import typer

from hf_offload.cli.console import clear_errors, loading_torch, write
from hf_offload.settings.outputs import check_output_folder


def card(
    report: Annotated[
        Path, typer.Argument(metavar="REPORT", help="File that `hf-offload train RECIPE --report FILE` wrote.")
    ],
    target: Annotated[Path, typer.Option("--output", metavar="FOLDER", help="Folder for README.md and its pictures.")],
    name: Annotated[str, typer.Option(help="Name of the model.")],
    dataset: Annotated[str, typer.Option(help="Name of the training data.")],
    dataset_license: Annotated[str, typer.Option(help="Licence of the data, as the Hub writes it: cc-by-2.0.")],
    dataset_url: Annotated[str | None, typer.Option(help="Source of the data.")] = None,
    dataset_note: Annotated[str | None, typer.Option(help="Sentences about the data: which part, and where.")] = None,
    how: Annotated[str | None, typer.Option(help="Sentences on how to reproduce it. The commands are added.")] = None,
    license: Annotated[str, typer.Option(help="Licence of the trained weights.")] = "apache-2.0",
    language: Annotated[str | None, typer.Option(help="Codes separated by commas: en,de.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Hub name of the fine-tuned model, if the recipe names a folder.")
    ] = None,
    purpose: Annotated[str | None, typer.Option(help="A sentence on what the model is for.")] = None,
    comparison: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The table.json of `hf-offload bench steps` with the same recipe."),
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the losses, too: loss.png.")] = False,
) -> None:
    """Write the model card of a training: results, memory and time, data and licence, how to reproduce it."""
    with clear_errors():
        check_output_folder(target, "--output")
        with loading_torch():
            from hf_offload.reports.card import CardFacts, write_card
            from hf_offload.training.report import TrainingReport

        facts = CardFacts(
            name=name, license=license, dataset=dataset, dataset_license=dataset_license, dataset_url=dataset_url,
            dataset_note=dataset_note, how=how, base_model=base_model,
            languages=[code.strip() for code in language.split(",")] if language else (),
            **({} if purpose is None else {"purpose": purpose}),
        )  # fmt: skip
        written = write_card(TrainingReport.read(report), facts, comparison, target, plot)
    write(f"wrote {written}")
