"""Processes that end with the one that started them, however that ends: a killed launcher leaves no training behind."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hf_offload.settings.environment import PARENT_VARIABLE

GRACE_S = 30.0
"""How long a process that ignores SIGTERM, or takes its time to end, outlives its parent."""
_LOOK_S = 1.0
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


def end_with_parent(grace_s: float = GRACE_S) -> None:
    """Have this process sent SIGTERM when its parent ends, and SIGKILL ``grace_s`` later; now, if the one in the environment
    has ended already.
    """
    boot, _, pid = os.environ.pop(PARENT_VARIABLE, "").rpartition(":")
    if sys.platform != "linux" or not boot or boot != _boot():  # nothing is known of processes of another machine
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    ended = parent != int(pid) and not _runs(int(pid))
    kill = threading.Thread(target=_kill_after, args=(None if ended else parent, grace_s), daemon=True)
    kill.start()
    if ended:
        os.kill(os.getpid(), signal.SIGTERM)


def _kill_after(parent: int | None, grace_s: float) -> None:
    """End this process ``grace_s`` after ``parent`` (None: which has ended), whatever its program does with signals."""
    while parent is not None and os.getppid() == parent:
        time.sleep(_LOOK_S)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)


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
