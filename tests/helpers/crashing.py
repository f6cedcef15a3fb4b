"""Functions of a seed that may crash their process."""

import faulthandler
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.loaded_processes import START_METHOD, load
from tests.helpers.seed_search import attempt


class Crashing:
    """Calls ``run`` in a process beside this one, for as many seeds as it survives. A seed that ends it, or takes longer than
    ``timeout_s``, has failed.
    """

    def __init__(self, run: Callable[[int], list[str]], timeout_s: float = 120):
        self._run = run
        self._timeout_s = timeout_s
        self._process: Any = None
        self._pipe: Any = None
        self._trace = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - until the end

    def __enter__(self) -> "Crashing":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._trace.close()

    def __call__(self, seed: int) -> list[str]:
        if self._process is None:
            self._start()
        self._pipe.send(seed)
        try:
            if self._pipe.poll(self._timeout_s):
                return self._pipe.recv()
            problem = f"it took longer than {self._timeout_s} s"
        except EOFError:
            self._process.join()
            trace = Path(self._trace.name).read_text()[:3000]
            problem = f"the process ended with {self._process.exitcode}: {trace}"
        self._end()
        return [problem]

    def _start(self) -> None:
        load()
        context = multiprocessing.get_context(START_METHOD)
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._run, other, self._trace.name), daemon=True)
        self._process.start()
        other.close()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()
            self._pipe.close()


def _serve(run: Callable[[int], list[str]], pipe: Any, trace: str) -> None:
    import torch

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    file = Path(trace).open("w")  # noqa: SIM115 - until the end
    faulthandler.enable(file)
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(attempt(run, seed))
