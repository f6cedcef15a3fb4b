"""The command ``hf-offload``."""

import typer

from hf_offload.cli.bench import bench
from hf_offload.cli.doctor import doctor
from hf_offload.cli.train import train

app = typer.Typer(
    name="hf-offload",
    help="Train with activations on RAM or NVMe, with gradients that are exact to the last bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(doctor)
app.add_typer(bench, name="bench")
