"""``hf-offload launch``, and ``hf-offload config``, which writes its files."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.prompt import Confirm, IntPrompt, Prompt

from hf_offload.cli.console import clear_errors, messages, output, visible_log
from hf_offload.errors import EXIT_REFUSED
from hf_offload.integrations.launch import SECTION, default_config, find_config, launch, read_config, shipped_configs
from hf_offload.settings.classes import from_mapping
from hf_offload.settings.environment import RESUME_VARIABLE
from hf_offload.settings.outputs import check_output_file
from hf_offload.settings.schema import TIERS, TILED, OffloadConfig
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


_STARTS = {
    "single": "one process",
    "ddp": "several GPUs, a copy of the model on each (DDP)",
    "fsdp2": "several GPUs, the model in shards (FSDP2)",
    "zero2": "DeepSpeed ZeRO-2",
    "zero3": "DeepSpeed ZeRO-3",
    "context_parallel": "several GPUs, a part of every row on each (context parallelism)",
}


def config(
    file: Annotated[
        Path | None,
        typer.Option("--config_file", metavar="FILE", help="File to write. Default: where `hf-offload launch` looks."),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Print the path of a shipped config file, such as fsdp2, and exit."),
    ] = None,
) -> None:
    """Ask how to train and offload, and write a config file for `hf-offload launch`."""
    with clear_errors():
        if where is not None:
            typer.echo(find_config(where))
            return
        target = file or default_config()
        check_output_file(target, "--config_file")
        values = _ask()
        write_whole(target, dump_yaml(values))
        chosen = "" if file is None else f" --config_file {target}"
        output().print(
            f"Wrote {target}. Start with:\n  hf-offload launch{chosen} train.py", highlight=False, soft_wrap=True
        )


def _ask() -> dict[str, Any]:
    for name, meaning in _STARTS.items():
        output().print(f"  [bold]{name}[/]: {meaning}", highlight=False)
    start = _choose("How do you train?", _STARTS, "single")
    values = read_config(find_config(start))
    if start != "single":
        values["num_processes"] = IntPrompt.ask("How many processes?", default=2)
        if start == "context_parallel":
            values["parallelism_config"]["parallelism_config_cp_size"] = values["num_processes"]
    else:
        values["use_cpu"] = Confirm.ask("On a CPU only?", default=False)
    values["mixed_precision"] = _choose("Mixed precision?", ("no", "bf16", "fp16"), values["mixed_precision"])
    tier = _choose("Where do activations go? auto: as a memory budget needs", TIERS, values[SECTION]["tier"])
    section: dict[str, Any] = {"tier": tier}
    if tier in ("ssd", "auto"):
        section["directory"] = Prompt.ask(
            "Directory on an SSD (empty: the temporary folder; with auto on a GPU, none)", default=""
        )
    if tier == "auto":
        section["memory_budget"] = Prompt.ask(
            "Memory budget, such as 20GiB (empty: 90 % of what the device can give)", default=""
        )
    if tier != "none":
        section["ram_budget"] = Prompt.ask(
            "Most RAM to use, such as 64GiB (empty: on a GPU 60 % of what is available)", default=""
        )
    section["tiled_loss"] = _choose("Compute the loss in pieces, without all logits?", TILED, "off")
    values[SECTION] = {name: value for name, value in section.items() if value not in ("", "off")}
    from_mapping(OffloadConfig, values[SECTION], "answers")
    return values


def _choose(question: str, choices: Iterable[str], default: str) -> str:
    return Prompt.ask(question, choices=list(choices), default=default)
