"""``hf-offload recipes``."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hf_offload.cli.console import clear_errors, messages, output, progress_bar
from hf_offload.cli.exit_codes import EXIT_PROBLEM
from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.settings.layers import BASE, bases_of, drop_nulls, read_layers
from hf_offload.settings.load import collect_errors, nearest
from hf_offload.settings.merged import layer_name, merged_text, method_of, model_of
from hf_offload.settings.outputs import check_output_file
from hf_offload.settings.overrides import apply_override
from hf_offload.settings.recipe_files import find_recipe, recipe_names, shipped_name
from hf_offload.settings.recipe_header import PROGRAM, Header, read_header, renamed, with_prediction
from hf_offload.settings.shown import listed, shown
from hf_offload.settings.text_files import is_folder, read_text
from hf_offload.settings.yaml_text import parse_yaml

if TYPE_CHECKING:
    from hf_offload.settings.recipes import Recipe

recipes = typer.Typer(help="The recipes that come with the package, and your own.", no_args_is_help=True)

Names = Annotated[list[str], typer.Argument(metavar="NAME|FILE...", help="Shipped recipes or files.")]


@recipes.command("list")
def list_recipes(
    family: Annotated[str | None, typer.Option(help="Only one family, such as llama.")] = None,
) -> None:
    """All shipped recipes: model, method, the card each is meant for, and what is predicted there."""
    with clear_errors():
        families = sorted({name.partition("/")[0] for name in recipe_names()})
        if family is not None and family not in families:
            raise OffloadConfigError(
                f"There is no family {shown(family)}.{nearest(family, families)} Families: {listed(families, family)}."
            )
        table = Table(box=SIMPLE_HEAD)
        for title in ("recipe", "model", "method", "card"):
            table.add_column(title, overflow="fold")
        table.add_column("peak", justify="right", no_wrap=True)
        for name in recipe_names():
            if family is not None and not name.startswith(f"{family}/"):
                continue
            path = find_recipe(name)
            tree = read_layers(path).tree
            header = read_header(read_text(path, "The recipe"))
            cells = (name, model_of(tree), method_of(tree), header.card or "-", header.peak or "-")
            table.add_row(*map(escape, cells))
        table.caption = (
            "card: what it is meant for. peak: predicted there, weights and all (hf-offload recipes predict)."
        )
        table.caption_justify = "left"
        output().print(table, highlight=False)


@recipes.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A shipped recipe or a file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes.")] = None,
) -> None:
    """A recipe with all its layers as one file, and where each setting comes from. It can be saved and trained."""
    with clear_errors():
        typer.echo(_merged(name, overrides or []), nl=False)


@recipes.command()
def validate(names: Names) -> None:
    """Check recipes and report all errors at once. The exit code says whether there were any."""
    with clear_errors():
        from hf_offload.settings.recipes import load_recipe, read_recipe

        wrong = 0
        for name in names:
            try:
                read_recipe(name)
                from hf_offload.training.arguments import build_arguments  # slow: it loads torch

                build_arguments(_for_any_machine(load_recipe(name)))
            except OffloadError as error:
                wrong += 1
                messages().print(f"[bold red]{escape(name)}[/]: {escape(str(error))}", highlight=False, soft_wrap=True)
            else:
                output().print(f"{escape(name)}: good", highlight=False, soft_wrap=True)
        if wrong:
            raise typer.Exit(EXIT_PROBLEM)


@recipes.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A shipped recipe or a file.")],
    target: Annotated[
        Path | None, typer.Argument(help="File or folder. Default: the recipe's own name, in this folder.")
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="With all layers in it, so that nothing else is needed.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Copy a recipe to change it. Its launch lines are changed to fit, and it goes on using the shipped layers."""
    with clear_errors():
        source = find_recipe(name)
        path = target or Path()
        if is_folder(path):
            path = path / f"{(shipped_name(source) or source.stem).replace('/', '_')}.yaml"
        if path.suffix not in (".yaml", ".yml"):
            raise OffloadConfigError(f"{path} is no name of a recipe's file: end it with .yaml, or name a folder.")
        if path.stem.startswith("_"):
            raise OffloadConfigError(f"{path}: an underscore in front makes it a layer, and no recipe: leave it out.")
        check_output_file(path, "TARGET")
        if path.exists() and not force:
            raise OffloadConfigError(f"{path} is there already: name another file, or replace it with --force.")
        text = _with_merged_layers(source) if merged else _with_shipped_layers(source)
        old = {name: str(path), shipped_name(source) or name: str(path)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(renamed(text, old), encoding="utf-8")
        output().print(f"Wrote {path}. Train with:\n  {PROGRAM} train {path}", highlight=False, soft_wrap=True)


@recipes.command()
def predict(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME|FILE]...", help="Shipped recipes or files.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All shipped recipes that say for which card.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the predictions into the recipes.")] = False,
) -> None:
    """Predict peak and step on the machine that a recipe's `hf-offload plan` line names, as that command does.

    Without --write, exit code 1 says that a recipe has another prediction in its opening comment, or that it does not fit.
    """
    with clear_errors():
        if bool(names) == everything:
            raise OffloadConfigError("Name recipes to predict, or say --all, and not both.")
        chosen = (
            [name for name in recipe_names() if _header(name).plan is not None] if everything else list(names or [])
        )
        with collect_errors("recipes") as check:
            for name in chosen:
                with check:
                    path = find_recipe(name)
                    if write:
                        check_output_file(path, "--write")
        from transformers.utils import logging as transformers_log  # slow from here on: it loads torch

        from hf_offload.forecast.predict import predict_recipe

        transformers_log.set_verbosity_error()  # what it says about configurations is not about the plan
        wrong = 0
        with progress_bar() as bar:
            task = bar.add_task("Predicting", total=len(chosen))
            for name in chosen:
                bar.update(task, description=f"Predicting {name}")
                try:
                    line = predict_recipe(name).line
                except OffloadError as error:
                    wrong += 1
                    messages().print(
                        f"[bold red]{escape(name)}[/]: {escape(str(error))}", highlight=False, soft_wrap=True
                    )
                    continue
                finally:
                    bar.advance(task)
                same = line == _header(name).predicted
                if not same and write:
                    path = find_recipe(name)
                    path.write_text(with_prediction(read_text(path, "The recipe"), line), encoding="utf-8")
                wrong += not same and not write
                verdict = "" if same else " (written)" if write else " (the recipe says otherwise)"
                output().print(escape(f"{name}: {line[2:]}{verdict}"), highlight=False, soft_wrap=True)
        if wrong:
            raise typer.Exit(EXIT_PROBLEM)


def _for_any_machine(recipe: "Recipe") -> "Recipe":
    """Without what training arguments accept beside a GPU only: a recipe is checked anywhere."""
    training = {key: value for key, value in recipe.training.items() if key not in ("fp16", "bf16", "tf32")}
    return dataclasses.replace(recipe, training=training)


def _merged(name: str, overrides: list[str]) -> str:
    path = find_recipe(name)
    layers = read_layers(path)
    for override in overrides:
        apply_override(layers.tree, override)
    drop_nulls(layers.tree)
    command = " ".join([f"{PROGRAM} recipes show {name}", *overrides])
    comment = f"# {command}\n"
    if len(layers.files) > 1:
        comment += "# Layers, in the order in which they were merged:\n"
        comment += "".join(f"#   {layer_name(file)}\n" for file in layers.files)
    return f"{comment}\n{merged_text(layers)}"


def _with_merged_layers(source: Path) -> str:
    layers = read_layers(source)
    drop_nulls(layers.tree)
    comment = re.match(r"(?:#[^\n]*\n)*", read_text(source, "The recipe"))
    return f"{comment[0] if comment else ''}\n{merged_text(layers)}"


def _with_shipped_layers(source: Path) -> str:
    """The recipe's text; layers that are found beside it are named so that they are found from elsewhere."""
    text = read_text(source, "The recipe")
    content = parse_yaml(text, str(source))
    if not isinstance(content, dict) or content.get(BASE) is None:
        return text
    found = [shipped_name(file) or str(file.resolve()) for file in bases_of(source, content)]
    named = [content[BASE]] if isinstance(content[BASE], str) else content[BASE]
    if found == named:
        return text
    # Only a list on one line is changed in its place.
    line = f"{BASE}: {json.dumps(found, ensure_ascii=False)}"  # JSON is YAML, whatever is in the names
    text = re.sub(rf"^{BASE}:[^\n]*$", lambda _: line, text, count=1, flags=re.MULTILINE)
    with contextlib.suppress(OffloadConfigError):
        content = parse_yaml(text, str(source))
    if content[BASE] != found:
        raise OffloadConfigError(
            f"{source}: the layers it names are found only from its own folder: write {line!r} on one line, or copy with "
            "--merged."
        )
    return text


def _header(name: str) -> Header:
    return read_header(read_text(find_recipe(name), "The recipe"))
