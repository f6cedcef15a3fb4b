"""``hf-offload launch``."""

import os
import subprocess
from typing import Annotated

import typer

from hf_offload.cli.console import clear_errors, messages, visible_log
from hf_offload.cli.exit_codes import EXIT_REFUSED
from hf_offload.integrations.launch import SECTION, launch, shipped_configs
from hf_offload.settings.environment import RESUME_VARIABLE

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
        int,
        typer.Option(
            min=0,
            help="How often to start the script again after it has failed. A Trainer with snapshot_steps goes on from its "
            "newest snapshot or checkpoint.",
        ),
    ] = 0,
) -> None:
    """Run an unmodified training script with offloading. Takes all options of `accelerate launch`."""
    with clear_errors(), visible_log():
        for left in range(restart_on_failure, -1, -1):
            try:
                launch(context.args)
                return
            except subprocess.CalledProcessError as error:
                messages().print(f"[bold red]The script ended with exit code {error.returncode}.[/]")
                if not left or error.returncode == EXIT_REFUSED:
                    raise typer.Exit(error.returncode if error.returncode > 0 else 1) from None
                messages().print(f"It is started again, {left} more {'time' if left == 1 else 'times'} at most.")
                os.environ[RESUME_VARIABLE] = "1"
