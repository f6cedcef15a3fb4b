"""Run a training script that knows nothing of this package, with offloading::

    python -m hf_offload.run train.py --epochs 3
    HF_OFFLOAD_TIER=ssd accelerate launch --config_file c.yaml -m hf_offload.run train.py --epochs 3

Whatever the script prepares with an ``Accelerator``, its own or the Trainer's, is offloaded as the variables
``HF_OFFLOAD_*`` say (:mod:`hf_offload.settings.environment`). ``-m`` in front of a name runs a module.
"""

import builtins
import importlib.util
import logging
import os
import runpy
import sys
import types
from pathlib import Path

from hf_offload.autoload import exit_from_script, exit_with, show_log, switch_on
from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.parents import end_with_parent
from hf_offload.settings.environment import AUTOLOAD_VARIABLE, settings_with
from hf_offload.settings.schema import OffloadConfig

logger = logging.getLogger("hf_offload.run")

_COMMAND = "python -m hf_offload.run"
_USAGE = f"Usage: {_COMMAND} [-m] SCRIPT [ARGUMENTS]..."


def main() -> None:
    """Run what the command line names, as ``python`` would, with offloading switched on."""
    end_with_parent()
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{_USAGE}\n\n{__doc__}\n")
        return
    is_module = arguments[:1] == ["-m"]
    program, *rest = arguments[is_module:] or [""]
    os.environ.pop(AUTOLOAD_VARIABLE, None)  # it would try to switch on a second time
    try:
        config = _checked(program, is_module)
    except OffloadError as error:
        exit_with(error)
    show_log()
    switch = switch_on(config)
    sys.argv = [program, *rest]
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            _run_file(program)
    except OffloadError as error:
        _note_exit(error.exit_code)
        exit_from_script(error)
    except SystemExit as end:
        if end.code not in (None, 0):
            _note_exit(end.code)
            raise
    if not switch.offloaded_models:
        logger.warning(
            "Nothing was offloaded: %s prepared no model for training with an Accelerator or a Trainer. In a loop of "
            "plain PyTorch, use hf_offload.offload_activations().",
            program,
        )
    switch.report()
    switch.off()


def _checked(program: str, is_module: bool) -> OffloadConfig:
    if not program:
        raise OffloadConfigError(f"There is nothing to run. {_USAGE}")
    if is_module and importlib.util.find_spec(program.partition(".")[0]) is None:
        raise OffloadConfigError(f"{_COMMAND}: no module named {program}")
    if not is_module and not Path(program).is_file():
        raise OffloadConfigError(f"{_COMMAND}: no such file: {program}")
    return settings_with({}, "The process")[0]


def _run_file(program: str) -> None:
    """As ``python program``: unlike :mod:`runpy`, with the name of the file as given in ``sys.argv`` and whole in
    ``__file__``, and with a module that stays until the process ends.
    """
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(program).resolve().parent)
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(script).update(__file__=str(Path(program).absolute()), __builtins__=builtins)
    exec(compile(Path(program).read_bytes(), program, "exec"), vars(script))


def _note_exit(code: object) -> None:
    """A script that fails leaves its snapshot."""
    ended = sys.modules.get("hf_offload.snapshots.ended")
    if ended is not None:
        ended.note_exit(code)


if __name__ == "__main__":
    main()
