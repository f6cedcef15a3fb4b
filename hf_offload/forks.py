"""What happens around a fork of this process: one handler for the package, from the first use on.

Python can neither list nor take back handlers of forks, so there is a single one, which calls the parts that ask for it.
"""

import os
import threading


class ForkHandler:
    """A part of the package that acts around forks: see :func:`watch_forks`."""

    def before(self) -> None:
        """This thread is about to fork."""

    def after_in_parent(self) -> None:
        """It has forked, in the process that did."""

    def after_in_child(self) -> None:
        """It has forked, in the new process, which has this thread alone."""


_lock = threading.Lock()
_handlers: list[ForkHandler] = []


def watch_forks(handler: ForkHandler) -> None:
    """Call ``handler`` around all forks from now on. Idempotent."""
    if not hasattr(os, "register_at_fork"):
        return
    with _lock:
        if not _handlers:
            os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
        if handler not in _handlers:
            _handlers.append(handler)


def _before() -> None:
    for handler in _handlers:
        handler.before()


def _after_in_parent() -> None:
    for handler in _handlers:
        handler.after_in_parent()


def _after_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held the old one
    for handler in _handlers:
        handler.after_in_child()
