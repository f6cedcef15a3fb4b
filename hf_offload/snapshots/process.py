"""The process that keeps the snapshots of one training, and outlives it.

A plain interpreter with the standard library alone: it takes some 10 MB and starts in a few hundredths of a second.
Snapshots are files in memory without a name (``memfd_create``), which the training process writes and passes on as
descriptors. They exist as long as one process holds them, and the socket has an abstract address: no end of any process
leaves anything behind.

Messages are single packets of JSON, some with descriptors, and each has one answer:

    ``status``   what is held: ``format``, ``pid``, ``training``, ``snapshots``, ``error`` (of writing to disk)
    ``join``     the sender trains from now on; answered as ``status``, or by ``refused`` with the process that trains already
    ``fetch``    the files of the snapshot of ``step``
    ``start``    a run and its settings; snapshots of other runs are dropped
    ``keep``     all snapshots but that of ``step`` are dropped, and the sender may write to their files, unless they are
                 ``held``, for they are on their way to disk
    ``commit``   a snapshot is whole: its record and its files
    ``done``     nothing is needed any more
"""

import dataclasses
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import disk

_LARGEST_MESSAGE = 1 << 17
_MOST_FILES = 250
"""In one message: Linux passes on 253 descriptors at once."""
_FIRST_CONTACT_S = 60.0
_Message = dict[str, Any]


def send(connection: socket.socket, message: _Message, files: Sequence[int] = ()) -> None:
    """Send a message with descriptors."""
    socket.send_fds(connection, [json.dumps(message).encode()], list(files))


def receive(connection: socket.socket) -> tuple[_Message, list[int]] | None:
    """The next message with its descriptors; None where the other end has closed."""
    data, files, flags, _ = socket.recv_fds(connection, _LARGEST_MESSAGE, _MOST_FILES)
    if not data:
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise OSError("A message of the snapshot process was cut off.")
    return json.loads(data), files


def readable(numbers: Sequence[int], wait_s: float | None) -> list[int]:
    """The descriptors that can be read from, or whose other end has closed."""
    poll = select.poll()
    for number in numbers:
        poll.register(number, select.POLLIN)
    return [number for number, _ in poll.poll(None if wait_s is None else 1000 * wait_s)]


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end: of a listener, those that opened it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user


@dataclasses.dataclass(eq=False)
class _Snapshot:
    record: _Message
    files: list[int]

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        self.files = []


class Keeper:
    """What is held, for whom, and until when. Messages are answered in one thread; another one copies to disk."""

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._connections: dict[int, socket.socket] = {}
        self._held: dict[int, _Snapshot] = {}  # by step
        self._wait_s = 0.0
        self._training: tuple[int, int] | None = None  # process, and the descriptor of its connection
        self._ends_at: float | None = time.monotonic() + _FIRST_CONTACT_S
        self._done = False
        self._directory: Path | None = None
        self._error: str | None = None
        self._unwritten: _Snapshot | None = None
        self._written: _Snapshot | None = None  # is on its way to disk
        self._writer: threading.Thread | None = None
        self._writer_ends, self._writer_has_ended = os.pipe()

    def run(self) -> None:
        """Until nothing is needed, or no training has come back for too long."""
        while not self._done:
            left = None if self._ends_at is None else self._ends_at - time.monotonic()
            if left is not None and left <= 0:
                break
            waiting = [self._listener.fileno(), self._writer_ends, *self._connections]
            for number in readable(waiting, left):
                if number == self._listener.fileno():
                    self._accept()
                elif number == self._writer_ends:
                    self._end_writing()
                elif number in self._connections and not self._answer(number):
                    self._close(number)
        while self._writer is not None:
            self._end_writing()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if peer_of(connection)[1] != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        self._connections[connection.fileno()] = connection

    def _close(self, number: int) -> None:
        """The other end has. Wait for the next training, if this one has left anything."""
        self._connections.pop(number).close()
        if self._training is None or self._training[1] != number:
            return
        self._training = None
        self._ends_at = time.monotonic() + (self._wait_s if self._held else 0.0)

    def _answer(self, number: int) -> bool:
        """Whether the connection stays open."""
        connection = self._connections[number]
        try:
            received = receive(connection)
            if received is None:
                return False
            answer, passed_on = self._do(number, *received)
            send(connection, answer, passed_on)
        except (OSError, ValueError, KeyError):
            return False
        return True

    def _do(self, number: int, message: _Message, files: list[int]) -> tuple[_Message, Sequence[int]]:
        asked = message["do"]
        if asked == "status":
            return self._status(), ()
        if asked == "join":
            return self._join(number), ()
        if self._training is None or self._training[1] != number:
            raise ValueError("not the process that trains")
        if asked == "fetch":
            return {}, self._held[message["step"]].files
        if asked == "start":
            self._start(message)
        elif asked == "keep":
            self._drop(lambda snapshot: snapshot.record["step"] != message["step"])
        elif asked == "commit":
            self._commit(message["record"], files)
        elif asked == "done":
            self._done = True
        held = [*self._held, *([] if self._written is None else [self._written.record["step"]])]
        return {"held": held, "error": self._error}, ()

    def _status(self) -> _Message:
        return {
            "format": disk.FORMAT,
            "pid": os.getpid(),
            "training": None if self._training is None else self._training[0],
            "snapshots": [each.record for each in self._held.values()],
            "error": self._error,
        }

    def _join(self, number: int) -> _Message:
        if self._training is not None:
            return {"refused": self._training[0]}
        self._training, self._ends_at = (peer_of(self._connections[number])[0], number), None
        return self._status()

    def _start(self, message: _Message) -> None:
        self._drop(lambda snapshot: snapshot.record["run"] != message["run"])
        while self._writer is not None:  # the last one of an earlier start
            self._end_writing()
        self._wait_s, self._error = message["wait_s"], None
        self._directory = None if message["directory"] is None else Path(message["directory"])
        if self._directory is not None:
            try:
                disk.check_writable(self._directory)
            except OSError as error:
                self._error = str(error)

    def _drop(self, is_dropped: Callable[[_Snapshot], bool]) -> None:
        for step, snapshot in list(self._held.items()):
            if is_dropped(snapshot):
                del self._held[step]
                if snapshot is self._unwritten:
                    self._unwritten = None
                if snapshot is not self._written:
                    snapshot.close()

    def _commit(self, record: _Message, files: list[int]) -> None:
        self._drop(lambda snapshot: snapshot.record["step"] == record["step"])  # it is sent again
        snapshot = self._held[record["step"]] = _Snapshot(record, files)
        if self._directory is not None:
            self._unwritten = snapshot
            self._write_next()

    # -- to disk: the newest snapshot, unless one is on its way; then it is the turn of the newest that comes meanwhile ------

    def _write_next(self) -> None:
        if self._writer is None and self._unwritten is not None and self._directory is not None:
            self._written, self._unwritten = self._unwritten, None
            arguments = self._directory, self._written.record, list(self._written.files)
            self._writer = threading.Thread(target=self._write, args=arguments)
            self._writer.start()

    def _write(self, directory: Path, record: _Message, files: Sequence[int]) -> None:
        """In the thread."""
        error = None
        try:
            disk.write_checkpoint(directory, record, files)
        except OSError as failed:
            error = str(failed)
        self._error = error
        os.write(self._writer_has_ended, b"x")

    def _end_writing(self) -> None:
        os.read(self._writer_ends, 1)
        assert self._writer is not None
        self._writer.join()
        written, self._written, self._writer = self._written, None, None
        if written is not None and written not in self._held.values():  # dropped meanwhile
            written.close()
        self._write_next()


def main() -> None:
    """Keep snapshots for those that connect to the listener that is passed as a descriptor."""
    Keeper(socket.socket(fileno=int(sys.argv[2]))).run()
