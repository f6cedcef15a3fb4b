"""Processes that have loaded the libraries, and nothing else: loading them takes longer than most tests do."""

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

START_METHOD = "forkserver"
_PR_SET_PDEATHSIG = 1
_CONTEXT = multiprocessing.get_context(START_METHOD)
_CONTEXT.set_forkserver_preload(
    ["transformers.trainer", "transformers.models.llama.modeling_llama", "hf_offload.integrations.arguments"]
)


def run_in_loaded_process(
    work: Callable[..., object], *arguments: object, output: Path, environment: Mapping[str, str] = os.environ
) -> int:
    """Exit code of a process that calls ``work`` in ``environment``, with stdout and stderr in the file ``output``."""
    process = _CONTEXT.Process(target=_run, args=(work, arguments, output, dict(environment)))
    process.start()
    try:
        process.join()
    finally:
        if process.is_alive():  # the test took too long
            process.kill()
    assert process.exitcode is not None
    return process.exitcode


def _run(work: Callable[..., object], arguments: tuple[object, ...], output: Path, environment: dict[str, str]) -> None:
    # The process that this one is forked from ends with the tests.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        work(*arguments)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
