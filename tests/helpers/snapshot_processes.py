"""The snapshot processes that a test has started."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_offload.snapshots.client import SnapshotClient, address_of
from hf_offload.snapshots.restoring import known_training, training_of


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


def address_in(folder: Path, rank: int = 0) -> bytes:
    """Where the snapshot process listens, or would listen, of the training that writes to ``folder``."""
    return address_of(training_of(folder)["training"], rank)


def held_by(folder: Path, rank: int = 0) -> dict | None:
    """What the snapshot process of a training says, if there is one."""
    if known_training(folder) is None:
        return None
    with contextlib.suppress(ConnectionError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60)
        connection.connect(address_in(folder, rank))
        return SnapshotClient(connection).ask("status")
    return None


def steps_held(folder: Path, rank: int = 0) -> list[int] | None:
    """Of the snapshots in memory; None if there is no process that would hold any."""
    held = held_by(folder, rank)
    return None if held is None else sorted(each["step"] for each in held["snapshots"])


def end_process(folder: Path, rank: int = 0) -> None:
    """Kill the snapshot process of a training: what is in memory goes, as when the machine starts again."""
    held = held_by(folder, rank)
    assert held is not None
    os.kill(held["pid"], signal.SIGKILL)
    until(lambda: held_by(folder, rank) is None)


def flip(path: Path) -> None:
    """A bit in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
