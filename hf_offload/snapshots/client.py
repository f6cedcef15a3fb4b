"""The training process's side of the snapshot process: how it is found, started, and spoken to."""

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from hf_offload.errors import SnapshotError
from hf_offload.forks import ForkHandler, watch_forks
from hf_offload.snapshots import process

_ANSWER_S = 60.0
"""A process that has not answered by then, such as one that was stopped, counts as gone."""
_ENDING_S = 10.0
"""How long a process may take to end after it has stopped accepting connections."""
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from snapshots.process import main; main()"
"""It is given the folder of this package's parts alone: ``hf_offload`` itself would import torch."""

_started: "list[subprocess.Popen[bytes]]" = []
"""By this process: no zombie stays once one of them has ended and another one is started."""

_joined: list[socket.socket] = []
"""Connections that close with this process, whatever its children do."""


def address_of(training: str, rank: int = 0) -> bytes:
    """Where the snapshot process of the training with this number listens. It is not a file, and goes with the process."""
    name = f"{training}\0{rank}"
    return f"\0hf_offload-snapshots-{os.geteuid()}-{hashlib.sha256(name.encode()).hexdigest()[:32]}".encode()


class SnapshotClient:
    """A connection to the snapshot process of one training.

    Attributes:
        status: What the process held when it was connected to; with ``refused``, which process trains already.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._lock = threading.Lock()
        self.status: dict[str, Any] = {}

    @classmethod
    def connect(cls, address: bytes) -> Self:
        """Connect to the process at ``address`` as the one that trains, and start it if there is none.

        Raises :class:`~hf_offload.errors.SnapshotError` if it belongs to another user, or cannot be started.
        """
        until = time.monotonic() + _ENDING_S
        while time.monotonic() < until:
            connection = _connected(address)
            if connection is None:
                _start(address)
                connection = _connected(address)
            if connection is not None:
                client = cls(connection)
                try:
                    client.status = client.ask("join")
                    _joined[:] = [each for each in _joined if each.fileno() >= 0]
                    _joined.append(connection)
                    watch_forks(_children)
                    return client
                except ConnectionError:
                    client.close()
            time.sleep(0.01)  # one that is about to end has the address still, and may even accept
        raise SnapshotError("The snapshot process ended as soon as it was started: see whether the machine has memory.")

    def ask(self, what: str, files: Sequence[int] = (), **values: Any) -> dict[str, Any]:
        """The answer to one message. Raises ``ConnectionError`` if the process has gone, or does not answer."""
        return self._exchange(what, files, values)[0]

    def fetch(self, step: int) -> list[int]:
        """Descriptors of the files of a snapshot, for the caller to close."""
        return self._exchange("fetch", (), {"step": step})[1]

    def close(self) -> None:
        """Leave. Idempotent."""
        self._connection.close()

    def end(self) -> None:
        """Have the process end, and wait until it has."""
        with contextlib.suppress(ConnectionError):
            self.ask("done")
            with contextlib.suppress(OSError):
                self._connection.recv(1)  # it closes its end, once what it writes to disk is complete
        self.close()
        for started in _started:
            if started.pid == self.status["pid"]:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.wait(1.0)

    def _exchange(self, what: str, files: Sequence[int], values: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            try:
                process.send(self._connection, {"do": what, **values}, files)
                answer = process.receive(self._connection)
            except (OSError, ValueError) as error:
                raise ConnectionError(f"the snapshot process does not answer: {error}") from error
        if answer is None:
            raise ConnectionError("the snapshot process has ended")
        return answer


def _connected(address: bytes) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(address)
        user = process.peer_of(connection)[1]
    except OSError:
        connection.close()
        return None
    if user != os.geteuid():
        connection.close()
        raise SnapshotError(
            f"A process of user {user} listens where the snapshots of this training are expected: have it ended, or write to "
            "another output directory."
        )
    return connection


def _start(address: bytes) -> None:
    """Start a process that listens there, unless another one has come first. It gets a session of its own: neither Ctrl-C nor
    a launcher that ends its group reaches it.
    """
    _started[:] = [each for each in _started if each.poll() is None]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError:
            return
        listener.listen()
        folder, number = Path(process.__file__).parent.parent, listener.fileno()
        try:
            command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(folder), str(number)]
            streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            _started.append(subprocess.Popen(command, pass_fds=[number], start_new_session=True, **streams))
        except OSError as error:
            raise SnapshotError(f"The snapshot process cannot be started: {error}.") from error


class _Children(ForkHandler):
    """They train nothing: connections are their parent's."""

    def after_in_child(self) -> None:
        for connection in _joined:
            connection.close()
        _joined.clear()


_children = _Children()
