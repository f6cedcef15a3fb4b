"""The process that keeps the snapshots of one training, and outlives it.

Run by the plain interpreter, with the standard library alone: it takes some 10 MB and starts in a few hundredths of a second.
It reads no tensor. Snapshots are files in memory without a name (``memfd_create``), which the training process writes and
passes on as descriptors: as long as one process holds them they exist, and no end of any process leaves one behind. Nor does
the socket, whose address is an abstract one.

Messages are single packets of JSON, most with descriptors, and each has one answer:

    ``status``   what is held: ``pid``, ``run``, ``training``, ``snapshots``, ``error`` (of writing to disk),
                 ``kept`` (the number of the one that stays once training is over)
    ``join``     the sender trains from now on; as ``status``, or ``refused`` with the process that trains already
    ``fetch``    the files of the snapshot in a ``slot``
    ``start``    the run's number, its settings; snapshots of another run are dropped
    ``begin``    a slot to be written to, whose snapshot is no longer there from then on; its files may be written again.
                 It is not that of the snapshot with the number ``keep``
    ``commit``   the snapshot in a slot is whole: its record and its files
    ``over``     training has ended well, and the script may still fail: the snapshot with the number ``keep`` stays
    ``well``     this process has ended well, and those of the ``others`` may not: their snapshots are of no use without this
                 one. It stays until each of them has ended well, too, or is gone
    ``done``     all has ended well: nothing is needed any more
"""

import contextlib
import json
import os
import select
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import disk

_LARGEST_MESSAGE = 1 << 17
MOST_FILES = 250
"""In one message: Linux passes on 253 descriptors at once."""
_FIRST_CONTACT_S = 60.0
_LOOKS_S = 0.5
_WELL = b"-well"
"""Behind an address: a process listens there once it has ended well, and waits for others."""
_Message = dict[str, Any]


def send(connection: socket.socket, message: _Message, files: Sequence[int] = ()) -> None:
    """Send a message with descriptors."""
    socket.send_fds(connection, [json.dumps(message).encode()], list(files))


def receive(connection: socket.socket) -> tuple[_Message, list[int]] | None:
    """The next message with its descriptors; None where the other end has closed."""
    data, files, flags, _ = socket.recv_fds(connection, _LARGEST_MESSAGE, MOST_FILES)
    if not data:
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise OSError("A message of the snapshot process was cut off.")
    return json.loads(data), files


def readable(numbers: Sequence[int], wait_s: float | None) -> list[int]:
    """Those of the descriptors that something can be read from, or whose other end has closed. Any number may be high."""
    poll = select.poll()
    for number in numbers:
        poll.register(number, select.POLLIN)
    return [number for number, _ in poll.poll(None if wait_s is None else 1000 * wait_s)]


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end: of a listener, the ones that opened it."""
    pid, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return pid, user


def _has_ended_well(address: bytes) -> bool:
    """Whether the process there is gone, or waits for others."""
    return _listens(address + _WELL) or not _listens(address)


def _listens(address: bytes) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        try:
            connection.connect(address)
        except BlockingIOError:  # it has much to accept
            return True
        except OSError:
            return False
        return True


class _Slot:
    """A snapshot, or nothing yet."""

    def __init__(self) -> None:
        self.record: _Message | None = None
        self.files: list[int] = []
        self.is_read = False  # by the thread that writes it to disk

    def clear(self) -> None:
        self.record = None
        for file in self.files:
            os.close(file)
        self.files = []


class Keeper:
    """What is held, for whom, and until when."""

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._connections: dict[int, socket.socket] = {}
        self._slots: list[_Slot] = []
        self._run: str | None = None
        self._directory: Path | None = None
        self._wait_s = 0.0
        self._training: tuple[int, int] | None = None  # process, and the descriptor of its connection
        self._watched: int | None = None  # readable once that process has ended
        self._ends_at: float | None = time.monotonic() + _FIRST_CONTACT_S
        self._error: str | None = None
        self._others: list[bytes] = []  # of the same training, once this process has ended well
        self._ended_well: socket.socket | None = None  # which says so
        self._kept: int | None = None  # the one snapshot that stays once training is over
        self._done = self._stopped = False
        self._lock = threading.Lock()  # of the slots and of what follows
        self._disk = threading.Condition(self._lock)
        self._unwritten: _Slot | None = None
        self._writer: threading.Thread | None = None

    def run(self) -> None:
        """Until training has ended well, or for too long."""
        while not self._done:
            left = None if self._ends_at is None else self._ends_at - time.monotonic()
            if self._others and self._training is None:
                left = _LOOKS_S if left is None else min(left, _LOOKS_S)
                if all(_has_ended_well(each) for each in self._others):
                    break
            if left is not None and left <= 0:
                break
            waiting = [self._listener.fileno(), *self._connections]
            waiting += [] if self._watched is None else [self._watched]
            for number in readable(waiting, left):
                if number == self._listener.fileno():
                    self._accept()
                elif number == self._watched:
                    self._training_ended()
                elif number in self._connections and not self._answer(number):
                    self._close(number)
        self._stop_writing()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if peer_of(connection)[1] != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        self._connections[connection.fileno()] = connection

    def _training_ended(self) -> None:
        """The process has: what it had sent counts. A child of it may hold the connection open."""
        assert self._training is not None
        number = self._training[1]
        while readable([number], 0) and self._answer(number):
            pass
        self._close(number)

    def _close(self, number: int) -> None:
        """The other end has. Wait for the next training, if this one has left anything."""
        self._connections.pop(number).close()
        if self._training is None or self._training[1] != number:
            return
        self._training = None
        if self._watched is not None:
            os.close(self._watched)
            self._watched = None
        with self._lock:
            holds = any(slot.record is not None for slot in self._slots)
        self._ends_at = time.monotonic() + (self._wait_s if holds else 0.0)

    def _answer(self, number: int) -> bool:
        """Whether the connection goes on."""
        connection = self._connections[number]
        try:
            received = receive(connection)
            if received is None:
                return False
            message, files = received
            answer, passed_on = self._do(number, message, files)
            send(connection, answer, passed_on)
        except (OSError, ValueError, KeyError, IndexError):
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
            return {}, self._slots[message["slot"]].files
        if asked == "start":
            self._start(message)
            return {"error": self._error}, ()
        if asked == "begin":
            return {"slot": self._begin(message["keep"]), "error": self._error}, ()
        if asked == "commit":
            self._commit(message, files)
        elif asked == "over":
            self._over(message["keep"])
        elif asked == "well":
            self._well(message["address"], message["others"])
        elif asked == "done":
            self._done = True
        return {}, ()

    def _status(self) -> _Message:
        with self._lock:
            held = [(number, slot.record) for number, slot in enumerate(self._slots) if slot.record is not None]
        return {
            "format": disk.FORMAT,
            "pid": os.getpid(),
            "run": self._run,
            "training": None if self._training is None else self._training[0],
            "snapshots": [{"slot": number, "record": record} for number, record in held],
            "error": self._error,
            "kept": self._kept,
        }

    def _join(self, number: int) -> _Message:
        if self._watched is not None and readable([self._watched], 0):
            self._training_ended()
        if self._training is not None:
            return {"refused": self._training[0]}
        self._others = []
        if self._ended_well is not None:
            self._ended_well.close()
            self._ended_well = None
        pid = peer_of(self._connections[number])[0]
        with contextlib.suppress(OSError, AttributeError):  # a kernel before 5.3: its connection closes, too
            self._watched = os.pidfd_open(pid)
        self._training, self._ends_at = (pid, number), None
        return self._status()

    def _start(self, message: _Message) -> None:
        with self._lock:
            while any(slot.is_read for slot in self._slots):  # an earlier training's last one is written
                self._disk.wait()
            while len(self._slots) < message["slots"]:
                self._slots.append(_Slot())
            if self._run != message["run"]:
                for slot in self._slots:
                    slot.clear()
            self._error = self._kept = None
        self._run, self._wait_s = message["run"], message["wait_s"]
        with self._lock:
            self._directory = None if message["directory"] is None else Path(message["directory"])
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._directory / disk.UNFINISHED, ignore_errors=True)
            disk.write_record(self._directory / disk.RUN_FILE, {"format": disk.FORMAT, "run": self._run})
        except OSError as error:
            self._error = str(error)
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_to_disk)
            self._writer.start()

    def _begin(self, keep: int | None) -> int:
        with self._lock:
            free = [
                (slot.record is not None, slot.record["sequence"] if slot.record else 0, number)
                for number, slot in enumerate(self._slots)
                if not slot.is_read and (slot.record is None or slot.record["sequence"] != keep)
            ]
            number = min(free)[2]
            self._slots[number].clear()
            return number

    def _commit(self, message: _Message, files: list[int]) -> None:
        with self._lock:
            slot = self._slots[message["slot"]]
            slot.clear()
            slot.record, slot.files = message["record"], files
            if self._directory is not None:
                self._unwritten = slot
                self._disk.notify_all()

    def _well(self, address: str, others: Sequence[str]) -> None:
        self._others = [bytes.fromhex(each) for each in others]
        self._ended_well = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ended_well.bind(bytes.fromhex(address) + _WELL)
        self._ended_well.listen()

    def _over(self, keep: int) -> None:
        with self._lock:
            self._kept = keep
            for slot in self._slots:
                if not slot.is_read:
                    self._drop_unless_kept(slot)

    def _drop_unless_kept(self, slot: _Slot) -> None:
        if self._kept is not None and slot.record is not None and slot.record["sequence"] != self._kept:
            slot.clear()

    # -- on disk, in a thread -----------------------------------------------------------------------------------------------

    def _stop_writing(self) -> None:
        """Once the newest snapshot is on disk."""
        with self._lock:
            self._stopped = True
            self._disk.notify_all()
        if self._writer is not None:
            self._writer.join()

    def _write_to_disk(self) -> None:
        """The newest snapshot, again and again: one that is taken while another is written comes next, or is left out for
        a newer one. The last is never left out.
        """
        while True:
            with self._lock:
                while not self._stopped and (self._unwritten is None or self._unwritten.record is None):
                    self._disk.wait()
                if self._unwritten is None or self._unwritten.record is None or self._directory is None:
                    return
                slot, self._unwritten = self._unwritten, None
                assert slot.record is not None
                slot.is_read = True
                record, files, directory = slot.record, list(slot.files), self._directory
            error = None
            try:
                disk.write_checkpoint(directory, record, files)
            except OSError as failed:
                error = disk.reason_of(failed, directory)
            with self._lock:
                slot.is_read = False
                self._error = error
                self._drop_unless_kept(slot)
                self._disk.notify_all()


def main() -> None:
    """Keep snapshots for those that connect to the listener which is passed as a descriptor."""
    number = int(sys.argv[2])
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  what the training process had open, and may wait to see closed
        if int(name) > 2 and int(name) != number:
            with contextlib.suppress(OSError):
                os.close(int(name))
    Keeper(socket.socket(fileno=number)).run()
