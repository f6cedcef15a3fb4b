"""How long a device computes in a step that is measured."""

import time
from collections.abc import Callable

import torch

from hf_offload.storage.handling import Handling


class ComputeClock:
    """Seconds of compute on a device, from when this is made, without what ``waited_s`` and the ``own`` account say.

    What moves bytes meanwhile takes none of them: copies have ended when the clock starts, and only the compute stream is
    waited for when it stops.
    """

    def __init__(self, device: torch.device, waited_s: Callable[[], float], own: Handling):
        self._device = device
        self._waited_s = waited_s
        self._own = own
        self._began_s = self._now()

    def elapsed(self) -> float:
        """Since this was asked last."""
        if self._device.type == "cpu":
            now = self._now()
            seconds, self._began_s = now - self._began_s, now
        else:
            # Kernels run behind the host's back: what they take is known when they are done.
            torch.accelerator.current_stream(self._device).synchronize()
            seconds = self._now() - self._began_s
            torch.accelerator.synchronize(self._device)
            self._began_s = self._now()
        return max(0.0, seconds)

    def _now(self) -> float:
        return time.perf_counter() - self._waited_s() - self._own.total_s
