"""The training process's side of the snapshot process: how it is found, started, and spoken to."""

import contextlib
import fcntl
import hashlib
import os
import signal
import socket
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

_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from snapshots.process import main; main()"
"""The folder of this package's parts is all that it is given: ``hf_offload`` itself would import torch."""

_ENDING_S = 10.0
"""How long a process may take to end that does not accept connections any more."""


_dismissed: list[int] = []
"""Processes that were started by this one and are about to end: no zombie of theirs stays once another one is started."""


def address_of(training: str, rank: int = 0) -> bytes:
    """Where the snapshot process of the training with this number listens. It is not a file, and goes with the process."""
    name = f"{training}\0{rank}"
    return f"\0hf_offload-snapshots-{os.geteuid()}-{hashlib.sha256(name.encode()).hexdigest()[:32]}".encode()


class SnapshotClient:
    """A connection to the snapshot process of one training.

    Attributes:
        pid: Its number.
    """

    def __init__(self, connection: socket.socket, started: int | None):
        self._connection = connection
        self._started = started
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self.pid: int = 0

    @classmethod
    def connect(cls, address: bytes, *, start: bool) -> "SnapshotClient | None":
        """Connect to the process at ``address``; with ``start``, to a new one if there is none, and else None.

        Raises :class:`~hf_offload.errors.SnapshotError` if it belongs to another user, or cannot be started.
        """
        until = time.monotonic() + _ENDING_S
        while True:
            connection = _connected(address)
            started = None
            if connection is None and start:
                started = _start(address)
                connection = _connected(address)
            if connection is not None:
                client = cls._answered(connection, started)
                if client is not None:
                    return client
            elif not start:
                return None
            if time.monotonic() >= until:
                break
            time.sleep(0.01)  # one that is about to end has the address still, and may even accept
        raise SnapshotError("The snapshot process ended as soon as it was started: see whether the machine has memory.")

    @classmethod
    def _answered(cls, connection: socket.socket, started: int | None) -> "SnapshotClient | None":
        """A client, if the process at the other end answers: one that is ending has closed other connections first."""
        user = process.peer_of(connection)[1]
        if user != os.geteuid():
            connection.close()
            raise SnapshotError(
                f"A process of user {user} listens where the snapshots of this training are expected: have it ended, or "
                "write to another output directory."
            )
        client = cls(connection, started)
        try:
            client.pid = client.ask("status")["pid"]
        except ConnectionError:
            client.close(wait_s=1.0)
            return None
        return client

    def ask(self, what: str, files: Sequence[int] = (), **values: Any) -> dict[str, Any]:
        """The answer to one message.

        Raises ``ConnectionError`` if the process has gone, or does not answer.
        """
        return self._exchange(what, files, values)[0]

    def fetch(self, slot: int) -> list[int]:
        """Descriptors of the files in a slot, for the caller to close."""
        return self._exchange("fetch", (), {"slot": slot})[1]

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        with self._lock:
            try:  # it says nothing unless it is asked
                return bool(process.readable([self._connection.fileno()], 0))
            except (OSError, ValueError):
                return True

    def close(self, wait_s: float = 0.0) -> None:
        """Leave. If the process was started by this one and ends within ``wait_s``, no zombie stays. Idempotent."""
        self._connection.close()
        if self._started is None or self._owner != os.getpid():
            return
        with contextlib.suppress(ChildProcessError):
            until = time.monotonic() + wait_s
            while os.waitpid(self._started, os.WNOHANG)[0] == 0 and time.monotonic() < until:
                time.sleep(0.002)

    def dismiss(self) -> None:
        """Have the process end. Waits for nothing, so that finalizers may call it."""
        with contextlib.suppress(OSError):
            process.send(self._connection, {"do": "done"})
        self._connection.close()
        if self._started is not None and self._owner == os.getpid():
            _dismissed.append(self._started)

    def end(self) -> None:
        """Have the process end, and wait until it has."""
        with contextlib.suppress(ConnectionError):
            self.ask("done")
            with contextlib.suppress(OSError):
                self._connection.recv(1)  # it closes its end, once what it writes to disk is complete
        self.close(wait_s=1.0)

    def end_after(self, own: bytes, others: Sequence[bytes]) -> None:
        """Have the process, which listens at ``own``, end once those at the addresses of ``others`` have ended well or are
        gone.
        """
        with contextlib.suppress(ConnectionError):
            self.ask("well", address=own.hex(), others=[each.hex() for each in others])
        self.close()

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


def _start(address: bytes) -> int | None:
    """Start a process that listens there; its number, or None if another one has come first.

    It gets a session of its own: neither Ctrl-C nor a launcher that ends its group reaches it.
    """
    for number in list(_dismissed):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(number, os.WNOHANG)[0] == 0:
                continue
        _dismissed.remove(number)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError:
            return None
        listener.listen()
        number = fcntl.fcntl(listener.fileno(), fcntl.F_DUPFD, 10)  # for the child: not closed when its program starts
        try:
            return os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(process.__file__).parent.parent), str(number)],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_RDWR, 0) for each in range(3)],
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
            )
        except OSError as error:
            raise SnapshotError(f"The snapshot process cannot be started: {error}.") from error
        finally:
            os.close(number)
