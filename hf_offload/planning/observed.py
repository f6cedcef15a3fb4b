"""What planning sees of the engine while it trains."""

import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from hf_offload.errors import OffloadConfigError


class ObservedEngine(Protocol):
    """What feedback needs of the engine."""

    observer: Any

    def resident_bytes(self) -> int:
        """Bytes of saved tensors that it holds in memory now."""
        ...

    def resident_storages(self) -> Iterable[torch.UntypedStorage]:
        """That memory."""
        ...

    def waited_s(self) -> float:
        """Seconds it has kept the training waiting since the session began."""
        ...

    def bandwidth(self) -> Mapping[str, tuple[float, float]]:
        """Bytes a second that each tier stored and loaded so far; zero where unknown."""
        ...

    def handled(self) -> tuple[float, int]:
        """Seconds that the training's threads were busy with tensors that move, without waits, and bytes of these."""
        ...

    def made_graph(self) -> bool:
        """Whether a backward has made a graph of itself since this was asked last."""
        ...

    @property
    def awaits_backward(self) -> bool:
        """Whether another forward now joins those whose backward has not begun."""
        ...


class OneForward:
    """Tells a forward that begins while another thread runs one, and one that was broken off: by an error, or by Ctrl-C."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None  # in which one has begun
        self._handled = 0  # id of the error that this thread was handling then
        self._is_broken_off = False

    @property
    def is_running(self) -> bool:
        """Whether one runs now."""
        return self._thread is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether one runs in another thread now."""
        thread = self._thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def refusal(self) -> OffloadConfigError:
        """What is said of another one meanwhile, under a plan that cannot have both."""
        return OffloadConfigError(
            f"tier='auto' plans for one forward at a time, and {threading.current_thread().name} has begun one while "
            "another thread runs one: set tier='ram' or tier='ssd' where several threads train a model at once."
        )

    def begin(self) -> bool:
        """A forward begins in this thread. Returns whether the one before it was broken off."""
        this = threading.current_thread()
        is_broken_off = self._is_broken_off or self._thread is not None
        self._thread, self._handled, self._is_broken_off = this, id(sys.exception()), False
        return is_broken_off

    def end(self) -> None:
        """A forward has ended in this thread, maybe by an error, which is being handled then."""
        if self._thread is threading.current_thread():
            self._thread = None
            self._is_broken_off = id(sys.exception()) != self._handled
