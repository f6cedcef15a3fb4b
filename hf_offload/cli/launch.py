"""``hf-offload launch``."""

import subprocess

import typer

from hf_offload.cli.console import clear_errors, messages, visible_log
from hf_offload.integrations.launch import SECTION, launch, shipped_configs

EPILOG = (
    f"--config_file may be the name of a shipped file: {', '.join(shipped_configs())}. Its section {SECTION} holds the "
    "settings of offloading; variables such as HF_OFFLOAD_TIER=ssd take precedence over it. Without --config_file, the file "
    "that `hf-offload config` wrote is used."
)
METAVAR = "[ACCELERATE'S OPTIONS] SCRIPT [ARGUMENTS]..."
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def launch_script(context: typer.Context) -> None:
    """Run an unmodified training script with offloading. Takes all options of `accelerate launch`."""
    with clear_errors(), visible_log():
        try:
            launch(context.args)
        except subprocess.CalledProcessError as error:
            messages().print(f"[bold red]The script ended with exit code {error.returncode}.[/]")
            raise typer.Exit(error.returncode if error.returncode > 0 else 1) from None
