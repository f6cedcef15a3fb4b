"""Trainings of this process that are over: the newest snapshot of each stays until the process has ended well, too.

Note: how a process ends
    What follows a training, such as an evaluation or an upload, may fail, and the script is started again: it must not train
    a second time, nor go on from an older checkpoint. So the snapshot process is asked to end when the interpreter ends, if
    no error has ended it. An error that nothing catches is in ``sys.last_value`` by then. An exit code is not to be found
    anywhere: ``sys.exit`` notes it while a snapshot stays. A signal, ``os._exit`` and a machine that goes say
    nothing, and the snapshot process waits for the next start.
"""

import dataclasses
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hf_offload.snapshots.client import SnapshotClient
from hf_offload.storage.kept import Kept


@dataclasses.dataclass(frozen=True)
class Ended:
    """A training that is over.

    Attributes:
        client: The connection to the process that keeps its newest snapshot.
        kept: What that snapshot has on drives.
        release: Gives up its ``snapshot_dir``.
        others: Where the snapshot processes of its other ranks listen: each is of use as long as all are there.
    """

    client: SnapshotClient
    kept: Kept | None
    release: Callable[[], None]
    others: Sequence[bytes] = ()


@dataclasses.dataclass
class _Process:
    """What is known of this process: another one, that it has forked, knows nothing."""

    number: int
    trainings: dict[bytes, Ended]
    begun: dict[str, tuple[int, bool]] = dataclasses.field(default_factory=dict)
    last_error: int | None = None
    exit_code: Any = None


_process = _Process(0, {})


def place_of(number: str) -> int:
    """Which of this process's trainings of the output directory ``number`` would begin now, from 1 on: the one that has not
    ended well, or else the next one.
    """
    place, is_over = _here().begun.get(number, (0, True))
    return place + is_over


def begin(number: str, place: int) -> None:
    """The training of that place begins."""
    _here().begun[number] = place, False


def over(number: str) -> None:
    """The training that has begun last in the output directory ``number`` has ended well."""
    here = _here()
    if number in here.begun:
        here.begun[number] = here.begun[number][0], True


def _here() -> _Process:
    global _process
    if _process.number != os.getpid():
        _process = _Process(os.getpid(), {})
        weakref.finalize(_process, _at_exit)  # when the interpreter ends
    return _process


def keep(address: bytes, ended: Ended) -> None:
    """Keep the snapshot of a training until this process has ended well, or another training begins in it. The snapshot
    process listens at ``address``.
    """
    _here()
    if not _process.trainings:
        _process.last_error, _process.exit_code = _last_error(), None
        if not isinstance(sys.exit, _Exit):
            sys.exit = _Exit(sys.exit)
    _process.trainings[address] = ended


def before_another(address: bytes) -> None:
    """Another training begins in this process, whose snapshot process listens at ``address``. What that one keeps stays: it
    may be resumed from.
    """
    for other, ended in _taken():
        if other == address:
            if ended.kept is not None:
                ended.kept.abandon()
            ended.client.close()
        else:
            _end(ended)


def end_well() -> None:
    """This process ends without an error: nothing is needed any more. Idempotent."""
    for address, ended in _taken():
        if ended.others:
            ended.client.end_after(address, ended.others)
            ended.release()
        else:
            _end(ended)


def note_exit(code: Any) -> None:
    """This process is about to end with ``code``, as ``sys.exit`` takes it, which ends no process in other threads."""
    if threading.current_thread() is threading.main_thread():
        _process.exit_code = code


def _taken() -> list[tuple[bytes, Ended]]:
    if _process.number != os.getpid():
        return []
    found = []
    while _process.trainings:
        found.append(_process.trainings.popitem())
    if isinstance(sys.exit, _Exit):
        sys.exit = sys.exit.original
    return found


def _end(ended: Ended) -> None:
    ended.client.end()
    if ended.kept is not None:
        ended.kept.release()
    ended.release()


def _at_exit() -> None:
    if _process.number != os.getpid():
        return
    error = None if hasattr(sys, "ps1") else _last_error()  # a shell goes on after an error
    if _process.exit_code in (None, 0) and error in (None, _process.last_error):
        end_well()


def _last_error() -> int | None:
    found = getattr(sys, "last_value", None)
    return None if found is None else id(found)


class _Exit:
    """``sys.exit``, which notes its code."""

    def __init__(self, original: Callable[..., Any]):
        self.original = original
        functools.update_wrapper(self, original)

    def __call__(self, status: Any = None, /) -> Any:
        note_exit(status)
        self.original(status)
