"""The package's threads, as a test sees them."""

import threading


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
