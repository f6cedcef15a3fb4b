"""``hf-offload launch``, and ``hf-offload config``, which writes its files."""

import os
import subprocess
import typing
from pathlib import Path
from typing import Annotated

import typer
import yaml

from hf_offload.cli.console import clear_errors, note, visible_log, write
from hf_offload.errors import EXIT_REFUSED
from hf_offload.integrations.launch import (
    SECTION,
    check_config,
    default_config,
    find_config,
    launch,
    read_config,
    shipped_configs,
)
from hf_offload.settings.classes import from_mapping
from hf_offload.settings.environment import RESUME_VARIABLE
from hf_offload.settings.outputs import check_output_file
from hf_offload.settings.recipes import apply_override
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.text_files import write_whole
from hf_offload.settings.yaml_text import dump_yaml

EPILOG = (
    f"--config_file may be the name of a shipped file: {', '.join(shipped_configs())}. Its section {SECTION} holds the "
    "settings of offloading; variables such as HF_OFFLOAD_TIER=ssd take precedence over it. Without --config_file, the file "
    "that `hf-offload config` wrote is used, or else that of `accelerate config`. Options of `hf-offload launch` itself come "
    "first."
)
METAVAR = "[ACCELERATE'S OPTIONS] SCRIPT [ARGUMENTS]..."
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def launch_script(
    context: typer.Context,
    restart_on_failure: Annotated[
        int, typer.Option(min=0, help="Start a script that failed again, from its newest snapshot, so often.")
    ] = 0,
) -> None:
    """Run an unmodified training script with offloading. Takes all options of `accelerate launch`."""
    with clear_errors(), visible_log():
        for left in range(restart_on_failure, -1, -1):
            try:
                launch(context.args)
                return
            except subprocess.CalledProcessError as error:
                note(f"The script ended with exit code {error.returncode}.", "bold red")
                if not left or error.returncode == EXIT_REFUSED:
                    raise typer.Exit(error.returncode if error.returncode > 0 else 1) from None
                note(f"It is started again, {left} more {'time' if left == 1 else 'times'} at most.")
                os.environ[RESUME_VARIABLE] = "1"


def config(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help=f"A config file of the package: {', '.join(shipped_configs())}.")
    ] = "single",
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes, such as num_processes=4 or offload.tier=ssd."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--config_file", metavar="FILE", help="File to write. Default: where `hf-offload launch` looks."),
    ] = None,
    where: Annotated[bool, typer.Option("--where", help="Print the path of the package's own file, and exit.")] = False,
) -> None:
    """Write a config file for `hf-offload launch`: one that comes with the package, with changes."""
    with clear_errors():
        source = find_config(name)
        if where:
            write(str(source))
            return
        values = read_config(source)
        values["offload"] = values.pop(SECTION, {})  # settings are read and named as in a recipe
        for change in changes or ():
            apply_override(values, _as_accelerate_reads(change))
        section = values.pop("offload", {})
        from_mapping(OffloadConfig, section, "offload")
        target = file or default_config()
        check_output_file(target, "--config_file")
        check_config(values, "the changes")
        write_whole(target, dump_yaml(values | {SECTION: section}))
        chosen = "" if file is None else f" --config_file {target}"
        write(f"Wrote {target}. Start with:\n  hf-offload launch{chosen} train.py")


def _as_accelerate_reads(change: str) -> str:
    """A change of a switch of accelerate's, whose YAML, of version 1.1, has more words for true and false."""
    from accelerate.commands.config.config_args import ClusterConfig

    key, _, text = change.partition("=")
    declared = typing.get_type_hints(ClusterConfig).get(key)
    value = yaml.safe_load(text) if bool in (declared, *typing.get_args(declared)) and text.isalpha() else None
    return f"{key}={str(value).lower()}" if isinstance(value, bool) else change
