"""Keeps signal handlers out of code that must not be left half done.

Note: Ctrl-C inside the engine
    Python runs signal handlers in the main thread, between any two instructions, and Ctrl-C's raises. An exception between
    two counters, or between a lock and the ``try`` that releases it, would leave room, bytes or a lock behind for good. So
    what PyTorch and the user call (pack, unpack, hooks of modules and gradients, steps, the methods of a tier) is an entry
    point, ``@signals_deferred``: inside of one, a handler only notes its signal. It runs when the outermost entry point
    returns, and where that waits (:meth:`_Deferral.deliver`). What is called only by entry points does not think of signals.
    Where a part of a function, or of a context, is to be safe, that is a section, ``with signals_deferred:``.
    PyTorch's modes (gradients, autocast, hooks of saved tensors, dispatch) are switched by Python code, and a signal in the
    middle of that leaves them switched, for the rest of the process. So functions that switch them are entry points, too, of
    a module or a piece of the loss at a time.
    Callbacks of weak references are no place for a section: what is raised before it begins is discarded by Python. They are
    functions of C, which run no handlers. Where one has to be more (watch.py), it looks out for what is raised itself.
"""

import functools
import importlib
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar, cast

# What the module `signal` wraps: signal.signal() turns its arguments into enums and back, which takes twenty times as long.
_signal = importlib.import_module("_signal")

_SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
_Handler = Callable[[int, FrameType | None], object]
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Held:
    """The handlers that one section has taken, and the signals that have come since."""

    __slots__ = ("_arrived", "_handlers", "outer")

    def __init__(self, outer: "_Held | None") -> None:
        self.outer = outer
        self._handlers: dict[int, _Handler] = {}  # to be put back
        self._arrived: set[int] = set()

    @property
    def has_signals(self) -> bool:
        """Whether one has come."""
        return bool(self._arrived)

    def take(self) -> None:
        """Note the signals from now on."""
        handlers, note, handler_of = self._handlers, self._note, _signal.getsignal
        for number in _SIGNALS:
            handler = handler_of(number)
            if callable(handler):  # else the process ends, or nothing happens
                handlers[number] = handler
                _signal.signal(number, note)

    def give_back(self) -> None:
        """Put the handlers back, and run those of the signals that have come."""
        try:
            _put_back(list(self._handlers.items()))
        finally:
            if self._arrived:
                handlers, self._handlers = self._handlers, {}
                arrived, self._arrived = self._arrived, set()
                _run([(handlers[number], number) for number in arrived])

    def _note(self, number: int, _: FrameType | None) -> None:
        self._arrived.add(number)


class _Deferral:
    """A section without signal handlers, in the main thread; elsewhere none runs anyway. Sections may be nested.

    Nothing is installed for longer than a section: outside, the process's handlers are whatever its owner has set.

    While handlers are taken or put back, the garbage collector can run a finalizer, or a signal its handler, with a section
    of its own: it takes what it finds, which may be the other's note, and has put it back when the other one goes on.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._held: _Held | None = None

    def __call__(self, function: _Function) -> _Function:
        """An entry point: ``function`` in a section of its own, unless one is on or the thread is another."""

        @functools.wraps(function)
        def entry_point(*args: Any, **kwargs: Any) -> Any:
            if self._depth or threading.get_ident() != threading.main_thread().ident:
                return function(*args, **kwargs)
            self._enter()
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return cast(_Function, entry_point)

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self._enter()

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self._leave()

    def _enter(self) -> None:
        if self._depth == 0:
            self._begin()
        self._depth += 1

    def _leave(self) -> None:
        self._depth -= 1
        held = self._held
        if self._depth == 0 and held is not None:
            # Not deeper in calls than the beginning was: at the limit of recursion, what was taken can be put back.
            try:
                held.give_back()
            finally:
                self._held = held.outer

    @property
    def is_on(self) -> bool:
        """Whether this thread is in a section."""
        return self._depth > 0 and threading.get_ident() == threading.main_thread().ident

    def deliver(self) -> None:
        """Run the handlers of the signals that have arrived: the section can be left here by what they raise."""
        held = self._held
        if held is not None and held.has_signals and self.is_on:
            depth, self._depth = self._depth, 0  # a handler's sections are its own
            try:
                try:
                    held.give_back()
                finally:
                    held.take()
            finally:
                self._depth = depth

    def _begin(self) -> None:
        self._held = held = _Held(self._held)
        try:
            held.take()
        except BaseException:  # of a handler that was not taken yet
            try:
                held.give_back()
            finally:
                self._held = held.outer
            raise


def _put_back(handlers: list[tuple[int, _Handler]]) -> None:
    """All of them, also after one that is back already and raises."""
    try:
        while handlers:
            _signal.signal(*handlers[-1])
            handlers.pop()
    finally:
        if handlers:
            _put_back(handlers)


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
