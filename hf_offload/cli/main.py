"""The command ``hf-offload``."""

import logging
import warnings
from typing import Annotated

import typer

import hf_offload
from hf_offload.allocator import restart_with_allocator
from hf_offload.cli.bench import bench
from hf_offload.cli.console import write
from hf_offload.cli.doctor import doctor
from hf_offload.cli.launch import EPILOG, METAVAR, PASSED_ON, config, launch_script
from hf_offload.cli.plan import plan
from hf_offload.cli.recipes import recipes
from hf_offload.cli.replay import replay
from hf_offload.cli.train import train

EXIT_STATUS = (
    "Exit status: 0 after success; 2 if settings or arguments are refused, and nothing was begun; 1 after an error on the "
    "way, or where a check did not pass; 130 after Ctrl-C. launch ends with the status of its script."
)

app = typer.Typer(
    name="hf-offload",
    help="Train with activations in RAM or on NVMe drives, with gradients that are exact to the last bit.",
    epilog=EXIT_STATUS,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _say_version(asked: bool) -> None:
    if asked:
        write(f"hf-offload {hf_offload.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_say_version, is_eager=True)
    ] = False,
) -> None: ...


app.command()(train)
app.command()(plan)
app.command()(doctor)
app.command("launch", context_settings=PASSED_ON, epilog=EPILOG, options_metavar=METAVAR)(launch_script)
app.command()(config)
app.command()(replay)
app.add_typer(bench, name="bench")
app.add_typer(recipes, name="recipes")


def main() -> None:
    """Run the command. One that trains restarts with the allocator that suits it, once its settings were checked."""
    _silence_others()
    app(obj=restart_with_allocator)


def _silence_others() -> None:
    """Leave out what other libraries say about themselves to everyone who loads them."""
    # It recommends a faster kernel for 4-bit weights on a CPU.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # Torch uses in torch.utils.mkldnn what it has deprecated.
    warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
    # It takes the loss that every GPT-2 has.
    logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "`loss_type=" not in str(record.msg))
