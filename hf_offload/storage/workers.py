"""Threads that run transfers."""

import collections
import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class WorkerPool:
    """Daemon threads that take jobs from one queue.

    Threads start at the first :meth:`submit`, so a pool that is never used costs nothing. A job reports its own outcome
    (it sets a future); one that raises anyway is logged and the thread goes on. Jobs must not wait for other jobs.
    ``initializer`` is called at the start of each thread.
    """

    def __init__(self, name: str, threads: int, initializer: Callable[[], None] = lambda: None):
        if threads < 1:
            raise ValueError(f"WorkerPool {name!r}: threads={threads} must be at least 1.")
        self.name = name
        self.threads = threads
        self._initializer = initializer
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._ready = threading.Condition()
        self._workers: list[threading.Thread] = []
        self._closed = False

    def submit(self, *jobs: Callable[[], None], urgent: bool = False) -> None:
        """Queue the jobs in the given order, before everything that waits if ``urgent``. A closed pool drops them."""
        with self._ready:
            if self._closed:
                return
            if urgent:
                self._jobs.extendleft(reversed(jobs))
            else:
                self._jobs.extend(jobs)
            if not self._workers:
                for index in range(self.threads):
                    worker = threading.Thread(target=self._run, name=f"{self.name}-{index}", daemon=True)
                    self._workers.append(worker)
                    worker.start()
            self._ready.notify(len(jobs))

    def close(self, *, wait: bool = True) -> None:
        """Drop what is queued and end the threads, after the jobs that run now. Idempotent.

        Safe to call from one of the pool's own threads, which then ends by itself once its job has returned.
        """
        with self._ready:
            self._closed = True
            self._jobs.clear()
            workers, self._workers = self._workers, []
            self._ready.notify_all()
        if wait:
            for worker in workers:
                if worker is not threading.current_thread():
                    worker.join()

    def _run(self) -> None:
        self._initializer()
        while True:
            with self._ready:
                while not self._jobs and not self._closed:
                    self._ready.wait()
                if self._closed:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except BaseException:
                logger.exception("A job of the worker pool %s failed without reporting it.", self.name)
            # While this thread waits for the next job, the variable would keep the last job's buffer alive.
            del job
