"""Processes that end with the one that started them, however that ends: a killed launcher leaves no training behind."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

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


def parent_variables() -> dict[str, str]:
    """What :func:`end_with_parent` of a process that is started by others, but in this one's name, looks for."""
    return {PARENT_VARIABLE: f"{_boot()}:{os.getpid()}"}


def end_with_parent() -> None:
    """Have this process sent SIGTERM when its parent ends; now, if the one in the environment has ended already."""
    boot, _, pid = os.environ.pop(PARENT_VARIABLE, "").rpartition(":")
    if sys.platform != "linux" or not boot or boot != _boot():  # nothing is known of processes of another machine
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(pid) and not _runs(int(pid)):
        os.kill(os.getpid(), signal.SIGTERM)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
