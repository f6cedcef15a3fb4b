"""``hf-offload recipes``: recipes in a list, and as text that stands alone."""

import dataclasses
import shlex
from typing import Annotated

import typer
from rich.markup import escape

from hf_offload.cli.console import clear_errors, loading_torch, make_table, note, print_table, write
from hf_offload.cli.options import Overrides
from hf_offload.errors import EXIT_PROBLEM, OffloadConfigError, OffloadError
from hf_offload.settings.layers import drop_nulls, read_layers
from hf_offload.settings.load import nearest
from hf_offload.settings.recipe_files import find_recipe, recipe_names, shipped_name
from hf_offload.settings.recipe_meta import META, PREDICTED, PROGRAM, read_meta
from hf_offload.settings.recipes import Recipe, apply_override, load_recipe, read_recipe
from hf_offload.settings.shown import listed, shown
from hf_offload.settings.yaml_text import dump_yaml

recipes = typer.Typer(help="Recipes that come with the package, and your own.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="RECIPE", help="A shipped recipe or a file.")]
Names = Annotated[list[str], typer.Argument(metavar="RECIPE", help="Shipped recipes or files.")]


@recipes.command("list")
def list_recipes(
    family: Annotated[str | None, typer.Option(help="One family only, such as llama.")] = None,
) -> None:
    """List the shipped recipes: what each is, and the GPU and peak memory it is meant for."""
    with clear_errors():
        families = sorted({name.partition("/")[0] for name in recipe_names()})
        if family is not None and family not in families:
            raise OffloadConfigError(
                f"There is no family {shown(family)}.{nearest(family, families)} Families: {listed(families, family)}."
            )
        table = make_table(
            "",
            ("recipe", "GPU", "peak", "summary"),
            "GPU: what it is meant for. peak: predicted there, weights included (hf-offload plan RECIPE).",
            left=("GPU", "summary"),
        )
        for name in recipe_names():
            if family is None or name.startswith(f"{family}/"):
                meta = read_meta(name)
                cells = (name, meta.target.gpu or "-", meta.prediction.peak or "-", meta.summary or "-")
                table.add_row(*map(escape, cells))
        print_table(table)


@recipes.command()
def show(
    name: Name,
    overrides: Overrides = None,
) -> None:
    """Print a recipe and its layers as one file. Save it to change it and to train it."""
    with clear_errors():
        write(_merged(name, overrides or []).removesuffix("\n"))


@recipes.command()
def validate(names: Names) -> None:
    """Check recipes and report all errors at once."""
    with clear_errors():
        wrong = 0
        for name in names:
            try:
                read_recipe(name)
                with loading_torch():
                    from hf_offload.training.arguments import build_arguments
                build_arguments(_for_any_machine(load_recipe(name)))
            except OffloadError as error:
                wrong += 1
                note(f"{name}: {error}", "bold red")
            else:
                write(f"{name}: good")
        if wrong:
            raise typer.Exit(EXIT_PROBLEM)


def _for_any_machine(recipe: Recipe) -> Recipe:
    """Without what training arguments accept on a GPU only: a recipe is checked anywhere."""
    training = {key: value for key, value in recipe.training.items() if key not in ("fp16", "bf16", "tf32")}
    return dataclasses.replace(recipe, training=training)


def _merged(name: str, overrides: list[str]) -> str:
    layers = read_layers(find_recipe(name))
    for override in overrides:
        apply_override(layers.tree, override)
    if overrides and isinstance(layers.tree.get(META), dict):
        layers.tree[META].pop(PREDICTED, None)  # which is about the recipe as it is
    drop_nulls(layers.tree)
    comment = f"# {shlex.join([PROGRAM, 'recipes', 'show', name, *overrides])}\n"
    if len(layers.files) > 1:
        comment += "# Layers, in the order in which they were merged:\n"
        comment += "".join(f"#   {shipped_name(file) or file}\n" for file in layers.files)
    return "\n".join([comment, *(dump_yaml({section: content}) for section, content in layers.tree.items())])
