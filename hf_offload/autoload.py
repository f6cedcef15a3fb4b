"""With ``HF_OFFLOAD_AUTOLOAD=1``, ``accelerate launch`` is ``hf-offload launch``.

PyTorch calls :func:`start` at the end of ``import torch`` (entry points of the group ``torch.backends``), in every process
that has this package installed. Without the variable, it looks at it and does nothing else.
"""

import os
import sys
from pathlib import Path

_LAUNCHERS = ("accelerate", "accelerate.commands.accelerate_cli")
_LAUNCH = ("accelerate-launch", "accelerate.commands.launch")


def start() -> None:
    """Become ``hf-offload launch`` if this process is accelerate's launcher, and the variable is set."""
    if os.environ.get("HF_OFFLOAD_AUTOLOAD", "0") == "0":
        return
    # The file or module that this process runs: in front of its arguments. While Python looks for a module, torch is
    # imported by the packages around it, and sys.argv begins with "-m".
    program, arguments = Path(sys.orig_argv[-len(sys.argv)]).name, sys.argv[1:]
    if program in _LAUNCHERS and arguments[:1] == ["launch"]:
        _become_launch(arguments[1:])
    elif program in _LAUNCH:
        _become_launch(arguments)


def _become_launch(arguments: list[str]) -> None:
    from hf_offload.errors import OffloadConfigError
    from hf_offload.settings.environment import AUTOLOAD_VARIABLE, is_on

    try:
        is_wanted = is_on(AUTOLOAD_VARIABLE)
    except OffloadConfigError:
        is_wanted = True  # the command shows the error
    if is_wanted:
        # -P: as in accelerate's command, no file in the working directory stands in for a module.
        os.execv(sys.executable, [sys.executable, "-P", "-m", "hf_offload", "launch", *arguments])
