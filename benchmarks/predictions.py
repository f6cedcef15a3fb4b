"""What shipped recipes are predicted to need on the machine that each names: the section ``meta.predicted`` of a recipe."""

import re
import textwrap
from typing import Annotated

import typer

from hf_offload.cli.console import clear_errors, loading_torch, note, progress_bar, write
from hf_offload.errors import EXIT_PROBLEM, OffloadConfigError, OffloadError
from hf_offload.settings.load import collect_errors
from hf_offload.settings.outputs import check_output_file
from hf_offload.settings.recipe_files import find_recipe, recipe_names
from hf_offload.settings.recipe_meta import META, PREDICTED, Predicted, read_meta
from hf_offload.settings.text_files import read_text, write_whole
from hf_offload.settings.yaml_text import dump_yaml


def predictions(
    names: Annotated[list[str] | None, typer.Argument(metavar="RECIPE", help="Shipped recipes or files.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All shipped recipes that name a machine.")] = False,
    save: Annotated[bool, typer.Option("--write", help="Write the predictions into the recipes.")] = False,
) -> None:
    """Predict peak memory and step time on the machine that a recipe names, and compare with the recipe's figures.

    The machine is the recipe's `meta.machine`, the prediction its `meta.predicted`. Without --write, the exit code is 1 if
    they differ, or a recipe does not fit its machine.
    """
    with clear_errors():
        if bool(names) == everything:
            raise OffloadConfigError("Name recipes to predict, or pass --all, and not both.")
        chosen = names or [name for name in recipe_names() if read_meta(name).target.gpu is not None]
        with collect_errors("recipes") as check:
            for name in chosen:
                with check:
                    path = find_recipe(name)
                    if save:
                        check_output_file(path, "--write")
        with loading_torch():
            from transformers.utils import logging as transformers_log

            from benchmarks.recipe_prediction import predict_recipe

        transformers_log.set_verbosity_error()  # its remarks on configurations are not about the plan
        wrong = 0
        with progress_bar() as bar:
            task = bar.add_task("Predicting", total=len(chosen))
            for name in chosen:
                bar.update(task, description=f"Predicting {name}")
                try:
                    found = predict_recipe(name)
                    same = found.written == read_meta(name).prediction
                    if not same and save:
                        path = find_recipe(name)
                        text = read_text(path, "The recipe")
                        write_whole(path, _with_prediction(text, found.written))
                except OffloadError as error:
                    wrong += 1
                    note(f"{name}: {error}", "bold red")
                    continue
                finally:
                    bar.advance(task)
                wrong += not same and not save
                verdict = "" if same else " (written)" if save else " (differs from the recipe's)"
                write(f"{name}: predicted {found.line}{verdict}")
        if wrong:
            raise typer.Exit(EXIT_PROBLEM)


def _with_prediction(text: str, prediction: Predicted) -> str:
    """The text of a recipe with its prediction, as the last entry of its section ``meta``."""
    entry = textwrap.indent(dump_yaml({PREDICTED: prediction.given}), "  ")
    text = re.sub(rf"(?m)^  {PREDICTED}:\n(?:    .*\n)*", "", text)
    written, count = re.subn(rf"(?m)^{META}:.*\n(?:  .*\n)+", lambda found: found[0] + entry, text, count=1)
    if count != 1:
        raise OffloadConfigError(f"There is no section {META}, indented by two spaces, to write the prediction into.")
    return written
