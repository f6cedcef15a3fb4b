"""Keeps signal handlers out of code that must not be left half done.

Note: Ctrl-C inside the engine
    Python runs signal handlers in the main thread, between any two instructions, and Ctrl-C's raises. An exception between
    two counters, or between a lock and the ``try`` that releases it, would leave room, bytes or a lock behind for good. So
    the engine and the tiers do their bookkeeping in a section, ``with signals_deferred:``, in which a handler only notes its
    signal; it runs when the outermost section ends, and where a section waits (:meth:`_Deferral.deliver`).
    Callbacks of weak references are no place for a section: what is raised before it begins is discarded by Python. They are
    functions of C, which run no handlers.
"""

import importlib
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

# What the module `signal` wraps: signal.signal() turns its arguments into enums and back, which takes twenty times as long.
_signal = importlib.import_module("_signal")

_SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
_Handler = Callable[[int, FrameType | None], object]


class _Deferral:
    """A section without signal handlers, in the main thread; elsewhere none runs anyway. Sections may be nested.

    Nothing is installed for longer than a section: outside, the process's handlers are whatever its owner has set.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, _Handler] = {}  # to be put back
        self._arrived: set[int] = set()

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            if self._depth == 0:
                self._hold()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self._depth -= 1
            if self._depth == 0:
                self._release()

    @property
    def is_on(self) -> bool:
        """Whether this thread is in a section."""
        return self._depth > 0 and threading.get_ident() == threading.main_thread().ident

    def deliver(self) -> None:
        """Run the handlers of the signals that have arrived: the section can be left here by what they raise."""
        if self._arrived and self.is_on:
            try:
                self._release()
            finally:
                self._hold()

    def _hold(self) -> None:
        try:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):  # else the process ends, or nothing happens
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        except BaseException:  # of a handler that was not held yet
            self._release()
            raise

    def _release(self) -> None:
        handlers, self._handlers = self._handlers, {}
        try:
            try:
                for number, handler in handlers.items():
                    _signal.signal(number, handler)
            except BaseException:  # of a handler that was back already
                for number, handler in handlers.items():
                    _signal.signal(number, handler)
                raise
        finally:
            arrived, self._arrived = self._arrived, set()
            if arrived:
                _run([(handlers[number], number) for number in arrived])

    def _note(self, number: int, _: FrameType | None) -> None:
        self._arrived.add(number)


def _run(handlers: list[tuple[_Handler, int]]) -> None:
    """All of them, also after one that raises. No error is kept: its traceback would hold this frame, and it the error."""
    handler, number = handlers.pop()
    try:
        handler(number, sys._getframe())
    finally:
        if handlers:
            _run(handlers)


signals_deferred = _Deferral()
"""One for the process, as its handlers are."""
