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
from typing import Any

from hf_offload.errors import SnapshotError
from hf_offload.snapshots import process

_ANSWER_S = 60.0
"""A process that has not answered by then, such as one that was stopped, counts as gone."""
_ENDING_S = 10.0
"""How long a process may take to end after it has stopped accepting connections."""
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from snapshots.process import main; main()"
"""It is given the folder of this package's parts alone: ``hf_offload`` itself would import torch."""

_started: "list[subprocess.Popen[bytes]]" = []
"""By this process: no zombie stays once one of them has ended and another one is started."""


def address_of(training: str, rank: int = 0) -> bytes:
    """Where the snapshot process of the training with this number listens. It is not a file, and goes with the process."""
    name = f"{training}\0{rank}"
    return f"\0hf_offload-snapshots-{os.geteuid()}-{hashlib.sha256(name.encode()).hexdigest()[:32]}".encode()


class SnapshotClient:
    """A connection to the snapshot process of one training.

    Attributes:
        pid: Its number.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._lock = threading.Lock()
        self.pid = 0

    @classmethod
    def connect(cls, address: bytes, *, start: bool) -> "SnapshotClient | None":
        """Connect to the process at ``address``; with ``start``, to a new one if there is none, and else None.

        Raises :class:`~hf_offload.errors.SnapshotError` if it belongs to another user, or cannot be started.
        """
        until = time.monotonic() + _ENDING_S
        while time.monotonic() < until:
            connection = _connected(address)
            if connection is None and not start:
                return None
            if connection is None:
                _start(address)
                connection = _connected(address)
            client = None if connection is None else cls._answered(connection)
            if client is not None:
                return client
            time.sleep(0.01)  # one that is about to end has the address still, and may even accept
        raise SnapshotError("The snapshot process ended as soon as it was started: see whether the machine has memory.")

    @classmethod
    def _answered(cls, connection: socket.socket) -> "SnapshotClient | None":
        """A client, if the process at the other end answers: one that is ending has closed other connections first."""
        user = process.peer_of(connection)[1]
        if user != os.geteuid():
            connection.close()
            raise SnapshotError(
                f"A process of user {user} listens where the snapshots of this training are expected: have it ended, or "
                "write to another output directory."
            )
        client = cls(connection)
        try:
            client.pid = client.ask("status")["pid"]
        except ConnectionError:
            client.close()
            return None
        return client

    def ask(self, what: str, files: Sequence[int] = (), **values: Any) -> dict[str, Any]:
        """The answer to one message.

        Raises ``ConnectionError`` if the process has gone, or does not answer.
        """
        return self._exchange(what, files, values)[0]

    def fetch(self, sequence: int) -> list[int]:
        """Descriptors of the files of a snapshot, for the caller to close."""
        return self._exchange("fetch", (), {"sequence": sequence})[1]

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        with self._lock:
            try:  # it says nothing unless it is asked
                return bool(process.readable([self._connection.fileno()], 0))
            except (OSError, ValueError):
                return True

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
            if started.pid == self.pid:
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
    except OSError:
        connection.close()
        return None
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
            null = subprocess.DEVNULL
            started = subprocess.Popen(
                command, stdin=null, stdout=null, stderr=null, pass_fds=[number], start_new_session=True
            )
        except OSError as error:
            raise SnapshotError(f"The snapshot process cannot be started: {error}.") from error
        _started.append(started)
