"""The process that keeps the snapshots of one training, and outlives it.

Run by the plain interpreter, with the standard library alone: it takes some 10 MB and starts in a few hundredths of a second.
It reads no tensor. Snapshots are files in memory without a name (``memfd_create``), which the training process writes and
passes on as descriptors: as long as one process holds them they exist, and no end of any process leaves one behind. Nor does
the socket, whose address is an abstract one.

Messages are single packets of JSON, most with descriptors, and each has one answer:

    ``status``   what is held: ``pid``, ``run``, ``training``, ``snapshots``, ``error`` (of writing to disk)
    ``join``     the sender trains from now on; as ``status``, or ``refused`` with the process that trains already
    ``fetch``    the files of the snapshot in a ``slot``
    ``start``    the run's number, its settings; snapshots of another run are dropped
    ``begin``    a slot to be written to, whose snapshot is no longer there from then on; its files may be written again.
                 It is not that of the snapshot with the number ``keep``
    ``commit``   the snapshot in a slot is whole: its record and its files
    ``done``     training has ended well: nothing is needed any more
"""

import contextlib
import errno
import json
import os
import select
import shutil
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = 5
"""Of records and messages: raised when what is written by one version cannot be read by the other."""
RECORD_FILE = "hf_offload_snapshot.json"
RUN_FILE = "hf_offload_snapshots.json"
MARK_FILE = "_hf_offload_training.json"
"""Says whose output directory, or snapshot_dir, a folder is. What begins like this is left out when a Trainer uploads."""
PREFIX = "checkpoint-"
KEPT_ON_DISK = 2
KEPT = "kept"
"""Of what a record says of ranges that are on drives: the last of its files are one that lists them, and those of drives."""
RANGES = "ranges"
"""Of what a record on disk says of them, whose files have all bytes."""
_UNFINISHED = f".{PREFIX}unfinished"
_LARGEST_MESSAGE = 1 << 17
_MOST_FILES = 64
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
        self._done = self._stopped = False
        self._lock = threading.Lock()  # of the slots and of what follows
        self._disk = threading.Condition(self._lock)
        self._unwritten: _Slot | None = None
        self._writer: threading.Thread | None = None

    def run(self) -> None:
        """Until training has ended well, or for too long."""
        while not self._done:
            left = None if self._ends_at is None else self._ends_at - time.monotonic()
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
        elif asked == "done":
            self._done = True
        return {}, ()

    def _status(self) -> _Message:
        with self._lock:
            held = [(number, slot.record) for number, slot in enumerate(self._slots) if slot.record is not None]
        return {
            "format": FORMAT,
            "pid": os.getpid(),
            "run": self._run,
            "training": None if self._training is None else self._training[0],
            "snapshots": [{"slot": number, "record": record} for number, record in held],
            "error": self._error,
        }

    def _join(self, number: int) -> _Message:
        if self._watched is not None and readable([self._watched], 0):
            self._training_ended()
        if self._training is not None:
            return {"refused": self._training[0]}
        pid = peer_of(self._connections[number])[0]
        with contextlib.suppress(OSError, AttributeError):  # a kernel before 5.3: its connection closes, too
            self._watched = os.pidfd_open(pid)
        self._training, self._ends_at = (pid, number), None
        return self._status()

    def _start(self, message: _Message) -> None:
        with self._lock:
            while len(self._slots) < message["slots"]:
                self._slots.append(_Slot())
            if self._run != message["run"]:
                for slot in self._slots:
                    slot.clear()
            self._error = None
        self._run, self._wait_s = message["run"], message["wait_s"]
        with self._lock:
            self._directory = None if message["directory"] is None else Path(message["directory"])
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._directory / _UNFINISHED, ignore_errors=True)
            write_record(self._directory / RUN_FILE, {"format": FORMAT, "run": self._run})
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
                self._disk.notify()

    # -- on disk, in a thread -----------------------------------------------------------------------------------------------

    def _stop_writing(self) -> None:
        """Once the newest snapshot is on disk."""
        with self._lock:
            self._stopped = True
            self._disk.notify()
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
                _write_checkpoint(directory, record, files)
            except OSError as failed:
                error = _reason(failed, directory)
            with self._lock:
                slot.is_read = False
                self._error = error


def _reason(error: OSError, directory: Path) -> str:
    """Why nothing was written there, and what to do."""
    if not directory.is_dir():
        return "this directory is not there any more: create it"
    return f"{error}: free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)


def _write_checkpoint(directory: Path, record: _Message, files: Sequence[int]) -> None:
    """A checkpoint with a record, under its name once it is complete; older ones are removed then. What files hold of other
    processes comes last, and stays in memory.
    """
    owner = read_record(directory / MARK_FILE)
    if owner is not None and owner["training"] != record.get("training"):
        raise OSError(f"it is the snapshot_dir of another training now, which writes to {owner['output']}")
    unfinished = directory / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        layout = layout_in(record, files)
        drives = files[len(record["files"]) + 1 :]
        for number, ((name, nbytes, _), source) in enumerate(zip(record["files"], files, strict=False)):
            with (unfinished / name).open("wb") as file:
                copy_whole(file.fileno(), source, nbytes, layout.get(number, ()), drives)
                os.fsync(file.fileno())
        if layout:
            ranges = [[number, begin, count] for number, each in layout.items() for begin, count, _ in each]
            record = {**{name: value for name, value in record.items() if name != KEPT}, RANGES: ranges}
        write_record(unfinished / RECORD_FILE, record)
        final = directory / f"{PREFIX}{record['step']}"
        if final.exists():
            shutil.rmtree(final)
        unfinished.rename(final)
        if not (directory / RUN_FILE).exists():  # the directory was removed, and is there again
            write_record(directory / RUN_FILE, {"format": FORMAT, "run": record["run"]})
        _synchronize(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _remove_others(directory, record)


def layout_in(record: Mapping[str, Any], files: Sequence[int]) -> dict[int, list[Any]]:
    """Number of a file -> first byte and length of each range that is on drives, and where it is: number of a drive's file,
    or -1 for the file itself, first byte there, length.
    """
    if KEPT not in record:
        return {}
    count, _ = record[KEPT]["list"]
    found: dict[int, list[Any]] = {}
    for number, *each in json.loads(os.pread(files[len(record["files"])], count, 0)):
        found.setdefault(number, []).append(each)
    return found


def copy_whole(into: int, source: int, nbytes: int, ranges: Sequence[Any], drives: Sequence[int]) -> None:
    """Write a file that has all bytes, those in ``ranges`` from ``drives``. Raises ``OSError``."""
    done = 0
    for begin, _, spans in ranges:
        _copy(into, source, done, begin - done)
        done = begin
        for drive, offset, count in spans:
            if drive < 0:
                _copy(into, source, done, count)
            else:
                _copy(into, drives[drive], offset, count)
                os.posix_fadvise(drives[drive], offset, count, os.POSIX_FADV_DONTNEED)
            done += count
    _copy(into, source, done, nbytes - done)


def _copy(into: int, source: int, offset: int, count: int) -> None:
    end = offset + count
    while offset < end:
        sent = os.sendfile(into, source, offset, end - offset)
        if not sent:
            raise OSError(f"a file of the snapshot ends after {offset} bytes")
        offset += sent


def _remove_others(directory: Path, newest: _Message) -> None:
    """All that are of another run, or older than the newest ones. Folders without a record belong to others."""
    of_this_run = []
    for path in directory.glob(f"{PREFIX}*"):
        record = read_record(path / RECORD_FILE)
        if record is None:
            continue
        if record.get("run") == newest["run"]:
            of_this_run.append((record["sequence"], path))
        else:
            shutil.rmtree(path, ignore_errors=True)
    for _, path in sorted(of_this_run)[:-KEPT_ON_DISK]:
        shutil.rmtree(path, ignore_errors=True)


def read_record(path: Path) -> _Message | None:
    """What such a file holds; None if it cannot be read, or is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    checksum = found.pop("checksum", None) if isinstance(found, dict) else None
    return found if checksum is not None and checksum == _checksum(found) else None


def _checksum(content: _Message) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def text_of(content: _Message) -> str:
    """That of a file which :func:`read_record` reads."""
    return json.dumps({**content, "checksum": _checksum(content)})


def write_record(path: Path, content: _Message) -> None:
    """A small file, complete or as it was."""
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("w") as file:
        file.write(text_of(content))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def _synchronize(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def main() -> None:
    """Keep snapshots for those that connect to the listener which is passed as a descriptor."""
    number = int(sys.argv[1])
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  what the training process had open, and may wait to see closed
        if int(name) > 2 and int(name) != number:
            with contextlib.suppress(OSError):
                os.close(int(name))
    Keeper(socket.socket(fileno=number)).run()


if __name__ == "__main__":
    main()
