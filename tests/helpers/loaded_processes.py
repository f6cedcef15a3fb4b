"""Processes that have loaded the libraries, and nothing else: loading them takes longer than most tests do."""

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

START_METHOD = "forkserver"
_PR_SET_PDEATHSIG = 1
_CONTEXT = multiprocessing.get_context(START_METHOD)
_CONTEXT.set_forkserver_preload(
    ["transformers.trainer", "transformers.models.llama.modeling_llama", "hf_offload.integrations.arguments"]
)


def load() -> None:
    """Start the process that the others are forked from, unless it is there."""
    forkserver.ensure_running()


def run_in_loaded_process(
    work: Callable[..., object],
    *arguments: object,
    output: Path,
    errors: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    timeout_s: float | None = None,
) -> int | None:
    """Exit code of a process that calls ``work`` in ``environment``, with stdout in the file ``output``, and stderr there or
    in ``errors``; None for one that took too long, and was killed.
    """
    load()
    process = _CONTEXT.Process(target=_run, args=(work, arguments, output, errors, dict(environment)))
    process.start()
    try:
        process.join(timeout_s)
    finally:
        if is_late := process.is_alive():  # or the test took too long
            process.kill()
            process.join()
    return None if is_late else process.exitcode


def run_python(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] = os.environ,
    timeout: float | None = None,
    **others: object,
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run(command, capture_output=True, text=True)`` where ``command`` is this Python with ``-c`` and code,
    ``-m`` and a module, or a file: but it has loaded the libraries. So it is not for tests of what loads when. What is not
    this Python is run as it is.
    """
    assert others.items() <= {"capture_output": True, "text": True, "check": False}.items()
    if command[0] != sys.executable:
        return subprocess.run(command, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True, check=False)
    words = [str(word) for word in command[1:]]
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        code = run_in_loaded_process(
            _as_python, words, cwd or Path.cwd(), output=output, errors=errors, environment=env, timeout_s=timeout
        )
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess(words, code, output.read_text(), errors.read_text())


def _as_python(words: list[str], folder: Path) -> None:
    os.chdir(folder)
    tempfile.tempdir = None  # read the variable again
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    if words[0] == "-m":
        sys.path.insert(0, str(folder))
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _run(
    work: Callable[..., object],
    arguments: tuple[object, ...],
    output: Path,
    errors: Path | None,
    environment: dict[str, str],
) -> None:
    # The process that this one is forked from ends with the tests.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1 if errors is None else os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        work(*arguments)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
