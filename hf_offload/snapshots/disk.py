"""Snapshots as checkpoints on disk, and the small files that say whose and what they are.

Note: imports
    The snapshot process is run by the plain interpreter, where there is no ``hf_offload``: this file and ``process.py`` have
    the standard library, and each other.
"""

import errno
import json
import os
import shutil
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = 6
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
SMALL_FILES = "small_files"
"""Of the files in memory, the one that has all small ones, one after the other: each file takes a descriptor of two
processes, and messages pass on a few hundred. Behind them are a list of them, and its length.
"""
LENGTH = struct.Struct("<Q")
UNFINISHED = f".{PREFIX}unfinished"
_Message = dict[str, Any]


def reason_of(error: OSError, directory: Path) -> str:
    """Why nothing was written there, and what to do."""
    if not directory.is_dir():
        return "this directory is not there any more: create it"
    return f"{error}: free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)


def write_checkpoint(directory: Path, record: _Message, files: Sequence[int]) -> None:
    """A checkpoint with a record, under its name once it is complete; older ones are removed then, or before if there is no
    room, but for the newest of the run. What files hold of other processes comes last, and stays in memory.
    """
    while True:
        try:
            _write_checkpoint(directory, record, files)
            return
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _made_room(directory, record):
                raise


def _write_checkpoint(directory: Path, record: _Message, files: Sequence[int]) -> None:
    owner = read_record(directory / MARK_FILE)
    if owner is not None and owner["training"] != record.get("training"):
        raise OSError(f"it is the snapshot_dir of another training now, which writes to {owner['output']}")
    unfinished = directory / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        layout = layout_in(record, files)
        drives = files[len(record["files"]) + 1 :]
        listed: list[Any] = []
        for number, ((name, nbytes, checksum), source) in enumerate(zip(record["files"], files, strict=False)):
            small = small_files(source, nbytes) if name == SMALL_FILES else None
            parts = [(name, 0, nbytes, checksum)] if small is None else small
            for own_name, begin, count, own_checksum in parts:
                with (unfinished / own_name).open("wb") as file:
                    if small is None:
                        copy_whole(file.fileno(), source, nbytes, layout.get(number, ()), drives)
                    else:
                        copy(file.fileno(), source, begin, count)
                    os.fsync(file.fileno())
                listed.append([own_name, count, own_checksum])
        if layout:
            ranges = [[number, begin, count] for number, each in layout.items() for begin, count, _ in each]
            record = {**{name: value for name, value in record.items() if name != KEPT}, RANGES: ranges}
        record = {**record, "files": listed}
        write_record(unfinished / RECORD_FILE, record)
        if not (directory / RUN_FILE).exists():  # the directory was removed, and is there again
            write_record(directory / RUN_FILE, {"format": FORMAT, "run": record["run"]})
        final = directory / f"{PREFIX}{record['step']}"
        if final.exists():
            shutil.rmtree(final)
        unfinished.rename(final)
        _synchronize(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _remove_others(directory, record)


def small_files(number: int, nbytes: int) -> list[tuple[str, int, int, int]]:
    """Name, first byte, length and checksum of each small file in a file of ``nbytes`` that has them all."""
    (length,) = LENGTH.unpack(os.pread(number, LENGTH.size, nbytes - LENGTH.size))
    found, begin = [], 0
    for name, count, checksum in json.loads(os.pread(number, length, nbytes - LENGTH.size - length)):
        found.append((name, begin, count, checksum))
        begin += count
    return found


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
        copy(into, source, done, begin - done)
        done = begin
        for drive, offset, count in spans:
            if drive < 0:
                copy(into, source, done, count)
            else:
                copy(into, drives[drive], offset, count)
                os.posix_fadvise(drives[drive], offset, count, os.POSIX_FADV_DONTNEED)
            done += count
    copy(into, source, done, nbytes - done)


def copy(into: int, source: int, offset: int, count: int) -> None:
    """Write ``count`` bytes of one file to another."""
    end = offset + count
    while offset < end:
        sent = os.sendfile(into, source, offset, end - offset)
        if not sent:
            raise OSError(f"a file of the snapshot ends after {offset} bytes")
        offset += sent


def _remove_others(directory: Path, newest: _Message) -> None:
    """All that are of another run, or older than the newest ones."""
    of_others, of_this_run = _written_for(directory, newest["run"])
    for path in [*of_others, *of_this_run[:-KEPT_ON_DISK]]:
        shutil.rmtree(path, ignore_errors=True)


def _made_room(directory: Path, record: _Message) -> bool:
    """Remove one that would be removed next: of a training that has ended, or of a run before this one; or the older one."""
    of_others, of_this_run = _written_for(directory, record["run"])
    for path in [*of_others, *of_this_run[:-1]]:
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return True
    return False


def _written_for(directory: Path, run: str) -> tuple[list[Path], list[Path]]:
    """The snapshots of other runs, and those of this one, oldest first. Folders without a record belong to others."""
    of_others: list[tuple[int, Path]] = []
    of_this_run: list[tuple[int, Path]] = []
    for path in directory.glob(f"{PREFIX}*"):
        record = read_record(path / RECORD_FILE)
        if record is not None:
            (of_this_run if record.get("run") == run else of_others).append((record["sequence"], path))
    return [path for _, path in sorted(of_others)], [path for _, path in sorted(of_this_run)]


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
