"""Processes that end with the one that started them, however that ends: a killed launcher leaves no training behind."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from hf_offload.settings.environment import PARENT_VARIABLE

_PR_SET_PDEATHSIG = 1
# Before the program, in its process. The number of the parent is compared afterwards: it may have ended before.
_BIND_AND_RUN = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.execvp(sys.argv[2], sys.argv[2:]) if os.getppid() == int(sys.argv[1]) else sys.exit(1)"
)


def bound(command: Sequence[str]) -> list[str]:
    """``command`` as one that is killed when this process ends. Start it from the main thread: the kernel looks at that."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _BIND_AND_RUN, str(os.getpid()), *command]


def end_with_parent() -> None:
    """Have a process of ``hf-offload launch``, which sets the variable, sent SIGTERM when its parent ends."""
    if os.environ.pop(PARENT_VARIABLE, "") and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
