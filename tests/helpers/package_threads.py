"""The package's threads and files, as a test sees them."""

import contextlib
import threading
from pathlib import Path


class OurThreads:
    """Those that started after this was made: another test's model may still be there, and with it its session."""

    def __init__(self):
        self._before = set(threading.enumerate())

    def running(self):
        return [
            thread
            for thread in threading.enumerate()
            if thread.name.startswith("hf_offload") and thread not in self._before
        ]

    def join(self, timeout_s):
        """Wait for all of them; fails if one goes on."""
        for thread in self.running():
            thread._started.wait(timeout_s)  # one that has just been made cannot be joined
            thread.join(timeout_s)
        assert self.running() == []


def open_files(directory):
    """Files that this process keeps open under ``directory``, without names: their room on the drive is taken."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.append(str(link.readlink()))
    return [name for name in found if name.startswith(str(directory))]
