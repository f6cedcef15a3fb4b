"""The newest snapshot of a training that has ended is retained until its script has ended well, too.

Note: how a script ends
    What follows a training, such as an evaluation or an upload, may fail, and the script is started again: it must not train
    a second time. An error that nothing catches is in ``sys.last_value`` when the interpreter ends. ``hf_offload.run`` notes
    an exit code; elsewhere, ``sys.exit(1)`` counts as a good end. A signal, ``os._exit`` and a machine that goes say nothing,
    and the snapshot process waits for the next start.
"""

import atexit
import dataclasses
import os
import sys
from typing import Any

from hf_offload.snapshots.client import SnapshotClient


@dataclasses.dataclass
class _Process:
    """What is known in this process. Another one, that it has forked, knows nothing."""

    number: int
    clients: dict[bytes, SnapshotClient] = dataclasses.field(default_factory=dict)
    ended: set[str] = dataclasses.field(default_factory=set)
    error: Any = None
    exit_code: Any = None


_process = _Process(0)


def _here() -> _Process:
    global _process
    if _process.number != os.getpid():
        _process = _Process(os.getpid())
        atexit.register(_at_exit)
    return _process


def retain(address: bytes, client: SnapshotClient) -> None:
    """Keep what the snapshot process at ``address`` holds until this process has ended well, or trains again."""
    here = _here()
    here.error, here.exit_code = getattr(sys, "last_value", None), None
    here.clients[address] = client


def release(but: bytes = b"") -> None:
    """Nothing that is retained is needed any more, but at the address ``but``, where the next training begins. Idempotent."""
    clients = _here().clients
    while clients:
        address, client = clients.popitem()
        client.close() if address == but else client.end()


def note_end(training: str) -> None:
    """The training with this number has ended well in this process."""
    _here().ended.add(training)


def has_ended(training: str) -> bool:
    """Whether it has."""
    return training in _here().ended


def note_exit(code: Any) -> None:
    """The script has ended, and this process is about to, with ``code``."""
    _here().exit_code = code


def _at_exit() -> None:
    if _process.number != os.getpid():
        return
    is_shell = hasattr(sys, "ps1")  # which goes on after an error
    if _process.exit_code in (None, 0) and (is_shell or getattr(sys, "last_value", None) is _process.error):
        release()
