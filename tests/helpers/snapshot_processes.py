"""The snapshot processes that a test has started."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def snapshot_processes(variable: str, value: str) -> set[int]:
    """Those that have this in their environment."""
    wanted = f"{variable}={value}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_one = b"snapshots.process" in (path / "cmdline").read_bytes()
            if is_one and any(each.startswith(wanted) for each in (path / "environ").read_bytes().split(b"\0")):
                found.add(int(path.name))
    return found


def processes_of_test() -> set[int]:
    """Those of the test that runs: others may run on the machine."""
    return snapshot_processes("PYTEST_CURRENT_TEST", os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0] + " ")


def end(pids: set[int]) -> None:
    """Kill them."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Import it where tests take snapshots: what a training leaves when it dies is ended with the test."""
    yield
    end(processes_of_test())


@pytest.fixture(autouse=True, scope="module")
def no_process_is_left_by_the_file() -> Iterator[None]:
    """The same, where tests go on with what one before has left."""
    yield
    end(snapshot_processes("PYTEST_CURRENT_TEST", os.environ["PYTEST_CURRENT_TEST"].partition("::")[0] + "::"))


def until(condition: Callable[[], object]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
