"""Closing a session whose model is freed while it is attached: by an interrupted training, or at the end of a function.

Note: who holds the model
    No part of a session does: the model would never be freed. Its hooks hold the session, not the other way round; whatever
    has to find the model or a part of it again keeps a weak reference. So a model goes when its user drops it, with hooks and
    all, and threads, files and pinned memory are given back. Graphs that are still alive keep what their backward needs
    (:meth:`~hf_offload.engine.transfer.Transfer.close_when_unused`), and the session its counters, for its user.
"""

import _thread
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial

from torch import nn


class ModelWatch:
    """Calls ``close`` in a thread of its own once ``model`` has gone, unless :meth:`end` comes first.

    ``leave_thread`` is called before, in the thread in which the model goes. That may be inside any allocation and under any
    lock, so it must take none; ``close`` may wait.
    """

    def __init__(self, model: nn.Module, leave_thread: Callable[[], None], close: Callable[[], None]):
        self._words: queue.SimpleQueue[object] = queue.SimpleQueue()
        # Held by the thread alone: among the garbage that goes with the model, they would not be called. The end of the
        # model is reported by a C function, which Ctrl-C cannot interrupt; the other one is called before it.
        deaths = weakref.ref(model, self._words.put), weakref.ref(model, partial(_leave, self._words, leave_thread))
        self._thread = threading.Thread(
            target=_wait, args=(self._words, deaths, close), name="hf_offload-watch", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Watch no longer. Waits for ``close`` if it has begun. Idempotent."""
        self._words.put(_END)
        self.join()

    def join(self) -> None:
        """Wait until ``close`` has been called, or :meth:`end`."""
        self._thread.join()


_END, _INTERRUPTED = object(), object()
_is_finalizing = sys.is_finalizing  # a name of this module's: at the very end, `sys` may be gone from it


def _leave(words: "queue.SimpleQueue[object]", leave_thread: Callable[[], None], _: object) -> None:
    try:
        if not _is_finalizing():
            leave_thread()
    except KeyboardInterrupt:  # Python discards what is raised here
        words.put(_INTERRUPTED)


def _wait(words: "queue.SimpleQueue[object]", deaths: object, close: Callable[[], None]) -> None:
    while (word := words.get()) is _INTERRUPTED:
        _thread.interrupt_main()
    if word is not _END:
        close()
