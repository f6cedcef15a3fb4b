"""Snapshots as checkpoints on disk, and small files with a checksum.

The snapshot process runs this file and ``process.py`` in a plain interpreter, so both import the standard library alone.
"""

import json
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMAT = 8
"""Of records and messages: raised when one version cannot read what another one writes."""
RECORD_FILE = "hf_offload_snapshot.json"
PREFIX = "checkpoint-"
KEPT_ON_DISK = 2
_UNFINISHED = f".{PREFIX}unfinished"
_Message = dict[str, Any]


def check_writable(directory: Path) -> None:
    """Raises ``OSError`` unless checkpoints can be written to ``directory``. What was left half written goes."""
    shutil.rmtree(directory / _UNFINISHED, ignore_errors=True)
    (directory / _UNFINISHED).mkdir(parents=True)
    (directory / _UNFINISHED).rmdir()


def write_checkpoint(directory: Path, record: _Message, files: Sequence[int]) -> None:
    """Write a snapshot's files, and give the folder its name once all are complete; others are removed afterwards.
    ``files`` are descriptors in the order of the record; that of the parity comes last, and stays in memory. Raises
    ``OSError``.
    """
    unfinished, final = directory / _UNFINISHED, directory / f"{PREFIX}{record['step']}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        for (name, *_), source in zip(record["files"], files, strict=False):
            shutil.copyfile(f"/proc/self/fd/{source}", unfinished / name)
            _synchronize(unfinished / name)
        write_record(unfinished / RECORD_FILE, record)
        if final.exists():
            shutil.rmtree(final)
        unfinished.rename(final)
        _synchronize(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _remove_others(directory, record["run"], record["step"])


def records_in(directory: Path) -> list[tuple[_Message, Path]]:
    """The snapshots in ``directory``. Folders without a record belong to others."""
    found = ((read_record(path / RECORD_FILE), path) for path in directory.glob(f"{PREFIX}*"))
    return [(record, path) for record, path in found if record is not None]


def _remove_others(directory: Path, run: str, step: int) -> None:
    """Remove snapshots of other runs, and all of this one but the newest up to ``step``, which was just written: later ones
    are damaged, and the run has gone on from an earlier one.
    """
    found = records_in(directory)
    kept = sorted(record["step"] for record, _ in found if record["run"] == run and record["step"] <= step)[
        -KEPT_ON_DISK:
    ]
    for record, path in found:
        if record["run"] != run or record["step"] not in kept:
            shutil.rmtree(path, ignore_errors=True)


def read_record(path: Path) -> _Message | None:
    """What a file of :func:`write_record` holds; None if it cannot be read or is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    checksum = found.pop("checksum", None) if isinstance(found, dict) else None
    return found if checksum is not None and checksum == _checksum(found) else None


def write_record(path: Path, content: _Message) -> None:
    """Write a small file with a checksum: complete, or as it was before. Raises ``OSError``."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w") as file:
            file.write(json.dumps({**content, "checksum": _checksum(content)}))
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _checksum(content: _Message) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _synchronize(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
