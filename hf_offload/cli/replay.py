"""``hf-offload replay``."""

from pathlib import Path
from typing import Annotated

import typer

from hf_offload.cli.console import clear_errors, loading_torch, progress_bar, write
from hf_offload.settings.outputs import check_output_folder


def replay(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="A checkpoint of MeZO's, or its mezo_log.json.gz alone.")],
    initial: Annotated[
        str,
        typer.Argument(metavar="INITIAL", help="The weights training began with: a folder, or a model of the hub."),
    ],
    target: Annotated[Path, typer.Option("--output", metavar="FOLDER", help="Folder for the rebuilt weights.")],
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=0, help="Rebuild the weights after N steps. Default: all.")
    ] = None,
) -> None:
    """Rebuild a checkpoint from the initial weights and a log of MeZO, bit for bit, without data."""
    with clear_errors():
        check_output_folder(target, "--output")
        with loading_torch():
            from hf_offload.methods.mezo import MezoLog
            from hf_offload.training.replayed import rebuild

        found = MezoLog.load(log)
        count = len(found.rows) if steps is None else steps
        with progress_bar() as progress:
            task = progress.add_task("Replaying", total=count)
            rebuild(found, initial, target, steps, on_step=lambda step: progress.update(task, completed=step))
    checked = " and checked" if found.final and count == len(found.rows) else ""
    write(f"{count} steps replayed{checked}: {target}")
