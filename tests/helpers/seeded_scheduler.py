"""The engine's threads, of which one runs at a time: a seed chooses which, at every point where a thread could be overtaken.

One seed is always one run. Whoever waits (for a future, a lock, room in the ring) goes on once what it waits for is so.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from unittest.mock import patch

from hf_offload.engine import ring, staged, transfer
from tests.helpers import controlled_tier
from tests.helpers.simulated_device import POISON

_PINNED_RING = ring.PinnedRing


class Stuck(AssertionError):
    """Everybody waits for somebody else."""


class _Stopped(BaseException):
    """The run is over."""


class _Task:
    """A thread, as the one that hands on the baton sees it."""

    def __init__(self) -> None:
        self.baton = threading.Semaphore(0)
        self.waits_for: Callable[[], bool] | None = None

    @property
    def ready(self) -> bool:
        return self.waits_for is None or self.waits_for()


class Workers:
    """The training thread, which makes this object, and all worker pools of a run."""

    def __init__(self, rng: random.Random):
        self._random = rng
        self._training = self._running = _Task()
        self._tasks = [self._training]
        self._threads: list[threading.Thread] = []
        self._stuck = self._over = False
        self.faults: list[str] = []
        self.trace: list[str] | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Everything that the engine starts inside the block runs here."""
        workers = self

        class Promise(Future):
            def result(self, timeout=None):
                workers.wait_until(self.done)
                return super().result(0)

        class Pool(_Pool):
            def __init__(self, name, threads, initializer=None):
                super().__init__(workers, name, threads)

        class Ring(_PINNED_RING):
            def __init__(self, capacity_bytes, pinned=True):
                super().__init__(capacity_bytes, pinned=False)  # pinned memory needs a driver
                self._room = _Room(workers)

            def release(self, buffer):
                buffer.fill_(POISON)  # as whoever gets it next may do at once
                super().release(buffer)

        with contextlib.ExitStack() as stack:
            for module in (staged, controlled_tier):
                stack.enter_context(patch.object(module, "WorkerPool", Pool))
            stack.enter_context(patch.object(ring, "Future", Promise))
            stack.enter_context(patch.object(staged, "PinnedRing", Ring))
            stack.enter_context(
                patch.object(
                    transfer.Transfer,
                    "_wait_for",
                    lambda _, end: self.wait_until(end.done if isinstance(end, Future) else end.is_set),
                )
            )
            try:
                yield
            finally:
                self._stop()

    def lock(self) -> "_Lock":
        """Instead of a ``threading.RLock``."""
        return _Lock(self)

    def turn(self) -> None:
        """The running thread may be overtaken here."""
        if self._random.random() < 0.5:
            self._hand_on()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Let others run until ``condition`` holds."""
        me = self._running
        while not condition():
            me.waits_for = condition
            try:
                self._hand_on()
            finally:
                me.waits_for = None

    def finish(self) -> None:
        """Until nobody has anything left to do."""
        self.wait_until(lambda: not any(task.ready for task in self._tasks if task is not self._training))

    def start(self, work: Callable[[], None], waits_for: Callable[[], bool]) -> None:
        task = _Task()
        task.waits_for = waits_for

        def run():
            task.baton.acquire()
            task.waits_for = None
            with contextlib.suppress(_Stopped):
                work()

        thread = threading.Thread(target=run, name=f"hf_offload-simulated-{len(self._tasks)}", daemon=True)
        self._tasks.append(task)
        self._threads.append(thread)
        thread.start()

    def _hand_on(self) -> None:
        me = self._running
        ready = [task for task in self._tasks if task.ready]
        if not ready:
            self._stuck = True
            ready = [self._training]
        self._running = self._random.choice(ready)
        if self._running is not me:
            if self.trace is not None:
                self.trace.append(f"thread {self._tasks.index(self._running)}")
            self._running.baton.release()
            me.baton.acquire()
        if self._over:
            raise _Stopped
        if self._stuck and me is self._training:
            raise Stuck("everybody waits for somebody else")

    def _stop(self) -> None:
        self._over = True
        for task in self._tasks:
            task.baton.release()
        for thread in self._threads:
            thread.join()


class _Pool:
    """Stands in for :class:`~hf_offload.storage.workers.WorkerPool`."""

    def __init__(self, workers: Workers, name: str, threads: int):
        self.name = name
        self.threads = threads
        self._workers = workers
        self._jobs: list[Callable[[], None]] = []
        self._busy = 0
        self._started = self._closed = False

    def submit(self, *jobs: Callable[[], None], urgent: bool = False) -> None:
        if self._closed:
            return
        self._jobs = [*jobs, *self._jobs] if urgent else [*self._jobs, *jobs]
        if not self._started:
            self._started = True
            for _ in range(self.threads):
                self._workers.start(self._work, lambda: bool(self._jobs))

    def close(self, *, wait: bool = True) -> None:
        self._closed = True
        self._jobs = []
        if wait:
            self._workers.wait_until(lambda: self._busy == 0)

    def _work(self) -> None:
        while True:
            self._workers.wait_until(lambda: bool(self._jobs))
            job = self._jobs.pop(0)
            self._busy += 1
            try:
                job()
            except Exception as error:
                self._workers.faults.append(f"a job of the pool {self.name} failed: {error!r}")
            finally:
                self._busy -= 1
            del job


class _Lock:
    """Stands in for a re-entrant lock."""

    def __init__(self, workers: Workers):
        self._workers = workers
        self._owner: _Task | None = None
        self._depth = 0

    def __enter__(self):
        me = self._workers._running
        self._workers.wait_until(lambda: self._owner in (None, me))
        self._owner = me
        self._depth += 1

    def __exit__(self, *exc):
        self._depth -= 1
        if self._depth == 0:
            self._owner = None


class _Room:
    """Stands in for the condition that the ring waits on."""

    def __init__(self, workers: Workers):
        self._workers = workers

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def wait_for(self, condition, seconds):
        self._workers.wait_until(condition)
        return True

    def notify_all(self):
        pass
