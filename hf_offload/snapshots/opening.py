"""The beginning of a training with snapshots: its snapshot process, and the snapshot that it goes on from."""

import dataclasses
import logging
import os
import time
import uuid
from pathlib import Path

from hf_offload.errors import OffloadConfigError, SnapshotError
from hf_offload.snapshots.client import SnapshotClient, address_of
from hf_offload.snapshots.restoring import Found, newest_whole

logger = logging.getLogger(__name__)

LINKS = ".hf_offload-snapshot"
"""In the output directory, while a training resumes from memory: links to files that have no name."""


@dataclasses.dataclass
class Opened:
    """A connection to the snapshot process of a training, and what it goes on from.

    Attributes:
        client: The connection.
        found: The snapshot; None to start at the beginning.
        run, began, sequence: Number, time of the beginning and last snapshot of the run that goes on, or a new one's.
    """

    client: SnapshotClient
    found: Found | None = None
    run: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    began: float = dataclasses.field(default_factory=time.time)
    sequence: int = 0

    def forget_found(self) -> None:
        """Nothing of the snapshot is needed any more. Idempotent."""
        if self.found is not None:
            self.found.close()
            self.found = None


def open_snapshots(output: Path, directory: Path | None, resume: bool) -> Opened:
    """Connect to the snapshot process of the training that writes to ``output``, or start it. With ``resume``, find the
    newest whole snapshot, in memory or in ``directory``.

    Raises :class:`~hf_offload.errors.SnapshotError` if another training is connected to it, or for those of another version.
    """
    try:
        return _open(output, directory, resume)
    except ConnectionError as error:
        logger.warning("%s: another one is started.", str(error).capitalize())
    try:
        return _open(output, directory, resume)
    except ConnectionError as error:
        raise SnapshotError(f"Again, {error}: see whether the machine has memory.") from error


def _open(output: Path, directory: Path | None, resume: bool) -> Opened:
    client = SnapshotClient.connect(address_of(output), start=True)
    assert client is not None
    joined = client.ask("join")
    if "refused" in joined:
        client.close()
        raise SnapshotError(
            f"Process {joined['refused']} trains already with {output} as its output directory, and takes "
            "snapshots: end it, or write to another directory."
        )
    if not resume:
        if joined["snapshots"]:
            logger.warning("Training starts anew: the snapshots of an earlier training in memory are dropped.")
        return Opened(client)
    try:
        found = newest_whole(client, directory, output / LINKS)
    except BaseException:
        client.close()
        raise
    if found is None:
        return Opened(client)
    record = found.record
    return Opened(client, found, record["run"], record["began"], record["sequence"])


def check_memory_files() -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` where the system has none."""
    if not hasattr(os, "memfd_create"):
        raise OffloadConfigError("snapshot_steps cannot be used here: snapshots need Linux. Leave it out.")
