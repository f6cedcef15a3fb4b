"""Run a training script that knows nothing of this package, with offloading::

    python -m hf_offload.run train.py --epochs 3
    HF_OFFLOAD_TIER=ssd accelerate launch --config_file c.yaml -m hf_offload.run train.py --epochs 3

Whatever the script prepares with an ``Accelerator``, its own or the Trainer's, is offloaded as the variables
``HF_OFFLOAD_*`` say (:mod:`hf_offload.settings.environment`). ``-m`` in front of a name runs a module.
"""

import logging
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hf_offload.cli.console import clear_errors, visible_log
from hf_offload.cli.exit_codes import EXIT_REFUSED
from hf_offload.errors import OffloadConfigError
from hf_offload.parents import end_with_parent
from hf_offload.settings.environment import AUTOLOAD_VARIABLE

if TYPE_CHECKING:
    from hf_offload.integrations.accelerate import switch_on

logger = logging.getLogger(__name__)

_USAGE = "Usage: python -m hf_offload.run [-m] SCRIPT [ARGUMENTS]..."


def main() -> None:
    """Run what the command line names, as ``python`` would, with offloading switched on."""
    end_with_parent()
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        typer.echo(f"{_USAGE}\n\n{__doc__}")
        return
    is_module = arguments[:1] == ["-m"]
    program, *rest = arguments[is_module:] or [""]
    os.environ.pop(AUTOLOAD_VARIABLE, None)  # it would try to switch on a second time
    first = os.environ.get("RANK", "0") == "0"
    with visible_log(logging.INFO if first else logging.WARNING):
        try:
            with clear_errors():
                switch = _switch_on(program, is_module)
        except typer.Exit as refused:
            sys.exit(refused.exit_code or EXIT_REFUSED)
        try:
            sys.argv = [program, *rest]
            if is_module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(program).resolve().parent)
                runpy.run_path(program, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                from hf_offload.snapshots import ended

                ended.note_exit(end.code)
                raise
        if not switch.offloaded_models:
            logger.warning(
                "Nothing was offloaded: %s prepared no model for training with an Accelerator or a Trainer. In a loop of "
                "plain PyTorch, use hf_offload.offload_activations().",
                program,
            )
        switch.report()
        switch.off()


def _switch_on(program: str, is_module: bool) -> "switch_on":
    if not program:
        raise OffloadConfigError(f"There is nothing to run. {_USAGE}")
    if not is_module and not Path(program).is_file():
        raise OffloadConfigError(f"There is no script {program!r}. {_USAGE}")
    from hf_offload.integrations.accelerate import OffloadPlugin, switch_on

    return switch_on(OffloadPlugin())


if __name__ == "__main__":
    main()
