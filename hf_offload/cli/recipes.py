"""``hf-offload recipes``: recipes as text that stands alone, and how they are summed up in a line."""

import dataclasses
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hf_offload.cli.console import clear_errors, loading_torch, messages, output, print_table, progress_bar
from hf_offload.cli.options import Overrides
from hf_offload.errors import EXIT_PROBLEM, OffloadConfigError, OffloadError
from hf_offload.settings.layers import BASE, Layers, bases_of, drop_nulls, read_layers
from hf_offload.settings.load import collect_errors, nearest
from hf_offload.settings.outputs import check_output_file
from hf_offload.settings.recipe_files import find_recipe, recipe_names, shipped_name
from hf_offload.settings.recipe_meta import META, PREDICTED, PROGRAM, read_meta
from hf_offload.settings.recipes import Recipe, apply_override, load_recipe, read_recipe
from hf_offload.settings.shown import listed, shown
from hf_offload.settings.text_files import is_folder, read_text, write_whole
from hf_offload.settings.yaml_text import dump_yaml, parse_yaml, set_entry

recipes = typer.Typer(help="Recipes that come with the package, and your own.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="RECIPE", help="A shipped recipe or a file.")]
Names = Annotated[list[str], typer.Argument(metavar="RECIPE", help="Shipped recipes or files.")]


@recipes.command("list")
def list_recipes(
    family: Annotated[str | None, typer.Option(help="One family only, such as llama.")] = None,
) -> None:
    """List the shipped recipes: model, method, and the GPU and peak memory each is meant for."""
    with clear_errors():
        families = sorted({name.partition("/")[0] for name in recipe_names()})
        if family is not None and family not in families:
            raise OffloadConfigError(
                f"There is no family {shown(family)}.{nearest(family, families)} Families: {listed(families, family)}."
            )
        table = Table(box=SIMPLE_HEAD)
        table.add_column("recipe", no_wrap=True)
        table.add_column("model", no_wrap=True)
        table.add_column("method")
        table.add_column("GPU", no_wrap=True)
        table.add_column("peak", justify="right", no_wrap=True)
        for name in recipe_names():
            if family is None or name.startswith(f"{family}/"):
                meta, tree = read_meta(name), read_layers(find_recipe(name)).tree
                cells = (name, model_of(tree), method_of(tree), meta.target.gpu or "-", meta.prediction.peak or "-")
                table.add_row(*map(escape, cells))
        table.caption = (
            "GPU: what it is meant for. peak: predicted there, weights included (hf-offload recipes predict)."
        )
        table.caption_justify = "left"
        print_table(table)


@recipes.command()
def show(
    name: Name,
    overrides: Overrides = None,
) -> None:
    """Print a recipe and its layers as one file, with the origin of each setting. It can be saved and trained."""
    with clear_errors():
        typer.echo(_merged(name, overrides or []), nl=False)


@recipes.command()
def validate(names: Names) -> None:
    """Check recipes and report all errors at once. The exit code is 1 if there are any."""
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
                messages().print(f"[bold red]{escape(name)}[/]: {escape(str(error))}", highlight=False, soft_wrap=True)
            else:
                output().print(f"{escape(name)}: good", highlight=False, soft_wrap=True)
        if wrong:
            raise typer.Exit(EXIT_PROBLEM)


@recipes.command()
def copy(
    name: Name,
    target: Annotated[
        Path | None,
        typer.Argument(metavar="TARGET", help="File or folder. Default: the recipe's own name, in this folder."),
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="Write all layers into the copy, which then needs no other file.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Copy a recipe in order to change it. The copy uses the shipped layers, too, unless they are merged into it."""
    with clear_errors():
        source = find_recipe(name)
        path = target or Path()
        if is_folder(path):
            path = path / f"{(shipped_name(source) or source.stem).replace('/', '_')}.yaml"
        if path.suffix not in (".yaml", ".yml"):
            raise OffloadConfigError(f"{path} is not a name for a recipe: end it with .yaml, or name a folder.")
        if path.stem.startswith("_"):
            raise OffloadConfigError(f"{path}: an underscore in front makes it a layer, not a recipe: leave it out.")
        check_output_file(path, "TARGET")
        if path.exists() and not force:
            raise OffloadConfigError(f"{path} exists already: name another file, or replace it with --force.")
        text = _with_merged_layers(source) if merged else _with_shipped_layers(source)
        former = [name, shipped_name(source) or name]
        write_whole(path, read_meta(name).renamed(text, former, str(path)))
        output().print(f"Wrote {path}. Train with:\n  {PROGRAM} train {path}", highlight=False, soft_wrap=True)


@recipes.command()
def predict(
    names: Annotated[list[str] | None, typer.Argument(metavar="RECIPE", help="Shipped recipes or files.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All shipped recipes that name a machine.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the predictions into the recipes.")] = False,
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
                    if write:
                        check_output_file(path, "--write")
        with loading_torch():
            from transformers.utils import logging as transformers_log

            from hf_offload.forecast.predict import predict_recipe

        transformers_log.set_verbosity_error()  # its remarks on configurations are not about the plan
        wrong = 0
        with progress_bar() as bar:
            task = bar.add_task("Predicting", total=len(chosen))
            for name in chosen:
                bar.update(task, description=f"Predicting {name}")
                try:
                    found = predict_recipe(name)
                    same = found.written == read_meta(name).prediction
                    if not same and write:
                        path = find_recipe(name)
                        text = set_entry(
                            read_text(path, "The recipe"), (META, PREDICTED), found.written.given, str(path)
                        )
                        write_whole(path, text)
                except OffloadError as error:
                    wrong += 1
                    messages().print(
                        f"[bold red]{escape(name)}[/]: {escape(str(error))}", highlight=False, soft_wrap=True
                    )
                    continue
                finally:
                    bar.advance(task)
                wrong += not same and not write
                verdict = "" if same else " (written)" if write else " (differs from the recipe's)"
                output().print(escape(f"{name}: predicted {found.line}{verdict}"), highlight=False, soft_wrap=True)
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
        comment += "".join(f"#   {layer_name(file)}\n" for file in layers.files)
    return f"{comment}\n{merged_text(layers)}"


def _with_merged_layers(source: Path) -> str:
    layers = read_layers(source)
    drop_nulls(layers.tree)
    comment = re.match(r"(?:#[^\n]*\n)*", read_text(source, "The recipe"))
    return f"{comment[0] if comment else ''}\n{merged_text(layers)}"


def _with_shipped_layers(source: Path) -> str:
    """The recipe's text; layers in its folder are named by their whole paths."""
    text = read_text(source, "The recipe")
    content = parse_yaml(text, str(source))
    if not isinstance(content, dict) or content.get(BASE) is None:
        return text
    found = [shipped_name(file) or str(file.resolve()) for file in bases_of(source, content)]
    named = [content[BASE]] if isinstance(content[BASE], str) else content[BASE]
    if found == named:
        return text
    return set_entry(text, (BASE,), found, str(source))


def merged_text(layers: Layers) -> str:
    """All layers as one recipe in YAML, with comments that say which layer a setting comes from."""
    several = len(layers.files) > 1
    parts = []
    for section, content in layers.tree.items():
        if not isinstance(content, dict):
            parts.append(dump_yaml({section: content}))
            continue
        lines = [f"{section}:{'' if content else ' {}'}\n"]
        said: Path | None = None
        for key, value in content.items():
            file = layers.origins.get((section, key))
            if several and file is not None and file != said:
                lines.append(f"  # {layer_name(file)}\n")
                said = file
            lines.extend(f"  {line}\n" for line in dump_yaml({key: value}).splitlines())
        parts.append("".join(lines))
    return "\n".join(parts)


def layer_name(file: Path) -> str:
    """A layer's name among the shipped ones, or its path."""
    return shipped_name(file) or str(file)


def method_of(tree: Mapping[str, Any]) -> str:
    """How a recipe trains and where activations go, in words: ``lora + ssd, tiled``."""
    offload = tree.get("offload") or {}
    words = [str((tree.get("memory") or {}).get("mode", "full"))]
    tier = str(offload.get("tier", "auto")) if "offload" in tree else "none"
    if tier != "none":
        words.append(tier)
    extras = []
    training = tree.get("training") or {}
    if training.get("gradient_checkpointing") or training.get("activation_checkpointing"):
        extras.append("recompute")
    if "sampling" in tree or offload.get("sampled_linear") is not None:
        extras.append("sampled")
    if offload.get("recompute_elementwise", "off") not in ("off", "", False, None, []):
        extras.append("elementwise")
    if any(offload.get(name, "off") not in ("off", False) for name in ("tiled_loss", "tiled_mlp")):
        extras.append("tiled")
    return ", ".join([" + ".join(words), *extras])


def model_of(tree: Mapping[str, Any]) -> str:
    """The model of a recipe in a word."""
    model = tree.get("model") or {}
    shape = model.get("shape") or {}
    architecture = model.get("architecture") or shape.get("architecture") or "-"
    return str(model.get("name") or f"{architecture}, random weights")
